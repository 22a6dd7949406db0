"""The recipe section of the Fourier-feature policy; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlinf.models.config import GaussianPolicyConfig


class FourierConfig(GaussianPolicyConfig):
    """Gaussian policy on random Fourier features of ``states`` (Rahimi and Recht 2007)."""

    implementation = "rlinf_example.fourier_policy:FourierPolicy"
    type: Literal["fourier"] = "fourier"
    """Which policy this section configures."""
    frequencies: int = Field(default=32, ge=1)
    """Random frequencies; each gives a sine and a cosine."""
    bandwidth: float = Field(default=1.0, gt=0)
    """Standard deviation of the frequencies."""
