"""The worker groups of an embodied run and the flows that they execute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlinf.algorithms.registry import build_algorithm
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import EpisodeRecord
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.resharding import reshard
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.running_step import Arguments
from rlinf.flow.stage_worker import StageWorker
from rlinf.runners.embodied_config import COMPONENTS, EmbodiedConfig
from rlinf.runners.weight_handover import WeightHandover
from rlinf.runners.worker_system import WorkerSystem
from rlinf.workers.actor import ActorSetup, ActorWorker
from rlinf.workers.env import EnvSetup, EnvWorker, EvaluationReport, RolloutReport
from rlinf.workers.rollout import RolloutSetup, RolloutWorker


def training_flow(config: EmbodiedConfig) -> Flow:
    """One training step: environments and policy answer each other, then the actor trains."""
    del config  # every embodied run has the same
    flow = Flow("train")
    flow.loop(
        "rollout",
        Stage("env", "interact", inputs=("actions",), outputs=("observations", "trajectories")),
        Stage("rollout", "generate", inputs=("observations",), outputs=("actions",)),
        ahead=True,
    )
    flow.stage(
        "train",
        Stage("actor", "train", inputs=("trajectories",), replicated=("trajectories",)),
    )
    return flow


def evaluation_flow() -> Flow:
    """One evaluation: environments and policy answer each other until every episode has ended."""
    flow = Flow("evaluate")
    flow.loop(
        "evaluation",
        Stage("env", "evaluate", inputs=("actions",), outputs=("observations",)),
        Stage("rollout", "generate", inputs=("observations",), outputs=("actions",)),
    )
    return flow


class EmbodiedSystem(WorkerSystem):
    """Env, rollout and actor workers on a cluster; a context manager that ends them.

    Args:
        config: The run's configuration.
        training: Whether an actor is needed; evaluation goes without.
    """

    records = (Trajectory, RolloutReport, EpisodeRecord)

    def __init__(self, config: EmbodiedConfig, *, training: bool = True) -> None:
        super().__init__(config)
        self.config = config
        self._components = COMPONENTS if training else ("env", "rollout")
        self._with_actor = training
        self.env_spec: EnvSpec

    def _start(self) -> None:
        workers: dict[str, type[StageWorker]] = {
            "env": EnvWorker,
            "rollout": RolloutWorker,
            "actor": ActorWorker,
        }
        self._launch({name: (workers[name], self._setup(name)) for name in self._components})
        # Simulators and torch start at the same time; the policy is built once both are there.
        self.env_spec = self._groups["env"].start(training=self._with_actor).wait()[0]
        models = [self._groups[n].start(self.env_spec) for n in self._components if n != "env"]
        for handle in models:
            handle.wait()
        sources = self._plan.components["env"].processes * self.config.rollout.pipeline_stage_num
        self._evaluation = self._new_executor(evaluation_flow(), sources)
        if not self._with_actor:
            return
        depth = self.config.rollout.max_staleness + 1
        self._training = self._new_executor(training_flow(self.config), sources, depth=depth)
        receivers = self._plan.components["rollout"].processes
        self._weights = WeightHandover(
            partial(self._groups["actor"].send_weights, "rollout", receivers),
            partial(self._groups["rollout"].receive_weights, "actor", receivers),
        )

    def _setup(self, component: str) -> EnvSetup | RolloutSetup | ActorSetup:
        config = self.config
        if component == "env":
            return EnvSetup(
                train=config.env.train,
                evaluation=config.evaluation.environments(config.env.train),
                train_envs=config.env.num_envs,
                evaluation_envs=config.evaluation.num_envs,
                seed=config.seed,
                chunk_steps=config.chunk_steps,
                chunk=config.model.num_action_chunks,
                stages=config.rollout.pipeline_stage_num,
            )
        if component == "rollout":
            return RolloutSetup(
                model=config.model,
                value_dim=build_algorithm(config.algorithm, group_size=config.group_size).value_dim(
                    config.model.num_action_chunks
                ),
                seed=config.seed,
                block_size=config.rollout.block_size,
                total_envs=config.env.num_envs,
                shares_devices=self._plan.overlap(("env",), ("rollout",)),
            )
        return ActorSetup(
            model=config.model,
            algorithm=config.algorithm,
            actor=config.actor,
            seed=config.seed,
            samples=config.samples,
            total_steps=config.training_steps,
            group_size=config.group_size,
        )

    # -- what a runner does with it -------------------------------------------------------------

    def _arguments(self, step: int) -> Arguments:
        return {"rollout": {"step": step}, "actor": {"step": step}}

    def evaluate(self, episodes: Sequence[tuple[int, int]], *, frames: int = 0) -> EvaluationReport:
        """Play the given (episode id, seed) pairs with the policy's most likely actions.

        Args:
            episodes: What to play.
            frames: Environments, of all, to take pictures of.
        """
        report = self._evaluation.run(
            0,
            {
                "env": {"episodes": list(episodes), "frames": frames},
                "rollout": {"step": 0, "deterministic": True},
            },
        )
        whole = EvaluationReport()
        for part in report.results("env"):
            whole.episodes.extend(part.episodes)
            whole.frames.extend(part.frames)
        whole.episodes.sort(key=lambda record: record.episode_id)
        return whole

    def state(self) -> dict[str, Any]:
        """State of every worker, for a checkpoint."""
        envs, actor = self._groups["env"].state(), self._groups["actor"].state()
        return {"env": envs.wait(), "actor": actor.wait()[0]}

    def load_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Continue from :meth:`state`."""
        del checkpoint  # the state is whole
        workers = self._plan.components["env"].processes
        handles = [
            self._groups["env"].load_state(_divided(state["env"], workers)),
            self._groups["actor"].load_state(state["actor"]),
        ]
        for handle in handles:
            handle.wait()

    def load_policy(self, weights: dict[str, Any], version: int) -> None:
        """Give the rollout workers weights without an actor, for evaluation."""
        self._groups["rollout"].load_weights(weights, version).wait()

    def _closing(self) -> tuple[str, ...]:
        return ("env",)


def _divided(states: list[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """States of env workers for as many as there are now; every env goes on where it was."""
    envs = reshard([state["envs"] for state in states], workers)
    return [{"envs": part, "was_reset": states[0]["was_reset"]} for part in envs]
