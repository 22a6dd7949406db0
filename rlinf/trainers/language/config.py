"""Configuration of the trainers of language models; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_divisors
from rlinf.config.registry import load_attribute
from rlinf.errors import ConfigError
from rlinf.models.language_config import LanguageModelConfig, LoraConfig
from rlinf.trainers.config import LearningRateScheduleConfig, OptimizerConfig

if TYPE_CHECKING:
    from rlinf.algorithms.protocol import Algorithm
    from rlinf.trainers.language.critic import FSDPCritic
    from rlinf.trainers.language.parallel import Ranks
    from rlinf.trainers.language.protocol import LanguageTrainer

NumberFormat = Literal["float32", "bfloat16"]


class PrecisionConfig(StrictModel):
    """Number formats; the weights that the optimizer changes are always float32."""

    param: NumberFormat = "float32"
    """Format in which weights are used in forward and backward passes, and sent to engines."""
    reduce: NumberFormat = "float32"
    """Format in which gradients are summed over ranks."""


class OffloadConfig(StrictModel):
    """What leaves the device between phases, where the component's residency is `offload`."""

    weights: bool = True
    """Weights, and the optimizer's float32 copy of them."""
    gradients: bool = True
    """The buffer of gradients, which is given back."""
    optimizer: bool = True
    """Moments of the optimizer."""


class ComputeConfig(StrictModel):
    """How gradients over token sequences are computed and applied."""

    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences of one forward and backward pass on one rank; null: all of the rank."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass instead; a longer sequence has its own."""
    packing: bool = True
    """Put sequences one behind the other without padding. Architectures whose attention needs
    more than causality (a sliding window shorter than the text, soft-capped scores) cannot."""
    balance: bool = True
    """Give each data-parallel rank about the same number of tokens (Karmarkar and Karp 1982)."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer and compute the rest again in the backward pass."""
    logits_per_chunk: int = Field(default=1 << 24, ge=1)
    """Numbers in the output of the vocabulary layer that exist at the same time. Where a micro
    batch has more, they are computed twice."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the device between phases, where `cluster.residency` says offload."""
    optim: OptimizerConfig = OptimizerConfig(lr=1e-6, max_grad_norm=1.0)
    """Optimizer."""
    lr_sched: LearningRateScheduleConfig = LearningRateScheduleConfig()
    """Learning-rate schedule."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Optimizer steps that may be skipped for a loss or gradient that is not finite, in one phase
    and in a row; one more stops the run."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer; all others hold different data."""
    reshard: Literal["auto", "after_forward", "after_update"] = "auto"
    """When ranks drop the weights that they gathered from each other: after each layer's forward
    pass, with gradients summed after each micro batch; or after the optimizer step, with weights
    gathered and gradients summed once for it, which takes the memory of both whole; auto: the
    second for weights of at most 256 MiB, with one message for all layers."""

    @model_validator(mode="after")
    def _check_micro_batch(self) -> Self:
        if self.micro_batch_size is not None and self.max_tokens_per_micro_batch is not None:
            raise illegal(
                "max_tokens_per_micro_batch",
                "micro_batch_size bounds the same thing",
                hint="write null for one of them",
            )
        if self.optim.value_lr is not None:
            raise illegal(
                "optim.value_lr",
                "a language model's critic is a network of its own",
                hint="write null, and the rate as optim.lr of the critic",
            )
        return self

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that compute the same sequences together; all others hold different data.

        A trainer with further kinds of parallelism multiplies their sizes here.
        """
        return self.tensor_parallel_size

    def check_ranks(self, world_size: int) -> None:
        """Refuse a number of ranks that :attr:`ranks_per_replica` does not divide.

        Raises:
            ConfigError: Its key is the one to change.
        """
        if world_size % self.tensor_parallel_size:
            nearest = join_choices(nearest_divisors(world_size, self.tensor_parallel_size))
            raise ConfigError(
                f"{self.tensor_parallel_size} does not divide {world_size} ranks; "
                f"nearest: {nearest}",
                key="tensor_parallel_size",
            )


class PhaseConfig(ComputeConfig):
    """How often the sequences of a rollout are passed over, in which pieces."""

    n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps of one pass; the global batch is the sequences of a rollout divided by it."""
    update_epoch: int = Field(default=1, ge=1)
    """Passes over the sequences of a rollout."""
    shuffle: bool = True
    """Draw the order of the sequences anew for each pass."""
    order: Literal["slot", "length"] = "slot"
    """Without `shuffle`, which groups form a global batch: those whose prompts were drawn one after
    another, or those whose longest answers are of similar length, shortest first, so that training
    can begin while the longest are generated."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.order == "length" and (self.shuffle or self.update_epoch > 1):
            raise illegal(
                "order",
                "is by length, but the sequences are shuffled or passed over more than once",
                hint="nearest: shuffle false and update_epoch 1",
            )
        return self

    @property
    def trains_in_order(self) -> bool:
        """Whether a global batch is a range of slots that is passed over once."""
        return self.update_epoch == 1 and not self.shuffle and self.n_minibatches > 1

    def global_batch_size(self, sequences: int) -> int:
        """Sequences of one optimizer step.

        Args:
            sequences: Prompts of a rollout times answers to each.

        Raises:
            ConfigError: They do not divide; of the key `n_minibatches`.
        """
        if sequences % self.n_minibatches:
            nearest = join_choices(nearest_divisors(sequences, self.n_minibatches))
            raise ConfigError(
                f"{self.n_minibatches} does not divide {sequences} sequences; nearest: {nearest}",
                key="n_minibatches",
            )
        return sequences // self.n_minibatches


class LanguageTrainerConfig(PhaseConfig):
    """Base of every policy trainer's config section; a backend adds its own keys."""

    implementation: ClassVar[str]
    """``module:Class`` of the trainer, imported when it is built."""

    type: str
    """Which trainer this section configures."""
    first_update_kl_bound: float | None = Field(default=None, gt=0)
    """Largest KL between engine and trainer over the tokens that the present weights sampled,
    before the first update of a phase; null: 1e-4 in float32, 0.05 in bfloat16."""
    first_update_ratio_bound: float | None = Field(default=None, gt=0)
    """Largest mean distance of their probability ratios from 1; null: 0.01 in float32, 0.2 in
    bfloat16."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the weights; null: train all weights."""

    @property
    def first_update_bounds(self) -> tuple[float, float]:
        """Bounds of the KL and of the mean distance of ratios from 1."""
        kl, ratio = (1e-4, 0.01) if self.precision.param == "float32" else (0.05, 0.2)
        return self.first_update_kl_bound or kl, self.first_update_ratio_bound or ratio

    def build(
        self,
        model: Any,
        algorithm: Algorithm,
        *,
        ranks: Ranks,
        total_steps: int,
        seed: int,
        temperature: float = 1.0,
        failure_directory: Path | None = None,
    ) -> LanguageTrainer:
        """The trainer of a causal language model of transformers.

        Args:
            model: The model, trained in place; the same on every rank.
            algorithm: Loss.
            ranks: Where this process stands among those that train the model.
            total_steps: Training phases of the run, for the schedule.
            seed: Of the order of the sequences, and of a fresh adapter.
            temperature: At which sequences are sampled and scored.
            failure_directory: Where a batch is written that stopped the run; None: nowhere.
        """
        trainer: LanguageTrainer = load_attribute(self.implementation)(
            model,
            algorithm,
            self,
            ranks=ranks,
            total_steps=total_steps,
            seed=seed,
            temperature=temperature,
            failure_directory=failure_directory,
        )
        return trainer


class FSDPTrainerConfig(LanguageTrainerConfig):
    """Fully sharded data parallelism, with tensor parallelism; on one rank a plain module."""

    implementation = "rlinf.trainers.language.fsdp:FSDPTrainer"
    type: Literal["fsdp"] = "fsdp"
    """Which trainer this section configures."""

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and self.tensor_parallel_size > 1:
            raise illegal(
                "tensor_parallel_size",
                "adapters are not divided over ranks",
                hint="nearest: 1",
            )
        return self


class CriticTrainerConfig(PhaseConfig):
    """The value network of PPO: a language model's layers and one linear output."""

    model: LanguageModelConfig | None = None
    """Model whose layers the value network begins with; null: that of the policy."""
    optim: OptimizerConfig = OptimizerConfig(lr=1e-5, max_grad_norm=1.0)
    """Optimizer."""

    def build(
        self,
        model: Any,
        algorithm: Algorithm,
        *,
        ranks: Ranks,
        total_steps: int,
        seed: int,
        failure_directory: Path | None = None,
    ) -> FSDPCritic:
        """The critic on the layers of ``model``, which are copied.

        Args:
            model: A causal language model of transformers.
            algorithm: Value loss.
            ranks: Where this process stands among those that train the critic.
            total_steps: Training phases of the run, for the schedule.
            seed: Of the order of the sequences.
            failure_directory: Where a batch is written that stopped the run; None: nowhere.
        """
        critic: FSDPCritic = load_attribute("rlinf.trainers.language.critic:FSDPCritic")(
            model,
            algorithm,
            self,
            ranks=ranks,
            total_steps=total_steps,
            seed=seed,
            failure_directory=failure_directory,
        )
        return critic


class SupervisedConfig(StrictModel):
    """Supervised fine-tuning on target tokens; what it computes with is the trainer's."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=256, ge=1)
    """Sequences of one optimizer step, over all ranks."""
    optim: OptimizerConfig = OptimizerConfig(lr=1e-3, max_grad_norm=1.0)
    """Optimizer."""
    lr_sched: LearningRateScheduleConfig = LearningRateScheduleConfig()
    """Learning-rate schedule, stepped with the optimizer."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Optimizer steps that may be skipped for a loss or gradient that is not finite."""
