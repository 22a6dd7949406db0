"""A gradient bandit (Sutton & Barto, 2018, §2.8) as a task of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rlinf.flow.executor import Arguments, StepReport
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.placed_config import PlacedConfig, RunnerConfig
from rlinf.flow.planning_traits import (
    ComponentConstraint,
    Constraints,
    PlanningTraits,
    Trial,
    timed_sections,
)
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.runners.run import Run
from rlinf.runners.task import Task
from rlinf.workers.context import WorkerContext


class BanditRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_steps: int = Field(ge=1)
    """Training steps."""


class BanditConfig(PlacedConfig):
    """A run that learns which arm of a bandit pays best."""

    task: Literal["bandit"]
    runner: BanditRunnerConfig
    payoffs: tuple[float, ...] = Field(min_length=2)
    """Mean reward of each arm; what is paid has standard deviation 1."""
    pulls: int = Field(default=64, ge=1)
    """Pulls of a training step."""
    lr: float = Field(default=0.1, gt=0)
    """Step size of the preferences."""
    max_staleness: int = Field(default=0, ge=0)
    """Updates that may lie between the preferences that pull and their update."""

    @property
    def components(self) -> tuple[str, ...]:
        """Who pulls, and who learns."""
        return ("player", "learner")

    @property
    def planning(self) -> PlanningTraits:
        """The items are pulls; one process learns from all of a step."""
        learner = ComponentConstraint(processes=(1,), streams=False, residency="resident")
        player = ComponentConstraint(processes=(1,), residency="resident")
        return PlanningTraits(
            items=self.pulls,
            constraints=Constraints(
                items=self.pulls,
                granularities=(self.pulls,),
                staleness=self.max_staleness,
                components={"player": player, "learner": learner},
            ),
            trials=self._trials,
            concurrent=frozenset(),
            packages=("numpy",),
            sections=timed_sections(self, ("payoffs",)),
            worst_case=("runner.total_steps=1",),
            memory_knobs=(),
        )

    def _trials(self, first: int, count: int) -> tuple[Trial, ...]:
        """One process plays wherever it is: fewer pulls are all that is worth measuring."""
        del first, count
        return (Trial("half as many pulls", (f"pulls={max(1, self.pulls // 2)}",)),)


def chances(preferences: np.ndarray) -> np.ndarray:
    """[arms] chance of each arm: the softmax of the preferences."""
    powers = np.exp(preferences - preferences.max())
    return powers / powers.sum()


class Player(StageWorker):
    """Pulls arms as often as they are preferred."""

    def __init__(self, config: BanditConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config = config

    def start(self) -> None:
        """Know nothing yet."""
        self._preferences = np.zeros(len(self._config.payoffs))

    def receive_weights(self) -> int:
        """Take the preferences of the learner; returns their version."""
        self._preferences, version = self.recv("learner", 0)
        return int(version)

    def pull(self, *, step: int) -> Iterator[Emit]:
        """Stage: the arms that were pulled, and what they paid."""
        config = self._config
        random = np.random.default_rng((config.seed, step))
        arms = random.choice(len(config.payoffs), config.pulls, p=chances(self._preferences))
        yield Emit("pulls", 0, (arms, random.normal(np.array(config.payoffs)[arms])))


class Learner(StageWorker):
    """Prefers arms that pay more than the mean."""

    def __init__(self, config: BanditConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config = config

    def start(self) -> None:
        """Know nothing yet."""
        self._preferences, self._version = np.zeros(len(self._config.payoffs)), 0

    def learn(self, pulls: InputStream) -> Iterator[Emit]:
        """Stage: E[(r − r̄)(1 − π)] is added to the preferences; returns metrics."""
        ((arms, rewards),) = (item.payload for item in pulls)
        advantages = rewards - rewards.mean()
        taken = np.eye(len(self._preferences))[arms]
        self._preferences = self._preferences + self._config.lr * (
            advantages @ (taken - chances(self._preferences))
        ) / len(arms)
        self._version += 1
        yield from ()
        return {"bandit/reward": float(rewards.mean())}

    def send_weights(self) -> int:
        """Give the player the preferences; returns their version."""
        self.send((self._preferences, self._version), "player", 0)
        return self._version

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"preferences": self._preferences, "version": self._version}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from it."""
        self._preferences, self._version = state["preferences"], state["version"]


class Bandit(Task[BanditConfig]):
    """Learns which arm of a bandit pays best."""

    config_class = BanditConfig
    groups: ClassVar = {"player": Player, "learner": Learner}
    weights = ("learner", "player")
    figures = (("reward", "bandit/reward", ".3f"),)

    def __init__(self, config: BanditConfig, directory: Path) -> None:
        super().__init__(config, directory)
        self._pulls = 0

    @classmethod
    def step(cls, flow: Flow, config: BanditConfig) -> None:
        """The player pulls, then the learner learns."""
        flow.stage("rollout", Stage("player", "pull", outputs=("pulls",)), ahead=True)
        flow.stage("train", Stage("learner", "learn", inputs=("pulls",)))

    @property
    def steps(self) -> int:
        """Of the run."""
        return self.config.runner.total_steps

    @property
    def ahead(self) -> int:
        """The player may be ahead of the learner."""
        return self.config.max_staleness

    def arguments(self, step: int) -> Arguments:
        """What is drawn depends on the number of the step."""
        return {"player": {"step": step}}

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """What the learner returned, times, and the pulls so far."""
        self._pulls += self.config.pulls
        found = super().metrics(report, step=step, seconds=seconds)
        return found | {"bandit/pulls": float(self._pulls)}

    def conclude(self, run: Run) -> None:
        """Say which arm it is."""
        best = int(np.argmax(run.groups.state()["learner"]["preferences"]))
        print(f"after {self._pulls} pulls arm {best} is preferred")

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        return {"pulls": self._pulls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from it."""
        self._pulls = state["pulls"]
