"""The recipe of an off-policy run: a policy acts, a replay remembers, a learner draws from it.

Batch vocabulary: *environments* × chunk steps of a rollout → *transitions* → *replay* → *global
batch* (one optimizer step of each loss) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.algorithms.config import SACConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_divisors, nearest_multiples
from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.workers.acting_config import ActingConfig, AlgorithmSection

COMPONENTS = ("env", "rollout", "replay", "actor")


class ReplayConfig(StrictModel):
    """What is remembered, and when learning from it begins."""

    capacity: int = Field(default=1_000_000, ge=1)
    """Transitions that are kept; the oldest make room."""
    start_steps: int = Field(default=5_000, ge=0)
    """Environment steps, over all environments, that are taken with uniformly random actions;
    training begins after them."""


class LearnerConfig(TrainerConfig):
    """How policy, Q functions and temperature are trained on batches of transitions."""

    global_batch_size: int = Field(default=256, ge=1)
    """Transitions of one optimizer step, over all data-parallel ranks."""
    optim: OptimizerConfig = OptimizerConfig(lr=3e-4, eps=1e-8, max_grad_norm=None)
    """Optimizer of the policy."""
    critic_optim: OptimizerConfig | None = None
    """Optimizer of the Q functions; null: as `optim`."""
    temperature_optim: OptimizerConfig | None = None
    """Optimizer of the temperature; null: as `optim`."""

    @model_validator(mode="after")
    def _check_passes(self) -> Self:
        if self.update_epoch != 1:
            raise illegal(
                "update_epoch",
                "has no effect: batches are drawn from the replay, not passed over",
                hint="nearest: 1; for more updates raise algorithm.update_to_data",
            )
        return self

    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Settings of the modules that have their own."""
        own = {"critic": self.critic_optim, "temperature": self.temperature_optim}
        return {name: optim for name, optim in own.items() if optim is not None}
