"""The base of every task's config section; imports nothing but the strict base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.registry import load_attribute

if TYPE_CHECKING:
    from rlinf.data.tasks.protocol import Task

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TaskConfig(StrictModel):
    """Base of every task's config section.

    A prompt belongs to training or is held out by a hash of its text, whatever seed, level or size
    is configured: no two configurations of a task train on what the other one holds out.
    """

    implementation: ClassVar[str]
    """``module:Class`` of the task, imported when it is built."""
    known_levels: ClassVar[range]
    """Levels of difficulty that exist."""

    type: str
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(min_length=1)
    """Levels of difficulty to draw from."""
    shares: tuple[Share, ...] | None = None
    """Share of each level, relative to their sum; null: all alike."""
    size: int = Field(default=8192, ge=1)
    """Different prompts to train on."""
    held_out: int = Field(default=256, ge=1)
    """Different prompts of the held-out set."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts."""

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        known = self.known_levels
        for level in self.levels:
            if level not in known:
                raise illegal(
                    "levels",
                    f"{self.type} has no level {level}, but {known[0]} to {known[-1]}",
                    hint=f"nearest: {min(known, key=lambda other: abs(other - level))}",
                )
        if len(set(self.levels)) < len(self.levels):
            raise illegal("levels", "names a level twice", hint="give it a larger share")
        if self.shares is not None and len(self.shares) != len(self.levels):
            raise illegal(
                "shares",
                f"has {len(self.shares)} numbers for {len(self.levels)} levels",
                hint="one share per level, or null",
            )
        return self

    @property
    def called_tools(self) -> tuple[str, ...]:
        """Names of the tools that targets call."""
        return ()

    def build(self) -> Task:
        """The task.

        Raises:
            ConfigError: What the section names cannot be used.
        """
        task: Task = load_attribute(self.implementation)(self)
        return task

    def check(self) -> None:
        """Generate the prompts once: do the levels have so many different ones?"""
        task = self.build()
        task.items("train")
        task.items("held_out")
