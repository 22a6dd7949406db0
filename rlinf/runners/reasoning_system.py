"""The worker groups of a reasoning run and the flows that they execute."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf.data.sequences import PromptGroup
from rlinf.engines.config import SamplingConfig
from rlinf.flow.executor import Executor, StepReport
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.stage_worker import StageWorker
from rlinf.models.language_config import LanguageModelConfig
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.worker_system import WorkerSystem
from rlinf.weight_sync.protocol import Parties
from rlinf.workers.generation import Drawn, GenerationReport, GenerationSetup, GenerationWorker
from rlinf.workers.language_actor import LanguageActorSetup, LanguageActorWorker
from rlinf.workers.reward import RewardSetup, RewardWorker


def training_flow() -> Flow:
    """One training step: groups are generated and scored until every slot has one to train on."""
    flow = Flow("train")
    flow.loop(
        "rollout",
        Stage("rollout", "generate", inputs=("scored",), outputs=("completions", "groups")),
        Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
    )
    flow.stage("train", Stage("actor", "train", inputs=("groups",), replicated=("groups",)))
    return flow


def evaluation_flow() -> Flow:
    """One evaluation: completions of validation prompts are generated and scored."""
    flow = Flow("evaluate")
    flow.loop(
        "evaluation",
        Stage("rollout", "evaluate", inputs=("scored",), outputs=("completions",)),
        Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
    )
    return flow


class ReasoningSystem(WorkerSystem):
    """Generation, reward and actor workers on a cluster; a context manager that ends them.

    Args:
        config: The run's configuration.
        model: Directory of the model that every worker loads.
        failures: Directory for batches that could not be trained on.
    """

    def __init__(self, config: ReasoningConfig, model: LanguageModelConfig, failures: Path) -> None:
        super().__init__(config)
        self.config = config
        self._model = model
        self._failures = failures
        self._parties = Parties(
            sender="actor", receiver="rollout", receivers=config.world_size("rollout")
        )
        self._steps: dict[tuple[str, int], Executor] = {}
        self.parameters = 0

    def _start(self) -> None:
        workers: dict[str, type[StageWorker]] = {
            "rollout": GenerationWorker,
            "reward": RewardWorker,
            "actor": LanguageActorWorker,
        }
        self._launch({name: (workers[name], self._setup(name)) for name in self.config.components})
        several = self.config.world_size("actor") > 1
        meeting = self._failures.parent / f".rendezvous-{uuid.uuid4().hex}"
        started = {
            name: group.start(f"file://{meeting.resolve()}")
            if name == "actor" and several
            else group.start()
            for name, group in self._groups.items()
        }
        for name, handle in started.items():
            found = handle.wait()
            if name == "actor":
                self.parameters = found[0]["parameters"]

    def _setup(self, component: str) -> GenerationSetup | RewardSetup | LanguageActorSetup:
        config = self.config
        if component == "rollout":
            return GenerationSetup(
                model=self._model,
                engine=config.rollout.engine,
                sampling=config.rollout.sampling,
                algorithm=config.algorithm,
                group_size=config.rollout.group_size,
                seed=config.seed,
                weight_sync=config.weight_sync,
                parties=self._parties,
            )
        if component == "reward":
            return RewardSetup(reward=config.reward, model=self._model)
        return LanguageActorSetup(
            model=self._model,
            algorithm=config.algorithm,
            actor=config.actor,
            critic=config.critic,
            temperature=config.rollout.sampling.temperature,
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._failures,
            weight_sync=config.weight_sync,
            parties=self._parties,
        )

    def _executor(self, flow: Flow, sources: int) -> Executor:
        """The executor of a flow whose items are numbered by so many slots."""
        key = (flow.name, sources)
        if key not in self._steps:
            self._steps[key] = self._new_executor(flow, sources)
        return self._steps[key]

    # -- what a runner does with it -------------------------------------------------------------

    def sync_weights(self) -> int:
        """Bring the actor's weights to every generation worker; returns their version."""
        received = self._groups["rollout"].receive_weights()
        self._groups["actor"].send_weights().wait()
        return int(received.wait()[0])

    def train_step(
        self, step: int, prompts: Sequence[Drawn], spares: Sequence[Drawn]
    ) -> StepReport:
        """Generate, score and train.

        Args:
            step: Number of the step.
            prompts: One prompt for each slot.
            spares: Prompts that take the places of those whose groups are not worth training on.
        """
        return self._executor(training_flow(), len(prompts)).run(
            step,
            {"rollout": {"prompts": prompts, "spares": spares}, "actor": {"step": step}},
        )

    def evaluate(
        self, prompts: Sequence[Drawn], seeds: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[PromptGroup]:
        """Scored completions of some prompts, in their order.

        Args:
            prompts: What is answered.
            seeds: Of the completions of each prompt, equally many.
            sampling: How tokens are drawn.
        """
        report = self._executor(evaluation_flow(), len(prompts)).run(
            0, {"rollout": {"prompts": prompts, "seeds": seeds, "sampling": sampling}}
        )
        parts: list[GenerationReport] = report.results("rollout")
        return [group for part in parts for group in part.groups]

    def state(self) -> dict[str, Any]:
        """State of every worker, for a checkpoint."""
        return {"actor": self._groups["actor"].state().wait()[0]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._groups["actor"].load_state(state["actor"]).wait()

    def save_model(self, directory: Path) -> None:
        """Write the trained model in the format of transformers."""
        self._groups["actor"].save_model(directory).wait()

    def _closing(self) -> tuple[str, ...]:
        return self.config.components
