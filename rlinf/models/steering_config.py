"""Config section of a frozen policy that is steered by its noise; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from rlinf.config.component import Component, illegal
from rlinf.config.effects import refuse_unused
from rlinf.config.registry import Registry
from rlinf.models.config import (
    MODELS,
    ActivationName,
    ImageKey,
    ModelConfig,
    NormalizingPolicyConfig,
    PictureEncoderConfig,
    SquashedConfig,
    Width,
)

# What is steered is not steered itself: sections would contain each other without end.
_BASES = Registry(
    "model",
    "rlinf.models",
    {name: where for name, where in MODELS.items() if name != "steered"},
    ModelConfig,
)


class SteeredConfig(SquashedConfig, PictureEncoderConfig, NormalizingPolicyConfig):
    """A frozen policy that denoises its actions, from noise that a small Gaussian policy chooses,
    and Q functions of that noise (Wagenmaker et al. 2025, "DSRL")."""

    implementation = "rlinf.models.steering:SteeredPolicy"
    q_implementation = "rlinf.models.steering:NoiseQFunctions"
    steers = True

    type: Literal["steered"] = "steered"
    """Which policy this section configures."""
    base: Annotated[ModelConfig, Component(_BASES)]
    """The policy that is steered, which denoises without random steps and is never trained."""
    num_action_chunks: int = Field(default=1, ge=1)
    """C of `base`; it need not be written."""
    noise: Literal["one", "each"] = "one"
    """Choose one vector of noise for all actions of the base's horizon, or one for each."""
    noise_bound: float = Field(default=1.0, gt=0)
    """Noise is chosen within ± this, in standard deviations of what the base was trained on."""
    image_keys: tuple[ImageKey, ...] = ("main_images",)
    """Image observations by which noise is chosen."""
    image_size: int = Field(default=64, ge=8)
    """Edge in pixels to which pictures are scaled for that."""
    channels: tuple[Width, ...] = Field(default=(32, 32, 32, 32), min_length=1)
    """Output channels of the convolutions."""
    kernel_sizes: tuple[int, ...] = (3, 3, 3, 3)
    """Kernel widths in pixels, one per convolution."""
    strides: tuple[int, ...] = (2, 1, 1, 1)
    """Strides in pixels, one per convolution."""
    image_features: int = Field(default=64, ge=1)
    """Width of the encoding of each image key."""
    state_features: int = Field(default=64, ge=1)
    """Width of the encoding of `states`."""
    hidden_sizes: tuple[Width, ...] = Field(default=(128, 128, 128), min_length=1)
    """Widths of the hidden layers of what chooses noise."""
    activation: ActivationName = "relu"
    """Non-linearity of the perceptrons."""
    q_hidden_sizes: tuple[Width, ...] = Field(default=(128, 128, 128), min_length=1)
    """Widths of the hidden layers of each Q function."""
    q_functions: int = Field(default=10, ge=1)
    """How many Q functions there are; the algorithm says what of their values counts."""

    _noise_shape: tuple[int, ...] | None = PrivateAttr(default=None)

    def check_starting_weights(self, path: Path, *, value_dim: int, seed: int) -> None:
        """Nothing: to build the policy reads its base."""

    @property
    def noise_shape(self) -> tuple[int, ...] | None:
        """[H, D] that the base denoises from, once one was built; None before."""
        return self._noise_shape

    def found_noise(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Remember :attr:`noise_shape`, so that no second base is built to know it."""
        self._noise_shape = shape
        return shape

    @model_validator(mode="before")
    @classmethod
    def _chunk_of_base(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "base" not in data:
            return data
        base = data["base"]
        if isinstance(base, BaseModel):
            chunk: Any = getattr(base, "num_action_chunks", 1)
        else:
            chunk = base.get("num_action_chunks", 1) if isinstance(base, Mapping) else 1
        given = data.get("num_action_chunks", chunk)
        if given != chunk:
            raise illegal(
                "num_action_chunks",
                f"{given} is not that of base, whose actions are executed",
                hint=f"nearest: {chunk}",
            )
        return {**data, "num_action_chunks": chunk}

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        without_random_steps = self.base.steered_with
        if without_random_steps is None:
            raise illegal(
                "base.type",
                f"{self.base.type} does not denoise its actions from noise that could be chosen",
                hint="nearest: pi05",
            )
        if getattr(self.base, "method", without_random_steps) != without_random_steps:
            raise illegal(
                "base.method",
                "would add noise that is not chosen",
                hint=f"nearest: {without_random_steps}",
            )
        if not self.image_keys and not self.use_states:
            raise illegal(
                "image_keys",
                "are none and use_states is false, so that noise would be chosen by nothing",
                hint="nearest: [main_images], or use_states: true",
            )
        own = f"type: {self.base.type}"
        refuse_unused(self.base, self.base.of_values, without=own, at="base.")
        return self
