"""Recipe sections of ACT and of the diffusion policy; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.models.config import LOG_STD_RANGE
from rlinf.models.vla.config import PublishedConfig


class VisuomotorConfig(PublishedConfig):
    """From pictures and proprioception to a chunk of actions; instructions are not read."""

    cameras: tuple[str, ...] = Field(default=("main_images",), min_length=1)
    """Image observations in the order of the pictures that the model was trained on. An observation
    of several pictures stands for as many."""
    horizon: int | None = Field(default=None, ge=1)
    """H, actions that a model of random weights gives at once, of which `num_action_chunks` are
    executed; null: the least that it can give. Of a published one `path` says it."""
    use_states: bool = True
    """Read `states` as well, where the environment gives them; a published model must as it did."""

    @property
    def told_states(self) -> bool:
        """As the section says."""
        return self.use_states

    @model_validator(mode="after")
    def _check_horizon(self) -> Self:
        if self.horizon is not None and self.path is not None:
            raise illegal("horizon", "the directory says how many", hint="leave it out")
        if self.horizon is not None and self.horizon < self.num_action_chunks:
            raise illegal(
                "horizon",
                f"{self.horizon} actions are fewer than num_action_chunks",
                hint=f"nearest: {self.num_action_chunks}",
            )
        return self


class ACTConfig(VisuomotorConfig):
    """Action Chunking with Transformers (Zhao et al. 2023)."""

    implementation = "rlinf.models.visuomotor.act_policy:ACTPolicy"
    published_as = ("act",)
    usually_normalised_by = "mean_std"
    type: Literal["act"] = "act"
    """Which policy this section configures."""
    kl_weight: float = Field(default=10.0, ge=0)
    """Of the divergence of the latent from a standard normal one, beside the absolute error."""
    initial_log_std: float = Field(default=-2.0, ge=LOG_STD_RANGE[0], le=LOG_STD_RANGE[1])
    """Logarithm of the standard deviation, in units of the model, by which exploration disturbs
    each action dimension; reinforcement learning alone learns it, and evaluation does without."""


class DiffusionConfig(VisuomotorConfig):
    """Diffusion policy (Chi et al. 2023)."""

    implementation = "rlinf.models.visuomotor.diffusion_policy:DiffusionPolicy"
    published_as = ("diffusion",)
    reads_earlier = True
    steered_with = "ddim"
    usually_normalised_by = "min_max"
    of_exploration = ("min_std", "random_steps")
    of_weights = ("prediction",)
    only_with: ClassVar = {
        "min_std": "method: ddpm",
        "random_steps": "method: ddpm",
        "repeat_observation": "path",
    }
    type: Literal["diffusion"] = "diffusion"
    """Which policy this section configures."""
    denoising_steps: int = Field(default=10, ge=1)
    """K, at most as many as the model was trained with times. Training by reinforcement learning
    runs as many passes of the U-Net if all steps are random, one otherwise."""
    method: Literal["ddpm", "ddim"] = "ddpm"
    """How exploration enters: by random steps, or (`ddim`) not at all."""
    min_std: float = Field(default=0.1, ge=0)
    """Of `ddpm`: random steps deviate by at least this, in units of the model, also the last one,
    which otherwise is not random."""
    random_steps: Literal["one", "all"] = "one"
    """Which denoising steps of a chunk are random, and counted in its log-prob: one, drawn for each
    row anew, or all."""
    prediction: Literal["epsilon", "sample"] = "epsilon"
    """What a model of random weights predicts: the noise, or the actions without it."""
    repeat_observation: bool = False
    """Accept a published model of more successive observations than the environment shows
    (`env.train.observation_steps`), and let the present one stand for those before it."""

    @property
    def without_log_probs(self) -> tuple[str, str] | None:
        """DDIM has no random steps."""
        return ("method", "ddpm") if self.method == "ddim" else None

    @property
    def without_entropy(self) -> tuple[str, str, str] | None:
        """The noise schedule is given."""
        if self.method != "ddpm":
            return None
        return "method", "whose deviation depends on the time of a step alone", ""

    @property
    def all_random(self) -> bool:
        """Whether every denoising step is random."""
        return self.random_steps == "all"

    @model_validator(mode="after")
    def _check_denoising(self) -> Self:
        if self.path is not None and self.prediction != "epsilon":
            raise illegal("prediction", "the directory says which it is", hint="leave it out")
        if self.method == "ddpm" and not self.min_std and self.denoising_steps < 2:
            raise illegal(
                "denoising_steps", "the last step is not random without min_std", hint="nearest: 2"
            )
        return self
