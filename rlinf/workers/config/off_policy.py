"""The recipe of an off-policy run: a policy acts, a replay remembers, a learner draws from it.

Batch vocabulary: *environments* × chunk steps of a rollout → *transitions* → *replay* → *global
batch* (one optimizer step of each loss) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.algorithms.config import SoftActorCriticConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.effects import unused
from rlinf.trainers.config import OptimizerConfig, RowTrainerConfig
from rlinf.workers.config.acting import ActingConfig, rank_problems


class ReplayConfig(StrictModel):
    """What is remembered, and when learning from it begins."""

    capacity: int = Field(default=1_000_000, ge=1)
    """Transitions that are kept; the oldest make room."""
    start_steps: int = Field(default=5_000, ge=0)
    """Environment steps, over all environments, that are taken with uniformly random actions;
    training begins after them."""


class OffPolicyOptimizerConfig(OptimizerConfig):
    """That of policies, Q functions and temperatures, whose gradients are not clipped."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Gradients are scaled down to this global L2 norm; null: no clipping."""


class LearnerConfig(RowTrainerConfig):
    """How policy, Q functions and temperature are trained on batches of transitions."""

    global_batch_size: int = Field(default=256, ge=1)
    """Transitions of one optimizer step, over all data-parallel ranks."""
    optim: OffPolicyOptimizerConfig = OffPolicyOptimizerConfig()
    """Optimizer of the policy."""
    critic_optim: OffPolicyOptimizerConfig | None = None
    """Optimizer of the Q functions; null: as `optim`."""
    temperature_optim: OffPolicyOptimizerConfig | None = None
    """Optimizer of the temperature; null: as `optim`."""

    @model_validator(mode="after")
    def _check_passes(self) -> Self:
        if self.update_epoch != 1:
            raise illegal(
                "update_epoch",
                "has no effect: batches are drawn from the replay, not passed over",
                hint=f"nearest: 1; for {self.update_epoch} updates after each rollout write "
                f"algorithm.update_to_data: {self.update_epoch} / transitions of a rollout",
            )
        return self


class OffPolicyConfig(ActingConfig):
    """A run that learns from transitions of all its rollouts."""

    task: Literal["off_policy"]
    """Which runner executes the recipe."""
    replay: ReplayConfig = ReplayConfig()
    actor: LearnerConfig = LearnerConfig()

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return ("env", "rollout", "replay", "actor")

    @property
    def keeps_next_observations(self) -> bool:
        """A transition holds what followed."""
        return True

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Settings of modules that are not trained by ``actor.optim``."""
        own = {"critic": self.actor.critic_optim, "temperature": self.actor.temperature_optim}
        return {name: optim for name, optim in own.items() if optim is not None}

    # -- derived sizes --------------------------------------------------------------------------

    def acts_at_random(self, step: int) -> bool:
        """Whether the rollout of a step is taken with uniformly random actions."""
        return step * self.env_steps_per_rollout < self.replay.start_steps

    def updates(self, step: int) -> int:
        """Global batches that are due after the rollout of a step; none while it is random."""
        if self.acts_at_random(step):
            return 0
        return self._due(step + 1) - self._due(step)

    def _due(self, rollouts: int) -> int:
        assert isinstance(self.algorithm, SoftActorCriticConfig)
        return int(rollouts * self.samples * self.algorithm.update_to_data)

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how environments become transitions, batches and updates."""
        batch, micro, envs = self.actor.global_batch_size, self.micro_batch_size, self.env.num_envs
        first = next(s for s in range(self.training_steps + 1) if not self.acts_at_random(s))
        return [
            ("environments", f"{envs}"),
            *self.section_table(),
            ("steps per rollout", f"{self.rollout.steps} ({self.chunk_steps} chunk steps)"),
            ("transitions per rollout", f"{envs} × {self.chunk_steps} = {self.samples}"),
            ("random rollouts", f"{first}, {first * self.env_steps_per_rollout} env steps"),
            ("replay", f"the newest {self.replay.capacity} transitions"),
            ("updates per step", f"{self.updates(first)}, then as many on average"),
            ("global batch", f"{batch} transitions"),
            ("micro batch", f"{micro} transitions, {batch // micro} per global batch"),
            ("training steps", f"{self.training_steps} ({self.runner.total_env_steps} env steps)"),
        ]

    # -- rules between sections -----------------------------------------------------------------

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        yield from super().problems()
        if self.replay.capacity < self.samples:
            yield illegal(
                "replay.capacity",
                f"is less than the {self.samples} transitions of one rollout",
                hint=f"nearest: {self.samples}",
            )
        total = self.training_steps * self.env_steps_per_rollout
        if self.replay.start_steps >= total:
            yield illegal(
                "replay.start_steps",
                f"leaves nothing of {total} environment steps for training",
                hint=f"nearest: {total - self.env_steps_per_rollout}",
            )
        yield from self._learning_problems()
        if not self.algorithm.needs_replay:
            yield illegal(
                "algorithm.type",
                f"{self.algorithm.type} learns from the newest rollout, not from a replay",
                hint="nearest: sac, or task: embodied",
            )
        yield from self.algorithm.model_problems(self.model)
        if self.model.q_implementation is None:
            why = f"{self.model.type} has no Q functions"
            if self.model.type.endswith("cnn"):
                why += ", as no model that is trained from pictures"
            near = "steered" if self.model.steered_with else "squashed_mlp"
            yield illegal("model.type", why, hint=f"nearest: {near}")
        if self.model.steers and self.actor.lora is not None:
            yield illegal(
                "actor.lora",
                "would adapt what is frozen; what steers it is small and trained whole",
                hint="nearest: null",
            )
        if self.world_size("replay") > 1:
            yield illegal(
                "cluster.component_placement",
                f"places {self.world_size('replay')} replay workers, but there is one memory",
                hint="nearest: replay on one device",
            )
        yield from rank_problems(self.actor, self.world_size("actor"), "transitions")

    def problems_of_training(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems_of_training`."""
        if not self.auto_reset:
            yield illegal(
                f"{next(iter(self.env.sections))}.auto_reset",
                "lets an environment that has finished wait for the end of the rollout, by whose "
                "steps random actions and updates are counted",
                hint="nearest: true",
            )
        yield from super().problems_of_training()

    def _learning_problems(self) -> Iterator[PydanticCustomError]:
        """What stands against how much is learnt, and by which optimizers."""
        algorithm, steps = self.algorithm, self.training_steps
        if not isinstance(algorithm, SoftActorCriticConfig):
            return  # said elsewhere
        begun = next((step for step in range(steps) if not self.acts_at_random(step)), None)
        if begun is not None and self._due(steps) == self._due(begun):
            learnt = (steps - begun) * self.samples
            scale = 10 ** (len(str(learnt)) + 1)  # two digits or three, rounded up
            yield illegal(
                "algorithm.update_to_data",
                f"gives no update for the {learnt} transitions after the random ones",
                hint=f"nearest: {math.ceil(scale / learnt) / scale}",
            )
        for name, optim in self.optimizers.items():
            at, without = f"actor.{name}_optim.", "algorithm.type: ppo"
            yield from unused(optim, ["value_lr"], without=without, at=at)
        if not algorithm.learn_temperature and self.actor.temperature_optim is not None:
            yield illegal(
                "actor.temperature_optim",
                "has no effect without algorithm.learn_temperature: true",
                hint="write algorithm.learn_temperature: true, or leave it at null",
            )
