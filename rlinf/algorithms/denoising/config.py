"""Config sections of the algorithms for policies that denoise their actions; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.algorithms.config import RewardFilterConfig, SoftActorCriticConfig
from rlinf.config.component import illegal
from rlinf.config.effects import refuse_unused

if TYPE_CHECKING:
    from rlinf.models.config import ModelConfig

Weighting = Literal["auto", "constant", "adaptive", "sigma"]


class NFTConfig(RewardFilterConfig):
    """Negative-aware fine-tuning of a velocity, on the noising of what was done; no log-probs."""

    implementation = "rlinf.algorithms.denoising.nft:NFT"
    only_with: ClassVar = {"dpo_beta": "loss_form: dpo", "max_drift": "loss_form: mse"}
    type: Literal["nft"] = "nft"
    """Which algorithm this section configures."""
    advantage: Literal["group", "raw"] = "group"
    """How good an episode was: its reward compared with those of its group, in standard deviations;
    or the reward itself, cut to [0, 1], as a success is."""
    adv_clip_max: float = Field(default=1.0, gt=0)
    """Advantages beyond ±this count as that: they become r = (A / this + 1) / 2, between 0 and 1.
    Also a factor of the loss `mse`."""
    beta: float = Field(default=1.0, gt=0)
    """How far the two velocities that are compared, v_old ± β (v − v_old), are apart."""
    loss_form: Literal["mse", "dpo"] = "mse"
    """Regression, by r towards the action and by 1 − r away from it; or a classification of which
    of both velocities made it."""
    dpo_beta: float = Field(default=1.0, gt=0)
    """Of `dpo`: factor of the logits."""
    target_space: Literal["x0", "xnext"] = "x0"
    """What velocities are to predict: the action, or where the next denoising step led."""
    xcur_source: Literal["resample", "rollout"] = "resample"
    """Where: at actions that are noised anew for each rollout, or at a point that the rollout
    passed."""
    weight_mode: Weighting = "auto"
    """What squared errors of the prediction are divided by: nothing (constant), their own mean
    absolute error (adaptive), the variance of the denoising step (sigma); auto: sigma where steps
    are random, otherwise adaptive."""
    weight_scale: tuple[float, float] = (1.0, 1.0)
    """Factors of the errors of the velocity towards the action and of the one away from it."""
    level: Literal["action_level", "chunk_level"] = "action_level"
    """What one error belongs to: a primitive action, or the whole chunk."""
    max_drift: float | None = Field(default=None, gt=0)
    """Of `mse`: once v is further from v_old than this share of v_old, a lower loss is no reason to
    go on; null: never."""
    tau: float | tuple[float, float, int, int] = 1.0
    """Share of the trained weights that those which act take over after each phase; or the first
    and the last share, and the phases between which it changes evenly."""
    weight_by_episode_length: bool = True
    """Without automatic reset, give every environment's rollout the same share in the loss however
    early its episode ended."""

    @property
    def needs_groups(self) -> bool:
        """Where they are compared."""
        return self.advantage == "group"

    @property
    def needs_whole_episodes(self) -> bool:
        """How good an episode was is known at its end, whatever it is compared with."""
        return True

    @property
    def compares_log_probs(self) -> bool:
        """It needs none."""
        return False

    def share(self, step: int) -> float:
        """τ after phase ``step``, from 0."""
        if not isinstance(self.tau, tuple):
            return self.tau
        first, last, begin, end = self.tau
        if step >= end:
            return last
        return first + (last - first) * max(0, step - begin) / (end - begin)

    def model_problems(self, model: ModelConfig) -> Iterator[PydanticCustomError]:
        """A policy without a velocity, or with noise that would not be trained."""
        if not model.denoises:
            yield illegal(
                "model.type",
                f"nft trains the velocity along which actions are denoised, {model.type} has none",
                hint="nearest: pi05, or algorithm.type: grpo",
            )
            return
        method = getattr(model, "method", "ode")
        if method == "flow_noise":
            yield illegal(
                "model.method",
                "nft would not train the deviation of flow_noise",
                hint="nearest: ode",
            )
        if method == "ode" and self.target_space == "xnext":
            yield illegal(
                "algorithm.target_space",
                "xnext of a step without noise is what v_old itself predicts, so that nothing "
                "would be learnt",
                hint="nearest: x0, or model.method: flow_sde",
            )

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        if self.target_space == "xnext" and self.xcur_source == "resample":
            raise illegal(
                "target_space",
                "xnext is known of points that the rollout passed alone",
                hint="nearest: x0, or xcur_source: rollout",
            )
        if self.loss_form == "dpo" and not self.needs_groups:
            refuse_unused(self, ["adv_clip_max"], without="advantage: group")
        if min(self.weight_scale) < 0 or max(self.weight_scale) == 0:
            raise illegal("weight_scale", "are factors of errors", hint="nearest: [1.0, 1.0]")
        shares = self.tau[:2] if isinstance(self.tau, tuple) else (self.tau,)
        if not all(0 < share <= 1 for share in shares):
            raise illegal("tau", f"{shares} are no shares", hint="nearest: 1.0")
        if isinstance(self.tau, tuple) and not 0 <= self.tau[2] < self.tau[3]:
            raise illegal(
                "tau",
                f"changes from phase {self.tau[2]} to phase {self.tau[3]}",
                hint=f"nearest: [{self.tau[0]}, {self.tau[1]}, 0, {max(1, self.tau[3])}]",
            )
        return self


class DSRLConfig(SoftActorCriticConfig):
    """Soft actor-critic on the noise from which a frozen policy denoises its actions."""

    type: Literal["dsrl"] = "dsrl"
    """Which algorithm this section configures."""
    gamma: float = Field(default=0.999, gt=0, le=1)
    """Discount of one primitive action; a chunk of C is discounted by its C-th power."""
    agg_q: Literal["min", "mean"] = "mean"
    """Which of the values of all Q functions counts, of targets and for the policy."""
    backup_entropy: bool = False
    """Count the entropy of what follows in the targets."""
    target_entropy: float | None = -16.0
    """Entropy of a row's noise in nats, over noise scaled to [−1, 1]; null: minus one per number.
    The default is published for 32 numbers."""

    def model_problems(self, model: ModelConfig) -> Iterator[PydanticCustomError]:
        """A model whose actions are not noise."""
        if not model.steers:
            yield illegal(
                "model.type",
                f"dsrl learns the noise of a frozen policy, {model.type} has none",
                hint="nearest: steered, or algorithm.type: sac",
            )
