"""The recipe of an embodied run: policy, environments, batches, and where they run.

Batch vocabulary: *environments* × chunk steps of a rollout → *samples* → *global batch* (one
optimizer step) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_divisors, nearest_multiples
from rlinf.flow.planning_traits import PlanningTraits
from rlinf.workers.config.acting import OnPolicyConfig
from rlinf.workers.config.acting_traits import acting_traits

COMPONENTS = ("env", "rollout", "actor")


class EmbodiedConfig(OnPolicyConfig):
    """A run that trains a policy in simulators."""

    task: Literal["embodied"]
    """Which runner executes the recipe."""

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return COMPONENTS

    # -- derived sizes --------------------------------------------------------------------------

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how environments become samples, batches and updates."""
        batch, micro = self.actor.global_batch_size, self.micro_batch_size
        updates = self.samples // batch * self.actor.update_epoch
        groups = self.env.num_envs // self.group_size
        return [
            ("environments", f"{groups} groups × {self.group_size} = {self.env.num_envs}"),
            ("steps per rollout", f"{self.rollout.steps} ({self.chunk_steps} chunk steps)"),
            ("samples per rollout", f"{self.env.num_envs} × {self.chunk_steps} = {self.samples}"),
            ("global batch", f"{batch} samples, {self.samples // batch} per epoch"),
            ("micro batch", f"{micro} samples, {batch // micro} per global batch"),
            (
                "updates per step",
                f"{self.actor.update_epoch} epochs × {self.samples // batch} = {updates}",
            ),
            ("training steps", f"{self.training_steps} ({self.runner.total_env_steps} env steps)"),
        ]

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward and backward pass."""
        actor = self.actor
        return actor.micro_batch_size or actor.global_batch_size // self.world_size("actor")

    @property
    def planning(self) -> PlanningTraits:
        """What planning and profiling must know of the recipe."""
        # A rank's share of the global batch is trained on in whole micro batches.
        pieces = self.actor.global_batch_size // (self.actor.micro_batch_size or 1)
        ranks = [n for n in range(1, pieces + 1) if pieces % n == 0]
        return acting_traits(self, ranks=ranks, micro_batch=self.micro_batch_size)

    # -- rules between sections -----------------------------------------------------------------

    @model_validator(mode="after")
    def _rules(self) -> EmbodiedConfig:
        self.check_cluster()
        problems = (
            *self.acting_problems(), *self._replay_problems(), *self._batch_problems(),
            *self._group_problems(),
        )  # fmt: skip
        for problem in problems:
            raise problem
        return self

    def _batch_problems(self) -> Iterator[PydanticCustomError]:
        batch, ranks = self.actor.global_batch_size, self.world_size("actor")
        if self.samples % batch:
            yield illegal(
                "actor.global_batch_size",
                f"does not divide {self.samples} samples "
                f"({self.env.num_envs} environments × {self.chunk_steps} chunk steps)",
                hint=f"nearest: {join_choices(nearest_divisors(self.samples, batch))}",
            )
        if batch % ranks:
            yield illegal(
                "actor.global_batch_size",
                f"does not divide over {ranks} actor ranks",
                hint=f"nearest: {join_choices(nearest_multiples(ranks, batch))}",
            )
        micro = self.actor.micro_batch_size
        if micro is not None and (batch // ranks) % micro:
            yield illegal(
                "actor.micro_batch_size",
                f"does not divide the {batch // ranks} samples of a rank",
                hint=f"nearest: {join_choices(nearest_divisors(batch // ranks, micro))}",
            )

    def _replay_problems(self) -> Iterator[PydanticCustomError]:
        if self.algorithm.needs_replay:
            yield illegal(
                "algorithm.type",
                f"{self.algorithm.type} learns from a replay, which this task does not have",
                hint="nearest: ppo, or task: off_policy",
            )

    def _group_problems(self) -> Iterator[PydanticCustomError]:
        if self.algorithm.needs_groups and self.group_size < 2:
            yield illegal(
                "env.train.group_size",
                f"is {self.group_size}, but {self.algorithm.type} compares environments that start "
                "from equal states",
                hint="at least 2",
            )
        horizon = self.env.train.max_episode_steps
        if self.algorithm.needs_groups and self.rollout.steps % horizon:
            yield illegal(
                "rollout.steps",
                f"{self.algorithm.type} compares whole episodes of up to {horizon} steps, which a "
                "rollout of this length would cut",
                hint=f"nearest: {join_choices(nearest_multiples(horizon, self.rollout.steps))}",
            )
