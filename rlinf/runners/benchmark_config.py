"""The recipe of an evaluation on a published benchmark: questions, model, rewards, samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.checkpoint.config import CheckpointConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.data.prompts.config import BenchmarkConfig
from rlinf.engines import registry as engines
from rlinf.engines.config import EngineConfig, HFEngineConfig, SamplingConfig
from rlinf.flow.placed_config import PlacedConfig, RunnerConfig
from rlinf.models.language_config import LanguageModelConfig
from rlinf.monitor.config import LoggerConfig
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.correctness import CorrectnessConfig

COMPONENTS = ("rollout", "reward")


class BenchmarkRolloutConfig(StrictModel):
    """How questions are answered."""

    samples: int = Field(default=1, ge=1)
    """n, completions of each question."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    engine: Annotated[EngineConfig, Component(engines.REGISTRY)] = HFEngineConfig()
    """What generates."""


class BenchmarkRunConfig(CorrectnessConfig, PlacedConfig):
    """An evaluation of a model on a published benchmark."""

    task: Literal["benchmark"]
    """Which runner executes the recipe."""
    runner: RunnerConfig = RunnerConfig()
    """Where the result is written."""
    benchmark: BenchmarkConfig
    """The questions."""
    model: LanguageModelConfig
    """What answers: a directory with a model, such as `model` of a run."""
    rollout: BenchmarkRolloutConfig = BenchmarkRolloutConfig()
    reward: RewardConfig
    """What tells right from wrong."""

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the evaluation."""
        return COMPONENTS

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show what is sampled."""
        questions = "all" if self.benchmark.limit is None else f"the first {self.benchmark.limit}"
        return [
            ("benchmark", f"{self.benchmark.format}, {self.benchmark.path}"),
            ("questions", questions),
            ("completions", f"{self.rollout.samples} of each question"),
            ("new tokens", f"up to {self.rollout.sampling.max_new_tokens} per completion"),
        ]

    @model_validator(mode="after")
    def _rules(self) -> BenchmarkRunConfig:
        self.check_cluster()
        for problem in self._problems():
            raise problem
        return self

    def _problems(self) -> Iterator[PydanticCustomError]:
        yield from self.correctness_problems(self.reward)
        if self.rollout.sampling.greedy and self.rollout.samples > 1:
            yield illegal(
                "rollout.samples",
                f"{self.rollout.samples} greedy completions are all the same",
                hint="nearest: 1, or sampling.greedy: false",
            )
        for section in ("lora", "architecture"):
            if getattr(self.model, section) is not None:
                yield illegal(f"model.{section}", "has no effect here", hint="leave it out")
        without_effect = {
            "checkpoint": self.checkpoint != CheckpointConfig(),
            "logger": self.logger != LoggerConfig(),
            "cluster.plan": self.auto_plan is not None,
            "runner.timeline": self.runner.timeline,
        }
        for key in (key for key, given in without_effect.items() if given):
            yield illegal(key, "has no effect on an evaluation", hint="leave it out")
