"""The embodied task: a policy is trained in simulators, one rollout and one update at a time."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from rlinf.flow.graph import Flow, Stage
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_evaluation import PlayingTask
from rlinf.runners.task import Counts, Evaluated, Purpose
from rlinf.trainers.config import RowTrainerConfig
from rlinf.workers.config.acting import ActingConfig

if TYPE_CHECKING:
    from rlinf.flow.executor import Arguments, StepReport
    from rlinf.runners.run import Run
    from rlinf.workers.env import RolloutReport

ActingT = TypeVar("ActingT", bound=ActingConfig)

log = logging.getLogger(__name__)


@dataclass
class EpisodeCounts(Counts):
    """What an embodied run counts; whether an episode of it ever reported a failure; whether the
    last evaluation reached the rate that is enough, and which it reached."""

    env_steps: int = 0
    episodes: int = 0
    failed: bool = False
    solved: bool = False
    score: float = math.nan


class Acting(PlayingTask[ActingT]):
    """What tasks share in which a policy acts in simulators and is trained."""

    groups: ClassVar = {
        "env": "rlinf.workers.env:EnvWorker",
        "source": "rlinf.workers.source:DemonstrationsSource",
        "rollout": "rlinf.workers.rollout:RolloutWorker",
        "replay": "rlinf.workers.replay:ReplayWorker",
        "actor": "rlinf.workers.actor:ActorWorker",
    }
    changeable = (
        "runner", "cluster", "env.train.one_at_a_time", "evaluation.interval", "evaluation.start",
        "evaluation.stop_at_success", "evaluation.video_episodes", "weight_sync",
        "checkpoint", "logger", *(f"actor.{key}" for key in RowTrainerConfig.of_rounding),
    )  # fmt: skip
    figures: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("env-steps", "env/steps", ",.0f"),
        ("env-steps/s", "env/steps_per_second", ",.0f"),
        ("success", "env/success_once", ".3f"),
        ("eval success", "eval/success", ".3f"),
        ("return", "env/return", ".2f"),
    )

    def __init__(self, config: ActingT, directory: Path) -> None:
        super().__init__(config, directory)
        self.counts: EpisodeCounts = EpisodeCounts()

    @classmethod
    def collect(cls, flow: Flow) -> None:
        """Environments and policy answer each other, perhaps ahead of the training."""
        flow.loop(
            "rollout",
            Stage("env", "interact", inputs=("actions",), outputs=("observations", "trajectories")),
            Stage("rollout", "generate", inputs=("observations",), outputs=("actions",)),
            ahead=True,
        )

    steps = property(lambda self: self.config.training_steps)
    ahead = property(lambda self: self.config.rollout.max_staleness)
    sources = property(lambda self: self.config.sub_batches)
    evaluation_interval = property(lambda self: self.config.evaluation.interval)

    @property
    def finished(self) -> bool:
        """Whether the policy succeeds often enough, which a resumed run may see otherwise."""
        target, counts = self.config.evaluation.stop_at_success, self.counts
        return counts.solved and target is not None and not counts.score < target

    def arguments(self, step: int) -> Arguments:
        """All but the environments are told the number of the step."""
        return {name: {"step": step} for name in self.config.components if name != "env"}

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """What env and actor workers returned, and totals of the run."""
        rollouts: list[RolloutReport] = report.results("env")
        metrics: dict[str, float] = {}
        for name in self.config.components:
            result = report.results(name)[0] if name in report.stages else None
            metrics.update(result if isinstance(result, dict) else {})
        episodes = [e for r in rollouts for e in r.episodes if e.valid]
        # They end in another order on other workers: means would round in another way.
        episodes.sort(key=lambda episode: episode.episode_id)
        self.counts.env_steps += sum(r.env_steps for r in rollouts)
        self.counts.episodes += sum(r.ended for r in rollouts)
        faults = sum((r.faults + r.section_faults for r in rollouts), Counter[str]())
        self._tell_of_faults(rollouts)
        metrics.update(self.counts.add_faults(faults, "env"))
        self.counts.failed |= any(episode.fail_once for episode in episodes)
        fields = ["success_once", "success_at_end", "episode_return", "episode_len", "reward"]
        fields += ["fail_once"] if self.counts.failed else []  # most simulators report none
        for field in fields if episodes else ():
            name = "return" if field == "episode_return" else field
            metrics[f"env/{name}"] = float(np.mean([getattr(e, field) for e in episodes]))
        tasks = rollouts[0].tasks if rollouts else ()
        # An episode that is a chain of tasks is of none of them, though its record names the last.
        of_one = [] if rollouts and rollouts[0].chain_length else episodes
        if rollouts and (chains := rollouts[0].task_chains):
            of_one = [e for e in episodes if not chains[e.task]]
        for number, task in enumerate(tasks if len(tasks) > 1 else ()):
            if played := [e for e in of_one if e.task == number]:
                metrics[f"env/success/{task}"] = float(np.mean([e.success_once for e in played]))
                metrics[f"env/return/{task}"] = float(np.mean([e.episode_return for e in played]))
            resets = sum(r.task_resets[number] for r in rollouts if r.task_resets is not None)
            names = ("failed_resets", "", "left_out")
            for name, count in zip(names, np.asarray(resets).tolist(), strict=True):
                if name and count:
                    metrics[f"env/{name}/{task}"] = float(count)
        metrics["env/steps"] = float(self.counts.env_steps)
        metrics["env/episodes"] = float(self.counts.episodes)
        metrics["env/steps_per_second"] = self.config.env_steps_per_rollout / seconds
        metrics.update({f"time/{name}": report.seconds(name) for name in report.stages})
        return metrics

    def _tell_of_faults(self, rollouts: Sequence[RolloutReport]) -> None:
        """Warn of what a run sees for the first time."""
        first = {reason: found for r in rollouts for reason, found in r.first_faults.items()}
        for reason, (env, told) in first.items():
            if reason not in self.counts.faults:
                follows = f"and its episode is not trained on: env {env}"
                if env < 0:
                    follows = "with no env at work, and its process is replaced"
                log.warning("A simulator failed (%s), %s: %s", reason, follows, told)

    def evaluate(self, run: Run, purpose: Purpose) -> Evaluated | None:
        """Play episodes; training ends once the policy succeeds often enough."""
        found = super().evaluate(run, purpose)
        target = self.config.evaluation.stop_at_success
        if found is not None and purpose == "periodic":
            self.counts.score = found.score
            self.counts.solved = target is not None and found.score >= target
        return found

    def conclude(self, run: Run) -> None:
        """Final evaluation on held-out episodes, policy weights, learning curve and video."""
        seconds = run.state.training_seconds
        print(f"training: {self.counts.env_steps} env steps in {seconds:.1f} s")
        if faults := {k: n for k, n in self.counts.faults.items() if "/" not in k}:
            counted = ", ".join(f"{reason} {count}" for reason, count in sorted(faults.items()))
            print(f"faults of the simulator: {counted}; {self.counts.episodes} episodes without")
        self.evaluator.leave_policy(run)
        run.show_curve()

    def progress(self) -> dict[str, Any]:
        """Environment steps so far."""
        return {"env_steps": self.counts.env_steps}


class Embodied(Acting[EmbodiedConfig]):
    """Trains a policy on what it has just done."""

    config_class = EmbodiedConfig
    figures = (
        *Acting.figures,
        ("KL", "actor/approx_kl", ".4f"),
        ("explained variance", "critic/explained_variance", ".3f"),
    )

    @classmethod
    def step(cls, flow: Flow, config: EmbodiedConfig) -> None:
        """Environments and policy answer each other, then the actor trains, perhaps beside what
        was recorded."""
        cls.collect(flow)
        edges: tuple[str, ...] = ("trajectories",)
        if config.demonstrations is not None:
            flow.stage("draw", Stage("source", "draw", outputs=("demonstrations",)), ahead=True)
            edges = ("trajectories", "demonstrations")
        flow.stage("train", Stage("actor", "train", edges, replicated=edges))
