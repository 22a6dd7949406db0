"""Recipe section of SmolVLA; imports no torch."""

from __future__ import annotations

from typing import Literal

from rlinf.models.config import Width
from rlinf.models.vla.config import FlowConfig


class SmolVLAConfig(FlowConfig):
    """SmolVLA: a small language model reads pictures, an instruction and the state."""

    implementation = "rlinf.models.vla.smolvla.policy:SmolVLAPolicy"
    published_as = ("smolvla",)
    former_horizon = 50
    type: Literal["smolvla"] = "smolvla"
    """Which policy this section configures."""
    value_head: tuple[Width, ...] = (512, 256, 128)
    """Widths of the hidden layers of the value head, which begins afresh."""
    train_expert_only: bool = True
    """Leave vision and language model as they are, as in the published training."""
