"""Configuration of the trainer; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.effects import refuse_unused
from rlinf.config.nearest import join_choices, nearest_divisors
from rlinf.config.registry import Registry, load_attribute
from rlinf.errors import ConfigError
from rlinf.models.language_config import AdapterConfig, LanguageModelConfig, LoraConfig

if TYPE_CHECKING:
    from rlinf.algorithms.protocol import Algorithm
    from rlinf.trainers.trainer import Trainer


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


class LanguageOptimizerConfig(OptimizerConfig):
    """That of language models, with defaults of their own for reinforcement learning."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of the policy."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm; null: no clipping."""


class FineTuningOptimizerConfig(LanguageOptimizerConfig):
    """For targets that are given: texts, or returns of a value network."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate."""


class WarmStartOptimizerConfig(LanguageOptimizerConfig):
    """For a small model that begins with random weights."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""


class LearningRateScheduleConfig(StrictModel):
    """How the learning rates change over the run; stepped once per training phase."""

    only_with: ClassVar = {"final_fraction": "type: linear | cosine"}
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


class TrainerConfig(StrictModel):
    """How gradients are computed and applied, whatever is trained."""

    of_rounding: ClassVar[tuple[str, ...]] = ("micro_batch_size", "offload")
    """Keys that say how a gradient is computed: with others it is the same but for rounding, and a
    checkpoint holds the same tensors."""

    micro_batch_size: int | None = Field(default=None, ge=1)
    """Rows (samples or sequences) of one forward and backward pass on one rank; null: all of the
    rank."""
    update_epoch: int = Field(default=1, ge=1)
    """Passes over the rows of a rollout."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the device between phases, where `cluster.residency` says offload."""
    optim: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    lr_sched: LearningRateScheduleConfig = LearningRateScheduleConfig()
    """Learning-rate schedule."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Optimizer steps that may be skipped for a loss or gradient that is not finite, in one phase
    and in a row; one more stops the run."""
    reshard: Literal["auto", "after_forward", "after_update"] = "auto"
    """When ranks drop the weights that they gathered from each other: after each layer's forward
    pass, with gradients summed after each micro batch; or after the optimizer step, with weights
    gathered and gradients summed once for it, which takes the memory of both whole; auto: the
    second for weights of at most 256 MiB, with one message for all layers."""

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that compute the same rows together; all others hold different data."""
        return 1

    def partition(self, rows: int) -> tuple[int, bool]:
        """Rows of one optimizer step, and whether their order is drawn anew in each pass."""
        return rows, False


@dataclass(frozen=True)
class FirstUpdateBounds:
    """How far the policy that trains may be from the one that acted, while their weights are equal:
    the mean KL, and mean and largest distance of probability ratios from 1; None: any."""

    kl: float
    mean_ratio: float | None = None
    any_ratio: float | None = None


class ActionTrainerConfig(TrainerConfig):
    """How a policy for actions is trained, as its weights or by an adapter."""

    of_rounding = (*TrainerConfig.of_rounding, "gradient_checkpointing")

    lora: AdapterConfig | None = None
    """Train low-rank updates of the policy's linear layers, and whole what is no matrix of one:
    values, standard deviations, biases, convolutions; null: train all weights."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer and compute the rest again in the backward pass."""


class RowTrainerConfig(ActionTrainerConfig):
    """How modules are trained on rows of one size: chunk steps, or transitions."""

    only_with: ClassVar = {"reshard": "type: fsdp"}

    type: Literal["plain", "fsdp"] = "plain"
    """How ranks hold the modules: whole on each, with gradients summed in an order that does not
    depend on their number; or divided over them by FSDP2, which needs processes of their own."""
    global_batch_size: int = Field(ge=1)
    """Rows of one optimizer step, over all data-parallel ranks."""

    @model_validator(mode="after")
    def _check_reduce(self) -> Self:
        if self.type == "plain":
            refuse_unused(self.precision, ["reduce"], without="type: fsdp", at="precision.")
        return self


class ActorConfig(RowTrainerConfig):
    """How a policy for actions is trained on one rollout."""

    global_batch_size: int = Field(ge=1)
    """Samples of one optimizer step, over all data-parallel ranks."""
    target_kl: float | None = Field(default=None, gt=0)
    """The phase ends early once the approximate KL of a global batch passes this; null: never."""
    first_update_kl_bound: float | None = Field(default=None, gt=0)
    """Largest KL between rollout and trainer policy in the first update after a weight
    synchronisation, where both hold the same weights; a larger one stops the run. Null: 1e-6 in
    float32, 0.05 in bfloat16."""
    first_update_ratio_bound: float | None = Field(default=None, gt=0)
    """Largest distance of a probability ratio from 1 there, in bfloat16 of their mean; null: 1e-3
    in float32, 0.2 in bfloat16."""

    def partition(self, rows: int) -> tuple[int, bool]:
        """Samples of one optimizer step, and whether their order is drawn anew."""
        del rows
        return self.global_batch_size, True

    @property
    def first_update_bounds(self) -> FirstUpdateBounds:
        """Of every ratio in float32; of their mean in bfloat16, where batches of another size
        round otherwise."""
        kl, ratio = self.first_update_kl_bound, self.first_update_ratio_bound
        if self.precision.param == "float32":
            return FirstUpdateBounds(kl or 1e-6, any_ratio=ratio or 1e-3)
        return FirstUpdateBounds(kl or 0.05, mean_ratio=ratio or 0.2)


class SequenceConfig(TrainerConfig):
    """How gradients over token sequences are computed and applied."""

    of_rounding = (
        *TrainerConfig.of_rounding, "max_tokens_per_micro_batch", "gradient_checkpointing",
        "logits_per_chunk",
    )  # fmt: skip

    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass instead; a longer sequence has its own."""
    packing: bool = True
    """Put sequences one behind the other without padding. Architectures whose attention needs
    more than causality (a sliding window shorter than the text, soft-capped scores) cannot."""
    balance: bool = True
    """Give each data-parallel rank about the same number of tokens (Karmarkar and Karp 1982)."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer and compute the rest again in the backward pass."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer; all others hold different data."""
    logits_per_chunk: int = Field(default=1 << 24, ge=1)
    """Numbers in the output of the vocabulary layer that exist at the same time. Where a micro
    batch has more, they are computed twice."""
    optim: LanguageOptimizerConfig = LanguageOptimizerConfig()
    """Optimizer."""

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
        """See :attr:`TrainerConfig.ranks_per_replica`."""
        return self.tensor_parallel_size

    def check_ranks(self, world_size: int) -> None:
        """Refuse a number of ranks that :attr:`ranks_per_replica` does not divide, by its key."""
        if world_size % self.tensor_parallel_size:
            nearest = join_choices(nearest_divisors(world_size, self.tensor_parallel_size))
            raise ConfigError(
                f"{self.tensor_parallel_size} does not divide {world_size} ranks; "
                f"nearest: {nearest}",
                key="tensor_parallel_size",
            )

    def check_heads(self, heads: int | None) -> None:
        """Refuse a model whose heads of keys and values the ranks that share a layer do not
        divide, by its key; None: not known here."""
        if heads is not None and heads % self.tensor_parallel_size:
            nearest = join_choices(nearest_divisors(heads, self.tensor_parallel_size))
            raise ConfigError(
                f"{self.tensor_parallel_size} does not divide the model's {heads} heads of keys "
                f"and values; nearest: {nearest}",
                key="tensor_parallel_size",
            )


class PolicyTrainerConfig(SequenceConfig):
    """How a language model is trained, as its weights or as an adapter."""

    lora: LoraConfig | None = None
    """Train an adapter instead of the weights; null: train all weights."""

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and self.ranks_per_replica > 1:
            raise illegal(
                "tensor_parallel_size",
                "adapters are not divided over ranks",
                hint="nearest: 1",
            )
        return self


class PhaseConfig(SequenceConfig):
    """How often the sequences of a rollout are passed over, in which pieces."""

    n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps of one pass; the global batch is the sequences of a rollout divided by it."""
    shuffle: bool = True
    """Draw the order of the sequences anew for each pass."""
    order: Literal["position", "length"] = "position"
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

    def partition(self, rows: int) -> tuple[int, bool]:
        """Sequences of one optimizer step, and whether their order is drawn anew."""
        size = math.ceil(rows / self.n_minibatches)
        return size, self.shuffle and size < rows

    @property
    def trains_in_order(self) -> bool:
        """Whether a global batch is a range of positions that is passed over once."""
        return self.update_epoch == 1 and not self.shuffle and self.n_minibatches > 1

    def global_batch_size(self, sequences: int) -> int:
        """Sequences of one optimizer step of a rollout; a ConfigError where they do not divide."""
        if sequences % self.n_minibatches:
            nearest = join_choices(nearest_divisors(sequences, self.n_minibatches))
            raise ConfigError(
                f"{self.n_minibatches} does not divide {sequences} sequences; nearest: {nearest}",
                key="n_minibatches",
            )
        return sequences // self.n_minibatches


class LanguageTrainerConfig(PhaseConfig, PolicyTrainerConfig):
    """Base of every section for the policy of a language run; a backend adds its own keys."""

    implementation: ClassVar[str]
    """``module:function`` that builds the trainer, with the arguments of :meth:`build`."""

    type: str
    """Which trainer this section configures."""
    first_update_kl_bound: float | None = Field(default=None, gt=0)
    """Largest KL between engine and trainer over the tokens that the present weights sampled,
    before the first update of a phase; null: 1e-4 in float32, 0.05 in bfloat16."""
    first_update_ratio_bound: float | None = Field(default=None, gt=0)
    """Largest mean distance of their probability ratios from 1; null: 0.01 in float32, 0.2 in
    bfloat16."""

    @property
    def first_update_bounds(self) -> FirstUpdateBounds:
        """Of the mean, as an engine rounds otherwise than the trainer."""
        kl, ratio = (1e-4, 0.01) if self.precision.param == "float32" else (0.05, 0.2)
        return FirstUpdateBounds(
            self.first_update_kl_bound or kl, mean_ratio=self.first_update_ratio_bound or ratio
        )

    def build(self, model: Any, algorithm: Algorithm, **options: Any) -> Trainer:
        """See :func:`~rlinf.trainers.language_trainers.policy_trainer`."""
        trainer: Trainer = load_attribute(self.implementation)(model, algorithm, self, **options)
        return trainer


class FSDPTrainerConfig(LanguageTrainerConfig):
    """Fully sharded data parallelism, with tensor parallelism; on one rank a plain module."""

    implementation = "rlinf.trainers.language_trainers:policy_trainer"
    type: Literal["fsdp"] = "fsdp"
    """Which trainer this section configures."""


class CriticTrainerConfig(PhaseConfig):
    """The value network of PPO: a language model's layers and one linear output."""

    model: LanguageModelConfig | None = None
    """Model whose layers the value network begins with; null: that of the policy."""
    optim: FineTuningOptimizerConfig = FineTuningOptimizerConfig()
    """Optimizer."""


class SupervisedConfig(StrictModel):
    """Supervised fine-tuning on target tokens; what it computes with is the trainer's."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=256, ge=1)
    """Sequences of one optimizer step."""
    optim: WarmStartOptimizerConfig = WarmStartOptimizerConfig()
    """Optimizer."""
    lr_sched: LearningRateScheduleConfig = LearningRateScheduleConfig()
    """Learning-rate schedule, stepped with the optimizer."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Optimizer steps that may be skipped for a loss or gradient that is not finite."""


TRAINERS = {
    "fsdp": "rlinf.trainers.config:FSDPTrainerConfig",
}
"""Which trainers of language models there are; a package adds one by an entry point in the group
``rlinf.trainers`` that names its config class. It may divide the model over ranks in any way
(tensors, layers, sequences, experts): what it takes and gives back are whole batches and whole
weights, on every rank."""

REGISTRY = Registry("trainer", "rlinf.trainers", TRAINERS, LanguageTrainerConfig)
