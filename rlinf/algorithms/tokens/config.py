"""Configuration of the token algorithms; imports no torch, so that a recipe is checked at once.

:class:`TokenAlgorithmConfig` holds what every algorithm understands; the classes below it say what
is special about each, mostly other defaults.
"""

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
    """How many times one step may draw prompts again with `dynamic_sampling`."""
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
        return not (whole or self.needs_old_log_probs)

    @property
    def needs_old_log_probs(self) -> bool:
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


class GRPOConfig(ClippedTokenConfig):
    """Clipped policy loss; advantages compare the answers to one prompt, without a critic."""

    implementation = "rlinf.algorithms.tokens.grpo:GRPO"
    type: Literal["grpo"] = "grpo"
    """Which algorithm this section configures."""


class DrGRPOConfig(ClippedTokenConfig):
    """GRPO without division by the group's standard deviation or by the response length."""

    implementation = "rlinf.algorithms.tokens.dr_grpo:DrGRPO"
    type: Literal["dr_grpo"] = "dr_grpo"
    """Which algorithm this section configures."""
    loss_agg_func: TokenAggregation = "seq-mean-token-sum-norm"
    """Mean over sequences of the sum of their tokens divided by `loss_agg_length`; the other
    modes bring back a bias by length."""


class DAPOConfig(ClippedTokenConfig):
    """GRPO with clip-higher, dynamic sampling, token-level loss and a penalty for long answers."""

    implementation = "rlinf.algorithms.tokens.dapo:DAPO"
    type: Literal["dapo"] = "dapo"
    """Which algorithm this section configures."""
    clip_ratio_high: float = Field(default=0.28, gt=0)
    """ε by which the probability ratio may rise above 1."""
    dynamic_sampling: bool = True
    """Train only on groups whose rewards differ; other prompts are drawn for the rest."""
    overlong_filter: bool = True
    """Do not train on sequences that the token limit cut off; their rewards still count in
    their group."""
    safe_length: int | None = Field(default=None, ge=0)
    """Longest response without penalty, in tokens; null: no penalty at all."""
    max_length: int | None = Field(default=None, gt=0)
    """Response length from which on the penalty is −1; null: no penalty at all."""
    len_reward_penalty: float = Field(default=1.0, ge=0)
    """Weight of that penalty in the reward."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if (self.safe_length is None) != (self.max_length is None):
            missing = "safe_length" if self.safe_length is None else "max_length"
            raise illegal(missing, "the length penalty needs both lengths", hint="write a number")
        if self.safe_length is None or self.max_length is None:
            refuse_unused(self, ["len_reward_penalty"], without="safe_length and max_length")
            return self
        if self.safe_length >= self.max_length:
            raise illegal(
                "safe_length",
                f"{self.safe_length} does not lie below max_length {self.max_length}",
                hint=f"nearest: {self.max_length - 1}",
            )
        return self


class RLOOConfig(ClippedTokenConfig):
    """A whole answer is one action; its baseline is the mean reward of the others of its group."""

    implementation = "rlinf.algorithms.tokens.rloo:RLOO"
    type: Literal["rloo"] = "rloo"
    """Which algorithm this section configures."""
    loss_agg_func: Literal["seq-mean-token-sum"] = "seq-mean-token-sum"
    """Mean over sequences: a sequence has one ratio and one advantage."""


class GSPOConfig(ClippedTokenConfig):
    """GRPO with one ratio per sequence, the geometric mean of its tokens' ratios."""

    implementation = "rlinf.algorithms.tokens.gspo:GSPO"
    type: Literal["gspo"] = "gspo"
    """Which algorithm this section configures."""
    clip_ratio_low: float = Field(default=3e-4, gt=0, lt=1)
    """ε by which the ratio of a sequence may fall below 1."""
    clip_ratio_high: float = Field(default=4e-4, gt=0)
    """ε by which the ratio of a sequence may rise above 1."""
    loss_agg_func: TokenAggregation = "seq-mean-token-mean"
    """Mean over sequences of the mean of their tokens, or another weighting."""
    per_token: bool = False
    """GSPO-token: the value of the sequence's ratio, but the gradient of each token's, for
    advantages that differ between the tokens of a sequence."""


class CISPOConfig(TokenAlgorithmConfig):
    """Policy gradient with clipped ratios as weights, so that every token keeps its gradient."""

    implementation = "rlinf.algorithms.tokens.cispo:CISPO"
    type: Literal["cispo"] = "cispo"
    """Which algorithm this section configures."""
    clip_ratio_low: float = Field(default=1.0, gt=0, le=1)
    """ε by which the weight of a token may fall below 1; 1: no lower bound."""
    clip_ratio_high: float = Field(default=4.0, gt=0)
    """ε by which the weight of a token may rise above 1."""


class ReinforcePPConfig(ClippedTokenConfig):
    """Returns of the reward with its KL penalty, normalised over all tokens; no critic."""

    implementation = "rlinf.algorithms.tokens.reinforce_pp:ReinforcePP"
    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Which algorithm this section configures."""
    normalize_advantages: bool = True
    """Bring the advantages to mean 0 and standard deviation 1 over all tokens of a rollout."""
    group_baseline: bool = False
    """Subtract the mean reward of the group first."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""

    @property
    def needs_groups(self) -> bool:
        """Only for the baseline."""
        return self.group_baseline


class CriticConfig(StrictModel):
    """Generalised advantages from a critic of tokens, and how it is trained."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """λ of generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Bound of the change of a value in one step; null: none."""
    huber_delta: float = Field(default=10.0, gt=0)
    """Error at which the value loss becomes linear."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run, in which only the critic is trained."""


class PPOConfig(CriticConfig, ClippedTokenConfig):
    """Clipped policy loss with a critic of tokens and generalised advantages."""

    implementation = "rlinf.algorithms.tokens.ppo:PPO"
    type: Literal["ppo"] = "ppo"
    """Which algorithm this section configures."""
    normalize_advantages: bool = True
    """Bring the advantages to mean 0 and standard deviation 1 over all tokens of a rollout."""

    @property
    def needs_values(self) -> bool:
        """The critic is the baseline."""
        return True

    @property
    def needs_groups(self) -> bool:
        """Each prompt may be answered once."""
        return False


class DecoupledPPOConfig(CriticConfig, ClippedTokenConfig):
    """PPO for stale data: the clip is around a proximal policy, not the one that sampled."""

    implementation = "rlinf.algorithms.tokens.decoupled_ppo:DecoupledPPO"
    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Which algorithm this section configures."""
    advantage: Literal["group", "gae"] = "group"
    """Compare the answers to one prompt as GRPO does, or use a critic."""
    proximal: Proximal = "recomputed"
    """What the clip is around: log-probs that the trainer recomputes before the first update, or
    an interpolation between those of rollout and present policy by the staleness of each token."""
    importance_sampling: ImportanceLevel | None = "token"
    """Weight by proximal over behaviour probability, per token or sequence."""
    importance_sampling_clip: float = Field(default=5.0, gt=0)
    """Largest such weight."""

    @property
    def needs_values(self) -> bool:
        """Only with advantages from a critic."""
        return self.advantage == "gae"

    @property
    def needs_groups(self) -> bool:
        """Only where the answers to one prompt are compared."""
        return self.advantage == "group"

    @model_validator(mode="after")
    def _check_decoupled(self) -> Self:
        if self.importance_sampling is None:
            raise illegal(
                "importance_sampling",
                "without behaviour weights the objective is not decoupled",
                hint="write token, or type: ppo",
            )
        if self.advantage == "group":
            refuse_unused(self, CriticConfig.model_fields, without="advantage: gae")
        return self


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
