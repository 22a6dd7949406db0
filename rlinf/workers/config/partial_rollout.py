"""Configuration of partial rollouts; imports no torch, so that a recipe is checked at once."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal


class PartialRolloutConfig(StrictModel):
    """More groups are generated than a step has slots; what is unfinished when these are filled is
    interrupted, and goes on in the next step under the weights of that one."""

    oversample: float = Field(default=1.25, gt=1)
    """Groups that are generated at the same time, over the slots of a step."""
    schedule: Literal["fifo", "longest_first", "history"] = "fifo"
    """Which interrupted groups go on first: those that were drawn first, those with most tokens,
    or those of which earlier answers to the same prompt let expect most. New prompts follow, and
    with `history` they are ordered in the same way."""
    max_token_staleness: int | None = Field(default=None, ge=1)
    """Most training phases between the weights that sampled a token and its training; null: any
    number."""
    too_old: Literal["mask", "drop"] = "mask"
    """What becomes of tokens beyond that: they do not count in the loss, or their group is
    generated anew."""

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        if self.max_token_staleness is None and "too_old" in self.model_fields_set:
            raise illegal(
                "too_old",
                "has no effect without a bound",
                hint="write max_token_staleness, or leave it out",
            )
        return self
