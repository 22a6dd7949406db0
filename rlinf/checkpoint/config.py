"""When checkpoints are written and how many are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlinf.config.base import StrictModel


class CheckpointConfig(StrictModel):
    """When checkpoints are written and how many are kept."""

    interval: int = Field(default=10, ge=0)
    """Training steps between two checkpoints; 0 writes none for their number."""

    minutes: float | None = Field(default=30.0, gt=0)
    """Minutes after which one is written all the same, with the step that is under way then, so
    that long steps do not put hours at risk; null: never. One is written at the end anyway."""

    keep_last: int | None = Field(default=2, ge=1)
    """Newest checkpoints that are kept; null keeps all."""

    keep_best: int = Field(default=1, ge=0)
    """Best checkpoints that are kept besides the newest, by the success rate of evaluations, or by
    the mean return where no episode succeeds."""

    layout: Literal["whole", "sharded"] = "whole"
    """How the state of a language model's trainer with several ranks is written: gathered, by the
    process that leads the run; or by each rank its part, while training waits, into the same
    directory, which is to be on a file system that all nodes share. Either is resumed with any
    number of ranks, under either layout."""

    background: bool = True
    """Write on a thread of its own; training waits for the copy in memory alone."""

    on_full_disk: Literal["warn", "stop"] = "warn"
    """Go on with a warning, or stop the run, when a checkpoint does not fit on the disk. What was
    committed before stays either way."""

    def due(self, step: int, minutes: float) -> bool:
        """Whether a checkpoint is to be written after ``step`` training steps, and so many minutes
        after the one before."""
        late = self.minutes is not None and minutes >= self.minutes
        return late or (self.interval > 0 and step % self.interval == 0)
