"""Configuration of the algorithms; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.registry import load_attribute

if TYPE_CHECKING:
    from rlinf.algorithms.protocol import Algorithm

RewardType = Literal["chunk_level", "action_level"]
BootstrapType = Literal["standard", "always", "none"]
KLType = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Level = Literal["token_level", "action_level", "chunk_level"]


class NamedConfig(StrictModel):
    """A section whose ``type`` names an algorithm."""

    implementation: ClassVar[str]
    """``module:Class`` of the algorithm, imported when it is built."""

    type: str
    """Which algorithm this section configures."""


class AlgorithmConfig(NamedConfig):
    """Base of every algorithm's config section."""

    needs_values: ClassVar[bool] = False
    """Whether the policy must have a critic."""
    needs_groups: ClassVar[bool] = False
    """Whether environments must start in groups of equal reset states."""
    needs_replay: ClassVar[bool] = False
    """Whether it learns from transitions of the whole run, and not from the newest rollout."""

    def build(self, *, group_size: int = 1) -> Algorithm:
        """The algorithm.

        Args:
            group_size: Consecutive environments that share their reset states.

        Raises:
            ConfigError: the algorithm needs another group size.
        """
        algorithm: Algorithm = load_attribute(self.implementation)(self, group_size=group_size)
        return algorithm


class PolicyLossConfig(StrictModel):
    """Bounds of the ratio, entropy and KL terms: what action and token algorithms share."""

    clip_ratio_low: float = Field(default=0.2, gt=0, lt=1)
    """ε by which the probability ratio may fall below 1."""
    clip_ratio_high: float = Field(default=0.2, gt=0)
    """ε by which the probability ratio may rise above 1; larger than `clip_ratio_low` it is
    known as clip-higher."""
    clip_log_ratio_min: float | None = Field(default=None, lt=0, ge=-20)
    """Lower bound of the logarithm of the ratio; null: −20."""
    clip_log_ratio_max: float | None = Field(default=None, gt=0, le=20)
    """Upper bound of the logarithm of the ratio; null: 20."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy in the loss."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy in the loss."""
    kl_penalty_type: KLType = "low_var_kl"
    """Estimator of that KL divergence."""


class DualClipConfig(PolicyLossConfig):
    """A clipped surrogate with a bound for bad samples whose probability rose."""

    clip_ratio_c: float | None = Field(default=None, gt=1)
    """Dual clip: the loss of a sample with negative advantage A is at most c|A|; null: off."""

    @model_validator(mode="after")
    def _check_clip_order(self) -> Self:
        if self.clip_ratio_c is not None and self.clip_ratio_c < 1 + self.clip_ratio_high:
            raise illegal(
                "clip_ratio_c",
                f"the dual clip {self.clip_ratio_c} lies below 1 + clip_ratio_high = "
                f"{1 + self.clip_ratio_high}, where ratios are not clipped yet",
                hint=f"nearest: {1 + self.clip_ratio_high}, or null",
            )
        return self


class ClippedObjectiveConfig(DualClipConfig, AlgorithmConfig):
    """Terms of the policy loss."""

    logprob_type: Level = "chunk_level"
    """What one probability ratio belongs to: one action dimension (token_level), one primitive
    action (action_level), or the whole chunk (chunk_level)."""
    entropy_type: Level = "chunk_level"
    """What one entropy belongs to, as `logprob_type`."""
    loss_agg_func: AggregationMode = "token-mean"
    """Mean over all terms of the global batch, or over samples of the sum or mean of their
    terms."""
    normalize_advantages: bool = True
    """Bring the advantages of a rollout to mean 0 and standard deviation 1."""
    weight_by_episode_length: bool = True
    """Without automatic reset, give every environment's rollout the same share in the loss
    however early its episode ended."""


class PPOConfig(ClippedObjectiveConfig):
    """Clipped policy loss with a critic and generalised advantages."""

    implementation = "rlinf.algorithms.ppo:PPO"
    needs_values = True
    type: Literal["ppo"] = "ppo"
    """Which algorithm this section configures."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount per chunk step, or per primitive step with action-level rewards."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    reward_type: RewardType = "chunk_level"
    """One reward and value per chunk, or one per primitive step."""
    bootstrap_type: BootstrapType = "standard"
    """Ended episodes that continue in value: truncated ones, all, or none."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    reward_clip: float = Field(default=10.0, gt=0)
    """Bound of a normalised reward."""
    value_coefficient: float = Field(default=1.0, ge=0)
    """Weight of the value loss."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Bound of the change of a value in one training phase; null: none."""
    huber_delta: float = Field(default=10.0, gt=0)
    """Error at which the value loss becomes linear."""

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


class DecoupledPPOConfig(PPOConfig):
    """PPO for rollouts that older weights acted in (`rollout.max_staleness`)."""

    implementation = "rlinf.algorithms.decoupled_ppo:DecoupledPPO"
    type: Literal["decoupled_ppo"] = "decoupled_ppo"  # type: ignore[assignment]
    """Which algorithm this section configures."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """What the probability ratio is bounded against: log-probs that the trainer recomputes before
    the first update, or, without that forward pass, an interpolation between those of the policy
    that acted and the present ones by the staleness of each sample."""
    behave_weight_threshold: float = Field(default=2.0, gt=0)
    """Largest weight, probability under the proximal policy over that under the policy that
    acted; a sample beyond it is not trained on."""


class GRPOConfig(ClippedObjectiveConfig):
    """Clipped policy loss; advantages compare the episodes of a group, without a critic."""

    implementation = "rlinf.algorithms.grpo:GRPO"
    needs_groups = True
    type: Literal["grpo"] = "grpo"
    """Which algorithm this section configures."""
    normalize_advantages: bool = False
    """Bring the advantages of a rollout to mean 0 and standard deviation 1 once more; groups are
    normalised already."""
    filter_rewards: bool = False
    """Leave out groups whose mean episode reward lies outside the bounds below."""
    rewards_lower_bound: float | None = None
    """Smallest mean episode reward of a group that is trained on."""
    rewards_upper_bound: float | None = None
    """Largest mean episode reward of a group that is trained on."""

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


class SACConfig(AlgorithmConfig):
    """Soft actor-critic."""

    implementation = "rlinf.algorithms.sac:SAC"
    needs_replay: ClassVar[bool] = True
    type: Literal["sac"] = "sac"
    """Which algorithm this section configures."""
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
    target_entropy: float | None = None
    """Entropy of an action chunk in nats, over actions scaled to [−1, 1]; null: −A·C, minus one per
    action dimension of the chunk."""
