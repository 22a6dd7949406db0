"""When a run looks for a better plan by itself; imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.errors import RunFailure


class AutoPlanConfig(StrictModel):
    """Measure in the first steps, solve, switch between two steps, keep what measured faster."""

    steps: int = Field(default=4, ge=1)
    """Steps that each placement is measured over, after two that warm up."""
    least_gain: float = Field(default=0.02, ge=0, lt=1)
    """Share of the step time that another plan must save, predicted to be tried and measured to be
    kept."""
    drift: float = Field(default=0.15, gt=0)
    """Plan anew where the step time stays this share away from what it was when the plan was
    kept."""
    window: int = Field(default=20, ge=2)
    """Steps over which the step time must stay away."""


def read_plan_policy(value: Any) -> Any:
    """``auto`` as the section with its defaults, ``manual`` as none."""
    words: dict[str, Any] = {"auto": {}, "manual": None}
    if not isinstance(value, str):
        return value
    if value not in words:
        raise illegal("", f"unknown word `{value}`", hint=did_you_mean(value, words))
    return words[value]


class SwitchFailure(RunFailure):
    """The run goes on under the placement that it had.

    Args:
        cause: What went wrong.
        seconds: What trying, and going back, took.
    """

    def __init__(self, cause: Exception, seconds: float) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.seconds = seconds
