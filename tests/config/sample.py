"""A small config tree with every kind of field, for the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.nearest import join_choices, nearest_divisors
from rlinf.config.registry import Registry


class Algorithm(StrictModel):
    """What every algorithm has."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount per step."""


class Ppo(Algorithm):
    """Clipped policy gradient."""

    type: Literal["ppo"]
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Weight of longer returns.

    1 is the plain return."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    clip: float | None = None
    target: int | Literal["auto"] = "auto"


class Grpo(Algorithm):
    """Group-relative advantages."""

    type: Literal["grpo"]
    group_size: int = Field(ge=2)
    """Trajectories per group."""


CLASSES = {"ppo": f"{__name__}:Ppo", "grpo": f"{__name__}:Grpo"}
REGISTRY = Registry("algorithm", "rlinf.tests.algorithms", CLASSES, Algorithm)


class Optimizer(StrictModel):
    """Gradient steps."""

    learning_rate: float = Field(default=3e-4, gt=0)
    """Step size."""
    hidden: tuple[int, ...] = (64, 64)
    """Units per layer."""
    pairs: tuple[tuple[int, float], ...] = ()
    warm_start: Path | None = None
    fused: bool = False


class Recipe(StrictModel):
    """The whole config."""

    seed: int = Field(ge=0)
    """Seed of everything."""
    samples: int = 800
    global_batch_size: int = 200
    name: str = "run"
    optimizer: Optimizer = Optimizer()
    algorithm: Annotated[Algorithm, Component(REGISTRY)]
    limits: dict[str, tuple[int, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _batches(self) -> Self:
        if self.samples % self.global_batch_size:
            nearest = nearest_divisors(self.samples, self.global_batch_size)
            raise illegal(
                "global_batch_size",
                f"does not divide {self.samples} samples",
                hint=f"nearest: {join_choices(nearest)}",
            )
        return self


GOOD = {"seed": 1, "algorithm": {"type": "ppo"}}
