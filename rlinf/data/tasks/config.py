"""Configuration of the tasks; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlinf.data.tasks.base_config import TaskConfig


class ArithmeticConfig(TaskConfig):
    """Sums, differences and remainders of small numbers."""

    implementation = "rlinf.data.tasks.arithmetic:ArithmeticTask"
    known_levels = range(1, 7)
    type: Literal["arithmetic"] = "arithmetic"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(2,), min_length=1)
    """1 to 3: addition and subtraction of numbers of 1, 2 or 3 digits; 4: sums of five numbers of
    one digit; 5: the remainder of a sum of two numbers of two digits; 6: addition, subtraction and
    multiplication of two numbers of `digits` digits. Level 1 has 155 prompts, 10 of them held
    out."""
    digits: int = Field(default=5, ge=1, le=20)
    """Digits of the numbers of level 6."""
    worked: bool = True
    """Let targets write out the steps before the answer: columns from the right, running totals."""
    calls: str | None = Field(default=None, pattern="^[a-z][a-z0-9_]*$")
    """Let targets call a tool of this name with the expression, in place of the steps; null: they
    call none."""

    @property
    def called_tools(self) -> tuple[str, ...]:
        """See :attr:`TaskConfig.called_tools`."""
        return () if self.calls is None else (self.calls,)


class SortingConfig(TaskConfig):
    """Put digits in ascending order."""

    implementation = "rlinf.data.tasks.sorting:SortingTask"
    known_levels = range(2, 17)
    type: Literal["sorting"] = "sorting"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(8,), min_length=1)
    """Number of digits."""


class ReversalConfig(TaskConfig):
    """Write a word backwards, or copy it."""

    implementation = "rlinf.data.tasks.reversal:ReversalTask"
    known_levels = range(2, 17)
    type: Literal["reversal"] = "reversal"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(6,), min_length=1)
    """Number of letters."""
