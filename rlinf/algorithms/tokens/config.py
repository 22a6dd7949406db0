"""Configuration of the token algorithms; imports no torch, so that a recipe is checked at once.

:class:`TokenAlgorithmConfig` holds what every algorithm understands; the classes here say what is
special about each, mostly other defaults.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlinf.algorithms.tokens.base_config import (
    ClippedTokenConfig,
    ImportanceLevel,
    Proximal,
    TokenAggregation,
    TokenAlgorithmConfig,
    refuse_unused,
)
from rlinf.config.base import StrictModel
from rlinf.config.component import illegal

__all__ = [
    "CISPOConfig",
    "ClippedTokenConfig",
    "CriticConfig",
    "DAPOConfig",
    "DecoupledPPOConfig",
    "DrGRPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "PPOConfig",
    "RLOOConfig",
    "ReinforcePPConfig",
    "TokenAlgorithmConfig",
]


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
