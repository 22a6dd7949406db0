"""Recipe section of WALL-OSS; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlinf.models.config import Width
from rlinf.models.vla.config import WITH_STATISTICS, FlowConfig

VIEWS = {
    "main_images": "front view",
    "wrist_images": "left wrist view",
    "extra_view_images": "right wrist view",
}


class WallOSSConfig(FlowConfig):
    """WALL-OSS: a language model reads and denoises, with perceptrons of its own for actions."""

    implementation = "rlinf.models.vla.wall_oss.policy:WallOSSPolicy"
    published_as = ("wall_x", "Qwen2_5_VLMoEForAction")
    also_called = ("qwen2_5_vl",)  # what it was made from
    only_with: ClassVar = {"tokenizer": "path", "normalization": WITH_STATISTICS}
    type: Literal["wall_oss"] = "wall_oss"
    """Which policy this section configures."""
    view_names: tuple[str, ...] | None = Field(default=None, min_length=1)
    """What each of `cameras` is called in the prompt; null: front view, left wrist view and right
    wrist view, for `main_images`, `wrist_images` and `extra_view_images`."""
    normalization: Literal["mean_std", "bounds", "quantiles"] = "mean_std"
    """By which statistics states and actions are normalised: mean and deviation, as in lerobot, or
    with −1 and 1 for the extremes or the quantiles 0.01 and 0.99."""
    value_head: tuple[Width, ...] = (1024, 512, 256)
    """Widths of the hidden layers of the value head, which begins afresh."""
    value_from: Literal["expert", "mean", "last"] | None = None
    """What values are read from: what the expert makes of zero actions at the noise end, or the
    language model's last hidden states, their mean or the last one; the first one has not seen
    the pictures, which follow it. null: `expert`."""
    max_prompt_tokens: int = Field(default=160, ge=1)
    """Tokens that a prompt may have beside those of pictures."""
