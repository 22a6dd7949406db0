"""The recipe of an embodied run: policy, environments, batches, and where they run.

Batch vocabulary: *environments* × chunk steps of a rollout → *samples* → *global batch* (one
optimizer step) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.algorithms import registry as algorithms
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.nearest import join_choices, nearest_divisors, nearest_multiples
from rlinf.envs.config import EnvConfig
from rlinf.flow.placed_config import PlacedConfig, RunnerConfig
from rlinf.flow.planning_traits import PlanningTraits
from rlinf.models import registry as models
from rlinf.models.config import ModelConfig
from rlinf.runners.embodied_planning import embodied_traits
from rlinf.trainers.config import ActorConfig

COMPONENTS = ("env", "rollout", "actor")

ModelSection = Annotated[ModelConfig, Component(models.REGISTRY)]
AlgorithmSection = Annotated[AlgorithmConfig, Component(algorithms.REGISTRY)]


class EmbodiedRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_env_steps: int = Field(ge=1)
    """Environment steps of the run, over all environments; rounded up to whole rollouts."""


class TrainingEnvironments(StrictModel):
    """The environments of the run."""

    num_envs: int = Field(ge=1)
    """Training environments, over all env workers."""
    train: EnvConfig
    """The simulator and its task."""


class EvaluationConfig(StrictModel):
    """Evaluation on fixed episodes that training never sees."""

    interval: int = Field(default=0, ge=0)
    """Training steps between two evaluations; 0: at the end of the run only."""
    periodic_episodes: int = Field(default=20, ge=1)
    """Episodes of an evaluation during training."""
    episodes: int = Field(default=100, ge=1)
    """Episodes of the evaluation at the end, disjoint from those during training."""
    num_envs: int = Field(default=10, ge=1)
    """Evaluation environments, over all env workers."""
    seed: int = Field(default=10_000, ge=0)
    """Seed of the episode list."""
    success: Literal["success_once", "success_at_end"] = "success_once"
    """What counts as success of an episode."""
    stop_at_success: float | None = Field(default=None, gt=0, le=1)
    """End training once an evaluation reaches this success rate; null: never."""
    video_episodes: int = Field(default=4, ge=0)
    """Held-out episodes that the video of the trained policy shows side by side; 0: no video."""

    def environments(self, train: EnvConfig) -> EnvConfig:
        """The training environments as they are evaluated in: true rewards, one reset each."""
        return train.model_copy(
            update={"group_size": 1, "use_fixed_reset_states": False, "reward_scale": 1.0}
        )


class RolloutConfig(StrictModel):
    """How experience is collected."""

    steps: int = Field(ge=1)
    """Environment steps of each environment in one rollout."""
    pipeline_stage_num: int = Field(default=1, ge=1)
    """Sub-batches of each env worker that are in flight at once, so that simulators step while the
    policy answers the others."""
    block_size: int | None = Field(default=None, ge=1)
    """Rows per forward pass of the policy. A fixed size gives bitwise equal results under any
    split of the environments; null: whatever arrives, the fastest."""
    max_staleness: int = Field(default=0, ge=0)
    """How many training phases may lie between the weights that act and the training: with 0 each
    rollout waits for the training step before it, with k it runs up to k steps ahead."""


class EmbodiedConfig(PlacedConfig):
    """A run that trains a policy in simulators."""

    pipeline_key: ClassVar[str] = "rollout.pipeline_stage_num"

    task: Literal["embodied"]
    """Which runner executes the recipe."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, exploration noise, sample order and episodes."""
    runner: EmbodiedRunnerConfig
    env: TrainingEnvironments
    rollout: RolloutConfig
    model: ModelSection
    algorithm: AlgorithmSection
    actor: ActorConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return COMPONENTS

    # -- derived sizes --------------------------------------------------------------------------

    @property
    def chunk_steps(self) -> int:
        """T, policy queries per environment and rollout."""
        return self.rollout.steps // self.model.num_action_chunks

    @property
    def samples(self) -> int:
        """Samples that one rollout trains on: one per environment and chunk step."""
        return self.env.num_envs * self.chunk_steps

    @property
    def env_steps_per_rollout(self) -> int:
        """Environment steps of one rollout."""
        return self.env.num_envs * self.rollout.steps

    @property
    def training_steps(self) -> int:
        """Rollouts of the run, each followed by one training phase."""
        return -(-self.runner.total_env_steps // self.env_steps_per_rollout)

    @property
    def group_size(self) -> int:
        """Environments that share their reset states."""
        return self.env.train.group_size

    def pipeline_stages(self, component: str) -> int:
        """Sub-batches of environments that are in flight at once."""
        return 1 if component == "actor" else self.rollout.pipeline_stage_num

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
        return embodied_traits(self)

    # -- rules between sections -----------------------------------------------------------------

    @model_validator(mode="after")
    def _rules(self) -> EmbodiedConfig:
        self.check_cluster()
        problems = (
            *self._env_problems(), *self._batch_problems(), *self._data_problems(),
            *self._checkpoint_problems(),
        )  # fmt: skip
        for problem in problems:
            raise problem
        return self

    def _checkpoint_problems(self) -> Iterator[PydanticCustomError]:
        if self.checkpoint.layout == "sharded":
            yield illegal(
                "checkpoint.layout",
                "is sharded, but no rank has a part of a robot's policy",
                hint="nearest: whole",
            )

    def _env_problems(self) -> Iterator[PydanticCustomError]:
        workers, stages = self.world_size("env"), self.rollout.pipeline_stage_num
        unit = workers * stages * self.group_size
        if self.env.num_envs % unit:
            yield illegal(
                "env.num_envs",
                f"does not divide into {workers} env workers × {stages} pipeline stages × groups "
                f"of {self.group_size}",
                hint=f"nearest: {join_choices(nearest_multiples(unit, self.env.num_envs))}",
            )
        if self.evaluation.num_envs % (workers * stages):
            unit = workers * stages
            yield illegal(
                "evaluation.num_envs",
                f"does not divide into {workers} env workers × {stages} pipeline stages",
                hint=f"nearest: {join_choices(nearest_multiples(unit, self.evaluation.num_envs))}",
            )
        chunk = self.model.num_action_chunks
        if self.rollout.steps % chunk:
            yield illegal(
                "rollout.steps",
                f"is not a multiple of the {chunk} actions of a chunk (model.num_action_chunks)",
                hint=f"nearest: {join_choices(nearest_multiples(chunk, self.rollout.steps))}",
            )
        if self.world_size("rollout") > workers * stages:
            yield illegal(
                "cluster.component_placement",
                f"places {self.world_size('rollout')} rollout workers, but there are only "
                f"{workers * stages} sub-batches of environments (env workers × pipeline stages)",
                hint=f"at most {workers * stages} rollout processes, or a larger "
                "rollout.pipeline_stage_num",
            )

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

    def _data_problems(self) -> Iterator[PydanticCustomError]:
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
