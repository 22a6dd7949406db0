"""The recipe of an embodied run: policy, environments, batches, and where they run.

Batch vocabulary: *environments* × chunk steps of a rollout → *samples* → *global batch* (one
optimizer step) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic_core import PydanticCustomError

from rlinf.algorithms.base_config import PolicyConfig
from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_multiples
from rlinf.trainers.config import ActorConfig
from rlinf.workers.config.acting import ActingConfig, rank_problems
from rlinf.workers.config.supervised import CoTrainingConfig, objective_problems


class EmbodiedConfig(ActingConfig):
    """A run in which a policy is trained on what it has just done."""

    task: Literal["embodied"]
    """Which runner executes the recipe."""
    actor: ActorConfig
    demonstrations: CoTrainingConfig | None = None
    """Recorded episodes that the policy goes on imitating; null: none."""

    def check(self) -> None:
        """Look also whether a teacher judges what the model does."""
        super().check()
        teacher = getattr(self.algorithm, "teacher", None)
        if teacher is not None:
            self.model.check_teacher(teacher, key="algorithm.teacher")

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return ("env", "rollout", *self.placed_by_default, "actor")

    @property
    def placed_by_default(self) -> tuple[str, ...]:
        """What hands out demonstrations."""
        return () if self.demonstrations is None else ("source",)

    @property
    def needs_values(self) -> bool:
        """Whether the algorithm does."""
        return self.algorithm.needs_values

    @property
    def value_dim(self) -> int:
        """V, values per chunk that the algorithm needs."""
        algorithm = self.algorithm.build(group_size=self.group_size)
        return algorithm.value_dim(self.model.num_action_chunks)

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how environments become samples, batches and updates."""
        batch, micro = self.actor.global_batch_size, self.micro_batch_size
        updates = self.samples // batch * self.actor.update_epoch
        groups = self.env.num_envs // self.group_size
        return [
            ("environments", f"{groups} groups × {self.group_size} = {self.env.num_envs}"),
            ("steps per rollout", f"{self.rollout.steps} ({self.chunk_steps} chunk steps)"),
            *self.section_table(),
            ("samples per rollout", f"{self.env.num_envs} × {self.chunk_steps} = {self.samples}"),
            ("global batch", f"{batch} samples, {self.samples // batch} per epoch"),
            ("micro batch", f"{micro} samples, {batch // micro} per global batch"),
            (
                "updates per step",
                f"{self.actor.update_epoch} epochs × {self.samples // batch} = {updates}",
            ),
            ("training steps", f"{self.training_steps} ({self.runner.total_env_steps} env steps)"),
        ]

    # -- rules between sections -----------------------------------------------------------------

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        yield from super().problems()
        name = self.algorithm.type
        if self.algorithm.needs_replay:
            yield illegal(
                "algorithm.type",
                f"{name} learns from a replay, which this task does not have",
                hint="nearest: ppo, or task: off_policy",
            )
        yield from self.algorithm.model_problems(self.model)
        if self.demonstrations is not None:
            if not isinstance(self.algorithm, PolicyConfig):
                yield illegal(
                    "demonstrations",
                    f"would be imitated beside a loss of probabilities, and {name} has none",
                    hint="leave the section out, or write algorithm.type: ppo",
                )
            else:
                objective, key = self.demonstrations.objective, "demonstrations.objective"
                yield from objective_problems(self.model, objective, key=key)
        for key in ("target_kl", "first_update_kl_bound", "first_update_ratio_bound"):
            if not self.algorithm.compares_log_probs and getattr(self.actor, key) is not None:
                yield illegal(
                    f"actor.{key}",
                    f"{name} computes no log-probs, of which a KL divergence or a ratio could be",
                    hint="nearest: null",
                )
        yield from rank_problems(
            self.actor,
            self.world_size("actor"),
            "samples",
            whole=self.samples,
            made_of=f" ({self.env.num_envs} environments × {self.chunk_steps} chunk steps)",
        )
        if self.algorithm.needs_groups and self.group_size < 2:
            yield illegal(
                f"{next(iter(self.env.sections))}.group_size",
                f"is {self.group_size}, but {name} compares environments that start from equal "
                "states",
                hint="at least 2",
            )

    def problems_of_training(self) -> Iterator[PydanticCustomError]:
        """A rollout that cuts episodes which are judged as a whole, and steps in which no
        environment would act."""
        yield from super().problems_of_training()
        whole, steps = self._steps_of_whole_episodes, self.rollout.steps
        cut = steps % whole if self.auto_reset else steps < whole
        if self.algorithm.needs_whole_episodes and cut:
            queries, chunk = max(self.episode_chunk_steps), self.model.num_action_chunks
            chunks = f" ({queries} chunks of {chunk} actions)" if chunk > 1 else ""
            legal = nearest_multiples(whole, steps) if self.auto_reset else [whole]
            yield illegal(
                "rollout.steps",
                f"{self.algorithm.type} judges whole episodes of up to {self._longest_episode} "
                f"steps{chunks}, which a rollout of this length would cut",
                hint=f"nearest: {join_choices(legal)}",
            )
        train = next(iter(self.env.sections))
        if not self.auto_reset and steps > whole:
            yield illegal(
                "rollout.steps",
                f"each environment plays one episode of up to {self._longest_episode} steps in a "
                f"rollout, and waits for the rest, where {train}.auto_reset is false",
                hint=f"nearest: {whole}, or {train}.auto_reset: true",
            )

    @property
    def _longest_episode(self) -> int:
        return max(section.max_episode_steps for section in self.env.sections.values())

    @property
    def _steps_of_whole_episodes(self) -> int:
        """Environment steps that hold whole episodes of all sections, and the multiples of which
        do where environments reset themselves; else those that have finished wait."""
        queries = self.episode_chunk_steps
        together = math.lcm(*queries) if self.auto_reset else max(queries)
        return together * self.model.num_action_chunks
