"""The config section of each algorithm: what is special about it, mostly other defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.algorithms.base_config import (
    Aggregation,
    AlgorithmConfig,
    BootstrapType,
    ByFamily,
    ClippedConfig,
    ImportanceLevel,
    ImportanceMode,
    Level,
    PolicyConfig,
    Proximal,
    RewardType,
    by_family,
)
from rlinf.checkpoint.weights_file import require_weights
from rlinf.config.component import illegal
from rlinf.config.effects import refuse_unused

if TYPE_CHECKING:
    from rlinf.models.config import ModelConfig

__all__ = ["AlgorithmConfig", "PolicyConfig"]


class CriticConfig(PolicyConfig):
    """Generalised advantages from a critic, and how it is trained."""

    only_with: ClassVar = {"reward_clip": "normalize_rewards: true"}

    gamma: ByFamily[float] = by_family(actions=0.99, tokens=1.0, ge=0, le=1)
    """Discount per chunk step, per primitive step with action-level rewards, or per token."""
    gae_lambda: ByFamily[float] = by_family(actions=0.95, tokens=1.0, ge=0, le=1)
    """λ of generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Bound of the change of a value in one training phase; null: none."""
    huber_delta: float = Field(default=10.0, gt=0)
    """Error at which the value loss becomes linear."""
    reward_type: ByFamily[RewardType] = by_family(actions="chunk_level")
    """Actions: one reward and value per chunk (chunk_level), or one per primitive step
    (action_level)."""
    bootstrap_type: ByFamily[BootstrapType] = by_family(actions="standard")
    """Actions: ended episodes that continue in value: truncated ones (standard), all (always), or
    none."""
    normalize_rewards: ByFamily[bool] = by_family(actions=False)
    """Actions: divide rewards by the running standard deviation of the discounted return, those of
    each of several tasks by its own."""
    reward_clip: ByFamily[float] = by_family(actions=10.0, gt=0)
    """Actions: bound of a normalised reward."""
    value_coefficient: ByFamily[float] = by_family(actions=1.0, ge=0)
    """Actions: weight of the value loss, which policy and critic have in common."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run, in which only the values are learnt."""

    @property
    def needs_values(self) -> bool:
        """The critic is the baseline."""
        return True

    @property
    def from_the_first_step(self) -> tuple[str, ...]:
        """No warm-up of the critic."""
        return ("algorithm.critic_warmup_steps=0",) if self.critic_warmup_steps else ()

    def problems_of_training(
        self, *, steps: int, model: ModelConfig | None = None
    ) -> Iterator[PydanticCustomError]:
        """A warm-up of the critic that does not end."""
        yield from super().problems_of_training(steps=steps, model=model)
        if self.critic_warmup_steps >= steps:
            yield illegal(
                "algorithm.critic_warmup_steps",
                f"{self.critic_warmup_steps} leaves none of the {steps} training steps of the run "
                "in which the policy is trained",
                hint=f"nearest: {steps - 1}",
            )

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        if self.reward_type == "action_level" and self.logprob_type == "chunk_level":
            raise illegal(
                "logprob_type",
                "chunk_level has one ratio per chunk, but action_level rewards give every "
                "primitive action its own advantage",
                hint="nearest: action_level, or reward_type: chunk_level",
            )
        return self


class PPOConfig(CriticConfig, ClippedConfig):
    """Clipped policy loss with a critic and generalised advantages."""

    implementation = "rlinf.algorithms.ppo:PPO"
    type: Literal["ppo"] = "ppo"
    """Which algorithm this section configures."""
    normalize_advantages: ByFamily[bool] = by_family(actions=True, tokens=True)
    """Bring the advantages of a rollout to mean 0 and standard deviation 1."""


class DecoupledPPOConfig(CriticConfig, ClippedConfig):
    """PPO for stale data: the clip is around a proximal policy, not the one that acted."""

    implementation = "rlinf.algorithms.decoupled_ppo:DecoupledPPO"
    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Which algorithm this section configures."""
    normalize_advantages: ByFamily[bool] = by_family(actions=True, tokens=False)
    """Bring the advantages of a rollout to mean 0 and standard deviation 1."""
    advantage: ByFamily[Literal["group", "gae"]] = by_family(tokens="group")
    """Tokens: compare the answers to one prompt as GRPO does (group), or use a critic (gae), as
    for actions."""
    proximal: ByFamily[Proximal] = by_family(actions="recomputed", tokens="recomputed")
    """What the clip is around: log-probs that the trainer recomputes before the first update, or,
    without that forward pass, an interpolation between those of the policy that acted and the
    present ones by the staleness of each term."""
    importance_sampling: ByFamily[ImportanceLevel | None] = by_family(tokens="token", nullable=True)
    """Tokens: weight by proximal over behaviour probability, per token or sequence."""
    importance_sampling_clip: ByFamily[float] = by_family(tokens=5.0, gt=0)
    """Tokens: largest such weight."""
    importance_sampling_min: ByFamily[float] = by_family(tokens=0.0, ge=0)
    """Tokens: smallest such weight."""
    importance_sampling_mode: ByFamily[ImportanceMode] = by_family(tokens="truncate")
    """Tokens: a weight out of bounds is set to the bound (truncate) or to 0 (mask)."""
    behave_weight_threshold: ByFamily[float] = by_family(actions=2.0, gt=0)
    """Actions: largest weight, probability under the proximal policy over that under the policy
    that acted; a term beyond it is not trained on."""

    @property
    def needs_values(self) -> bool:
        """Only with advantages from a critic."""
        return self.advantage != "group"

    @property
    def needs_groups(self) -> bool:
        """Only where the answers to one prompt are compared."""
        return self.advantage == "group"

    @property
    def importance(self) -> tuple[ImportanceLevel, float, float, ImportanceMode] | None:
        """See :attr:`PolicyConfig.importance`."""
        if self.family == "actions":
            return "token", 0.0, self.behave_weight_threshold, "mask"
        return super().importance

    @model_validator(mode="after")
    def _check_decoupled(self) -> Self:
        if self.family is not None and self.proximal == "rollout":
            raise illegal(
                "proximal", "that is the policy that acted", hint="write recomputed, or type: ppo"
            )
        if self.family != "tokens":
            return self
        if self.importance_sampling is None:
            raise illegal(
                "importance_sampling",
                "without behaviour weights the objective is not decoupled",
                hint="write token, or type: ppo",
            )
        if self.advantage == "group":
            own = ("gamma", "gae_lambda", "value_clip", "huber_delta", "critic_warmup_steps")
            refuse_unused(self, own, without="advantage: gae")
        return self


class RewardFilterConfig(AlgorithmConfig):
    """Which groups of episodes are worth training on."""

    filter_rewards: ByFamily[bool] = by_family(actions=False)
    """Actions: leave out groups whose mean episode reward lies outside the bounds below."""
    rewards_lower_bound: float | None = by_family(actions=None)
    """Actions: smallest mean episode reward of a group that is trained on."""
    rewards_upper_bound: float | None = by_family(actions=None)
    """Actions: largest mean episode reward of a group that is trained on."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low, high = self.rewards_lower_bound, self.rewards_upper_bound
        if self.filter_rewards and (low is None or high is None):
            missing = "rewards_lower_bound" if low is None else "rewards_upper_bound"
            raise illegal(missing, "filter_rewards needs both bounds", hint="write a number")
        if not self.filter_rewards and (low is not None or high is not None):
            given = "rewards_upper_bound" if low is None else "rewards_lower_bound"
            raise illegal(
                given, "has no effect without filter_rewards", hint="write filter_rewards: true"
            )
        if low is not None and high is not None and low > high:
            raise illegal(
                "rewards_upper_bound",
                f"{high} lies below rewards_lower_bound {low}",
                hint=f"nearest: {low}",
            )
        return self


class GroupConfig(RewardFilterConfig, PolicyConfig):
    """Advantages compare the answers to one prompt, or the episodes of equal reset states."""

    @property
    def needs_groups(self) -> bool:
        """They are compared."""
        return True


class GRPOConfig(GroupConfig, ClippedConfig):
    """Clipped policy loss; advantages compare the members of a group, without a critic."""

    implementation = "rlinf.algorithms.grpo:GRPO"
    type: Literal["grpo"] = "grpo"
    """Which algorithm this section configures."""


class DrGRPOConfig(GroupConfig, ClippedConfig):
    """GRPO without division by the group's standard deviation or by the response length."""

    implementation = "rlinf.algorithms.grpo:DrGRPO"
    families = ("tokens",)
    type: Literal["dr_grpo"] = "dr_grpo"
    """Which algorithm this section configures."""
    loss_agg_func: Aggregation = "seq-mean-token-sum-norm"
    """Mean over sequences of the sum of their tokens divided by `loss_agg_length`; the other
    modes bring back a bias by length."""


class DAPOConfig(GroupConfig, ClippedConfig):
    """GRPO with clip-higher, dynamic sampling, token-level loss and a penalty for long answers."""

    implementation = "rlinf.algorithms.dapo:DAPO"
    families = ("tokens",)
    only_with: ClassVar = {"len_reward_penalty": "safe_length"}
    type: Literal["dapo"] = "dapo"
    """Which algorithm this section configures."""
    clip_ratio_high: float = Field(default=0.28, gt=0)
    """ε by which the probability ratio may rise above 1."""
    dynamic_sampling: ByFamily[bool] = by_family(tokens=True)
    """Train only on groups whose rewards differ; other prompts are drawn for the rest."""
    overlong_filter: ByFamily[bool] = by_family(tokens=True)
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
            return self
        if self.safe_length >= self.max_length:
            raise illegal(
                "safe_length",
                f"{self.safe_length} does not lie below max_length {self.max_length}",
                hint=f"nearest: {self.max_length - 1}",
            )
        return self


class RLOOConfig(GroupConfig, ClippedConfig):
    """A whole answer is one action; its baseline is the mean reward of the others of its group."""

    implementation = "rlinf.algorithms.rloo:RLOO"
    families = ("tokens",)
    type: Literal["rloo"] = "rloo"
    """Which algorithm this section configures."""
    loss_agg_func: Literal["seq-mean-token-sum"] = "seq-mean-token-sum"
    """Mean over sequences: a sequence has one ratio and one advantage."""
    early_stop_imp_ratio: float | None = by_family(tokens=None, nullable=True, gt=1)
    """An update is not applied where the mean ratio of its global batch exceeds this; null: never
    refused. A ratio is that of a whole answer: over thousands of tokens, what an engine rounds
    otherwise than the trainer makes a product far above the bound of a single token's ratio."""


class GSPOConfig(GroupConfig, ClippedConfig):
    """GRPO with one ratio per sequence, the geometric mean of its tokens' ratios."""

    implementation = "rlinf.algorithms.gspo:GSPO"
    families = ("tokens",)
    type: Literal["gspo"] = "gspo"
    """Which algorithm this section configures."""
    clip_ratio_low: float = Field(default=3e-4, gt=0, lt=1)
    """ε by which the ratio of a sequence may fall below 1."""
    clip_ratio_high: float = Field(default=4e-4, gt=0)
    """ε by which the ratio of a sequence may rise above 1."""
    loss_agg_func: Aggregation = "seq-mean-token-mean"
    """Mean over sequences of the mean of their tokens, or another weighting."""
    per_token: bool = False
    """GSPO-token: the value of the sequence's ratio, but the gradient of each token's, for
    advantages that differ between the tokens of a sequence."""


class CISPOConfig(GroupConfig):
    """Policy gradient with clipped ratios as weights, so that every term keeps its gradient."""

    implementation = "rlinf.algorithms.cispo:CISPO"
    type: Literal["cispo"] = "cispo"
    """Which algorithm this section configures."""
    clip_ratio_low: float = Field(default=1.0, gt=0, le=1)
    """ε by which the weight of a term may fall below 1; 1: no lower bound."""
    clip_ratio_high: float = Field(default=4.0, gt=0)
    """ε by which the weight of a term may rise above 1."""


class ReinforcePPConfig(ClippedConfig):
    """Returns of the reward with its KL penalty, normalised over all terms; no critic."""

    implementation = "rlinf.algorithms.reinforce_pp:ReinforcePP"
    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Which algorithm this section configures."""
    normalize_advantages: ByFamily[bool] = by_family(actions=True, tokens=True)
    """Bring the advantages of a rollout to mean 0 and standard deviation 1."""
    group_baseline: ByFamily[bool] = by_family(tokens=False)
    """Tokens: subtract the mean reward of the group first."""
    gamma: ByFamily[float] = by_family(actions=0.99, tokens=1.0, ge=0, le=1)
    """Discount per chunk step or token."""

    @property
    def needs_groups(self) -> bool:
        """Only for the baseline."""
        return bool(self.group_baseline)


class DistillationConfig(PolicyConfig):
    """A policy learns from what a teacher thinks of its own actions."""

    implementation = "rlinf.algorithms.distillation:Distillation"
    families = ("actions",)
    only_with: ClassVar = dict.fromkeys(
        ("clip_ratio_low", "clip_ratio_high", "normalize_advantages"), "type: ppo"
    )
    type: Literal["distillation"] = "distillation"
    """Which algorithm this section configures."""
    teacher: Path
    """Weights of the teacher, a file `policy.safetensors` of a run with the same model."""
    logprob_type: ByFamily[Level] = by_family(actions="token_level")
    """What one advantage belongs to: one action dimension (token_level), one primitive action
    (action_level), or the whole chunk (chunk_level)."""

    @property
    def needs_reference(self) -> bool:
        """The teacher."""
        return True

    def check(self) -> None:
        """Look for the teacher."""
        super().check()
        require_weights(self.teacher, key="teacher")


class SoftActorCriticConfig(AlgorithmConfig):
    """What soft actor-critic needs, of actions or of noise."""

    implementation = "rlinf.algorithms.sac:SAC"
    only_with: ClassVar = {"target_entropy": "learn_temperature: true"}
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount of one primitive action; a chunk of C is discounted by its C-th power."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Share of the Q functions that their targets take over at each update."""
    update_to_data: float = Field(default=1.0, gt=0)
    """Optimizer steps per transition that was collected."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """α that the run begins with: how much reward a nat of entropy is worth."""
    learn_temperature: bool = True
    """Adapt α so that the policy keeps `target_entropy`; otherwise it stays as it is."""
    agg_q: Literal["min", "mean"] = "min"
    """Which of the values of all Q functions counts, of targets and for the policy."""
    backup_entropy: bool = True
    """Count the entropy of what follows in the targets."""
    target_entropy: float | None = None
    """Entropy of an action chunk in nats, over actions scaled to [−1, 1]; null: −A·C, minus one per
    action dimension of the chunk."""

    @property
    def needs_replay(self) -> bool:
        """It learns from transitions of the whole run."""
        return True


class SACConfig(SoftActorCriticConfig):
    """Soft actor-critic."""

    type: Literal["sac"] = "sac"
    """Which algorithm this section configures."""
