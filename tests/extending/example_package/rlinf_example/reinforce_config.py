"""The recipe section of REINFORCE; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlinf.algorithms.base_config import AlgorithmConfig


class ReinforceConfig(AlgorithmConfig):
    """Policy gradient of the discounted return, without a critic (Williams 1992)."""

    implementation = "rlinf_example.reinforce:Reinforce"
    type: Literal["reinforce"] = "reinforce"
    """Which algorithm this section configures."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount per chunk step."""
    baseline: bool = True
    """Subtract the mean return of the rollout, and divide by its standard deviation."""
