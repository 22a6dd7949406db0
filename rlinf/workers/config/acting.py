"""The part of a recipe by which a policy acts in simulators; every task with robots has it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from rlinf.algorithms.base_config import ActionAlgorithm
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.nearest import join_choices, nearest_multiples
from rlinf.envs.config import EnvConfig
from rlinf.flow.placed_config import PlacedConfig, RunnerConfig
from rlinf.models.config import REGISTRY as MODELS
from rlinf.models.config import ModelConfig
from rlinf.trainers.config import ActorConfig, OptimizerConfig, RowTrainerConfig
from rlinf.weight_sync.config import AutoConfig, WeightSyncSection

ModelSection = Annotated[ModelConfig, Component(MODELS)]


class ActingRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_env_steps: int = Field(ge=1)
    """Environment steps of the run, over all environments; rounded up to whole rollouts."""


class Environments(StrictModel):
    """The environments of the run."""

    train: EnvConfig
    """The simulator and its task."""


class TrainingEnvironments(Environments):
    """Those that experience is collected in."""

    num_envs: int = Field(ge=1)
    """Training environments, over all env workers."""


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


class ExchangeConfig(StrictModel):
    """How environments and policy answer each other."""

    pipeline_stage_num: int = Field(default=1, ge=1)
    """Sub-batches of each env worker that are in flight at once, so that simulators step while the
    policy answers the others."""
    block_size: int | None = Field(default=None, ge=1)
    """Rows per forward pass of the policy. A fixed size gives bitwise equal results under any
    split of the environments; null: whatever arrives, the fastest."""


class RolloutConfig(ExchangeConfig):
    """How experience is collected."""

    steps: int = Field(ge=1)
    """Environment steps of each environment in one rollout."""
    max_staleness: int = Field(default=0, ge=0)
    """How many training phases may lie between the weights that act and the training: with 0 each
    rollout waits for the training step before it, with k it runs up to k steps ahead."""


class EvaluatedConfig(PlacedConfig):
    """A run whose policy is evaluated in simulators."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, exploration noise, sample order and episodes."""
    env: Environments
    rollout: ExchangeConfig = ExchangeConfig()
    model: ModelSection
    evaluation: EvaluationConfig = EvaluationConfig()
    weight_sync: WeightSyncSection = AutoConfig()

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """V, values that the policy gives for a chunk: 0, 1, or one for each action."""

    @property
    def sub_batches(self) -> int:
        """Sub-batches of environments that are in flight at once, over all env workers."""
        return self.world_size("env") * self.rollout.pipeline_stage_num

    pipeline_key: ClassVar[str] = "rollout.pipeline_stage_num"

    def pipeline_stages(self, component: str) -> int:
        """Sub-batches of a worker's environments that are in flight at once."""
        return self.rollout.pipeline_stage_num if component in {"env", "rollout"} else 1

    def evaluation_problems(self) -> Iterator[PydanticCustomError]:
        """What stands against the numbers of environments and workers of an evaluation."""
        workers, stages = self.world_size("env"), self.rollout.pipeline_stage_num
        if self.evaluation.num_envs % (workers * stages):
            unit = workers * stages
            yield illegal(
                "evaluation.num_envs",
                f"does not divide into {workers} env workers × {stages} pipeline stages",
                hint=f"nearest: {join_choices(nearest_multiples(unit, self.evaluation.num_envs))}",
            )
        if self.world_size("rollout") > workers * stages:
            yield illegal(
                "cluster.component_placement",
                f"places {self.world_size('rollout')} rollout workers, but there are only "
                f"{workers * stages} sub-batches of environments (env workers × pipeline stages)",
                hint=f"at most {workers * stages} rollout processes, or a larger "
                "rollout.pipeline_stage_num",
            )
        if self.checkpoint.layout == "sharded" and not self.divides_policy:
            yield illegal(
                "checkpoint.layout",
                "is sharded, but no rank has a part of a robot's policy",
                hint="nearest: whole, or actor.type: fsdp",
            )
        if self.divides_policy and self.cluster.runtime == "local":
            yield illegal(
                "actor.type",
                "divides the policy over ranks, which takes a process for each",
                hint="nearest: plain, or cluster.runtime: ray",
            )

    @property
    def divides_policy(self) -> bool:
        """Whether each actor rank has a part of the policy."""
        return False


class ActingConfig(EvaluatedConfig):
    """A run in which a policy collects experience in simulators."""

    env: TrainingEnvironments
    rollout: RolloutConfig

    @property
    def keeps_next_observations(self) -> bool:
        """Whether rollouts hold what followed each of their rows."""
        return False

    def acts_at_random(self, step: int) -> bool:
        """Whether the rollout of a step is taken with uniformly random actions."""
        del step
        return False

    # -- derived sizes --------------------------------------------------------------------------

    @property
    def chunk_steps(self) -> int:
        """T, policy queries per environment and rollout."""
        return self.rollout.steps // self.model.num_action_chunks

    @property
    def samples(self) -> int:
        """Samples of one rollout: one per environment and chunk step."""
        return self.env.num_envs * self.chunk_steps

    @property
    def env_steps_per_rollout(self) -> int:
        """Environment steps of one rollout."""
        return self.env.num_envs * self.rollout.steps

    @property
    def group_size(self) -> int:
        """Environments that share their reset states."""
        return self.env.train.group_size

    # -- rules between sections, for the validator of a task's config ----------------------------

    def acting_problems(self) -> Iterator[PydanticCustomError]:
        """What stands against the numbers of environments, steps and workers."""
        workers, stages = self.world_size("env"), self.rollout.pipeline_stage_num
        unit = workers * stages * self.group_size
        if self.env.num_envs % unit:
            yield illegal(
                "env.num_envs",
                f"does not divide into {workers} env workers × {stages} pipeline stages × groups "
                f"of {self.group_size}",
                hint=f"nearest: {join_choices(nearest_multiples(unit, self.env.num_envs))}",
            )
        chunk = self.model.num_action_chunks
        if self.rollout.steps % chunk:
            yield illegal(
                "rollout.steps",
                f"is not a multiple of the {chunk} actions of a chunk (model.num_action_chunks)",
                hint=f"nearest: {join_choices(nearest_multiples(chunk, self.rollout.steps))}",
            )
        yield from self.evaluation_problems()


class LearningConfig(ActingConfig):
    """A run that collects what its policy is trained on."""

    runner: ActingRunnerConfig
    algorithm: ActionAlgorithm
    actor: RowTrainerConfig

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Settings of modules that are not trained by ``actor.optim``."""
        return {}

    @property
    def divides_policy(self) -> bool:
        """Whether each actor rank has a part of the policy."""
        return self.actor.type == "fsdp" and self.world_size("actor") > 1

    @property
    def training_steps(self) -> int:
        """Rollouts of the run, each followed by one training phase."""
        return -(-self.runner.total_env_steps // self.env_steps_per_rollout)


class OnPolicyConfig(LearningConfig):
    """A run in which a policy is trained on what it has just done."""

    actor: ActorConfig

    @property
    def value_dim(self) -> int:
        """V, values per chunk that the algorithm needs."""
        algorithm = self.algorithm.build(group_size=self.group_size)
        return algorithm.value_dim(self.model.num_action_chunks)
