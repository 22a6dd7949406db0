"""Configuration of the trainer; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rlinf.config.base import StrictModel


class OptimizerConfig(StrictModel):
    """AdamW and its gradient clipping."""

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the policy."""
    value_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the value network; null: the same as `lr`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-5, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradients are scaled down to this global L2 norm; null: no clipping."""


class LearningRateScheduleConfig(StrictModel):
    """How the learning rates change over the run; stepped once per training phase."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training phases over which the rate rises linearly from 0."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Rate at the end of the run as a fraction of the full rate."""

    def factor(self, step: int, total_steps: int) -> float:
        """Multiplier of the learning rates in training phase `step` (from 0) of `total_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.type == "constant":
            return 1.0
        span = max(1, total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        decay = cosine if self.type == "cosine" else 1 - progress
        return self.final_fraction + (1 - self.final_fraction) * decay


class ActorConfig(StrictModel):
    """How the policy is trained on one rollout."""

    global_batch_size: int = Field(ge=1)
    """Samples of one optimizer step, over all data-parallel ranks."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Samples of one forward and backward pass; null: the global batch divided by the ranks."""
    update_epoch: int = Field(default=1, ge=1)
    """Passes over the samples of a rollout."""
    optim: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    lr_sched: LearningRateScheduleConfig = LearningRateScheduleConfig()
    """Learning-rate schedule."""
    target_kl: float | None = Field(default=None, gt=0)
    """The phase ends early once the approximate KL of a global batch passes this; null: never."""
    first_update_kl_bound: float = Field(default=1e-6, gt=0)
    """Largest KL between rollout and trainer policy in the first update after a weight
    synchronisation, where both hold the same weights; a larger one stops the run."""
    first_update_ratio_bound: float = Field(default=1e-3, gt=0)
    """Largest distance of a probability ratio from 1 there."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Optimizer steps that may be skipped for a gradient that is not finite, in one phase and in a
    row over phases."""
