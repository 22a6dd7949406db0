"""Recipe section of Qwen-VL policies; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.models.vla.config import TokenConfig


class QwenVLConfig(TokenConfig):
    """A Qwen2.5-VL or Qwen3-VL that says actions: one token after another for each dimension, of
    the last 256 of its vocabulary, as OpenVLA has them."""

    implementation = "rlinf.models.vla.qwen_vl.policy:QwenVLPolicy"
    published_as = ("qwen2_5_vl", "qwen3_vl")
    only_with: ClassVar = {"tokenizer": "path"}
    type: Literal["qwen_vl"] = "qwen_vl"
    """Which policy this section configures."""
    family: Literal["qwen2_5_vl", "qwen3_vl"] | None = None
    """Architecture of a preset; null: qwen2_5_vl, or what `path` says."""
    max_image_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a picture may become, else it is made smaller; null: as the settings in `path`
    say."""

    @property
    def published_statistics(self) -> Path | None:
        """None: the published models know of no actions."""
        return None

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        if self.family is not None and self.path is not None:
            raise illegal("family", "the directory says which it is", hint="write null")
        return self
