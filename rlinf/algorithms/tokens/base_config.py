"""The base of every token algorithm's config section; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from rlinf.algorithms.config import (
    AggregationMode,
    DualClipConfig,
    KLType,
    NamedConfig,
    PolicyLossConfig,
)
from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.registry import load_attribute

if TYPE_CHECKING:
    from rlinf.algorithms.tokens.protocol import TokenAlgorithm

TokenAggregation = Literal[AggregationMode, "seq-mean-token-sum-norm"]
Proximal = Literal["rollout", "recomputed", "interpolated"]
ImportanceLevel = Literal["token", "sequence"]
ImportanceMode = Literal["truncate", "mask"]


class TokenAlgorithmConfig(PolicyLossConfig, NamedConfig):
    """Base of every token algorithm's config section."""

    loss_agg_func: TokenAggregation = "token-mean"
    """Mean over all tokens of the global batch; or over sequences of the sum or mean of their
    tokens; or of their sum divided by `loss_agg_length` (seq-mean-token-sum-norm)."""
    loss_agg_length: int | None = Field(default=None, gt=0)
    """Constant that seq-mean-token-sum-norm divides by, in tokens: the longest response."""
    kl_reward_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy in the reward: per token where
    rewards are, else summed over the sequence."""
    kl_reward_type: KLType = "k1"
    """Estimator of that KL divergence."""
    normalize_advantages: bool = False
    """Bring the advantages to mean 0 and standard deviation 1 over all tokens of a rollout."""
    overlong_filter: bool = False
    """Do not train on sequences that the token limit cut off; their rewards still count in
    their group."""
    dynamic_sampling: bool = False
    """Train only on groups whose rewards differ; other prompts are drawn for the rest."""
    max_resample: int = Field(default=5, ge=0)
    """How many times the prompt of one slot may be drawn again in a step with `dynamic_sampling`;
    the last group is trained on whatever its rewards. With `rollout.partial` groups have no slot
    yet: then a step may draw so many times as many prompts again as it has slots."""
    proximal: Proximal = "rollout"
    """What the probability ratio divides by: log-probs of the rollout engine, log-probs that the
    trainer recomputes before the first update, or, without that forward pass, an interpolation
    between the engine's and the present ones by the staleness of each token."""
    importance_sampling: ImportanceLevel | None = None
    """Weight the loss of each token or sequence by its probability under the proximal policy over
    that under the rollout engine; null: off."""
    importance_sampling_clip: float = Field(default=2.0, gt=0)
    """Largest such weight."""
    importance_sampling_min: float = Field(default=0.0, ge=0)
    """Smallest such weight."""
    importance_sampling_mode: ImportanceMode = "truncate"
    """A weight out of bounds is set to the bound (truncate) or to 0 (mask)."""
    early_stop_imp_ratio: float | None = Field(default=5.0, gt=1)
    """An update is not applied where the mean ratio of its global batch exceeds this; null: never
    refused."""

    @property
    def needs_values(self) -> bool:
        """Whether a critic must be trained."""
        return False

    @property
    def needs_groups(self) -> bool:
        """Whether each prompt must be answered more than once."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether batches must carry log-probs of the reference policy."""
        return self.kl_beta > 0 or self.kl_reward_beta > 0

    @property
    def prepares_parts(self) -> bool:
        """Whether some groups can be prepared, and trained on, before the others are there."""
        whole = self.needs_values or self.normalize_advantages or self.kl_reward_beta > 0
        return not (whole or self.needs_proximal)

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer must recompute log-probs before the first update."""
        return self.proximal == "recomputed"

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy of the tokens."""
        return self.entropy_bonus > 0

    def build(self) -> TokenAlgorithm:
        """The algorithm."""
        algorithm: TokenAlgorithm = load_attribute(self.implementation)(self)
        return algorithm

    @model_validator(mode="after")
    def _check_aggregation(self) -> Self:
        constant = self.loss_agg_func == "seq-mean-token-sum-norm"
        if constant and self.loss_agg_length is None:
            raise illegal(
                "loss_agg_length",
                "seq-mean-token-sum-norm divides by a constant length",
                hint="write the largest number of new tokens",
            )
        if not constant and self.loss_agg_length is not None:
            raise illegal(
                "loss_agg_length",
                f"has no effect with loss_agg_func: {self.loss_agg_func}",
                hint="write null, or loss_agg_func: seq-mean-token-sum-norm",
            )
        return self

    @model_validator(mode="after")
    def _check_importance_sampling(self) -> Self:
        if self.importance_sampling is None:
            bounds = [f"importance_sampling_{name}" for name in ("clip", "min", "mode")]
            refuse_unused(self, bounds, without="importance_sampling: token")
            return self
        if self.proximal == "rollout":
            raise illegal(
                "importance_sampling",
                "every weight is 1 where the proximal policy is the rollout engine",
                hint="write proximal: recomputed, or importance_sampling: null",
            )
        if self.importance_sampling_min > self.importance_sampling_clip:
            raise illegal(
                "importance_sampling_min",
                f"{self.importance_sampling_min} lies above importance_sampling_clip",
                hint=f"nearest: {self.importance_sampling_clip}",
            )
        return self


class ClippedTokenConfig(DualClipConfig, TokenAlgorithmConfig):
    """Base of the algorithms with the clipped surrogate loss."""


def refuse_unused(config: StrictModel, keys: Iterable[str], *, without: str) -> None:
    """Refuse keys that do nothing.

    Args:
        config: The section.
        keys: Keys that must have their default.
        without: The key and value that they depend on.

    Raises:
        pydantic_core.PydanticCustomError: One of them has another value.
    """
    for key in keys:
        default = type(config).model_fields[key].default
        if getattr(config, key) != default:
            hint = f"write {without}, or leave it at {default}"
            raise illegal(key, f"has no effect without {without}", hint=hint)
