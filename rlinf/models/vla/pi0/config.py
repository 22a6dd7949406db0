"""Recipe sections of π₀ and π₀.₅; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlinf.models.config import Width
from rlinf.models.vla.config import FlowConfig


class PI0Config(FlowConfig):
    """π₀: reads pictures, an instruction and the state; values are read from the expert."""

    implementation = "rlinf.models.vla.pi0.policy:PI0Policy"
    published_as = ("pi0", "dexbotic_pi0")
    former_horizon = 50
    also_called = ("pi05",)  # the weights say which one it is
    described = False  # what openpi trains with torch has no config.json
    only_with: ClassVar = {"tokenizer": "path"}
    type: Literal["pi0"] = "pi0"
    """Which policy this section configures."""
    value_head: tuple[Width, ...] = (512, 256, 128)
    """Widths of the hidden layers of the value head, which begins afresh."""


class PI05Config(FlowConfig):
    """π₀.₅: time enters by adaptive norms; values are read from the language model."""

    implementation = "rlinf.models.vla.pi0.policy:PI0Policy"
    published_as = ("pi05",)
    former_horizon = 50
    also_called = ("pi0", "dexbotic_pi0")
    described = False
    usually_normalised_by = "quantiles"
    only_with: ClassVar = {"tokenizer": "path", "told_state_dim": "state_in_prompt"}
    type: Literal["pi05"] = "pi05"
    """Which policy this section configures."""
    value_head: tuple[Width, ...] = (1024, 512, 256)
    """Widths of the hidden layers of the value head, which begins afresh."""
    state_in_prompt: bool = True
    """Tell the state in the instruction, each dimension as one of 256 numbers; it is otherwise not
    read. Published models differ: those of LIBERO and CALVIN do not read it."""
    told_state_dim: int | None = Field(default=None, ge=1)
    """Dimensions of the state in the instruction, with zeros behind those of the environment; null:
    the environment's alone, as openpi and lerobot since 0.5 have trained. lerobot 0.4 filled them
    up to its `max_state_dim`, 32, and its directories look alike."""
    max_prompt_tokens: int = Field(default=200, ge=1)
    """Tokens that an instruction with its state may have."""

    @property
    def told_states(self) -> bool:
        """As the section says."""
        return self.state_in_prompt
