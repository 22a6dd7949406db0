"""What became of optimizer steps, and when a run ends over those that were skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf.errors import RunFailure

Outcome = Literal["applied", "skipped", "refused", "empty"]


@dataclass(frozen=True)
class Update:
    """What became of one global batch: ``skipped`` where its gradient was not finite, ``refused``
    where the algorithm does not want it, ``empty`` where there is nothing to train on.

    Args:
        outcome: Which of these.
        metrics: Summed over micro batches and ranks.
    """

    outcome: Outcome
    metrics: dict[str, float]


Keep = Callable[[Any, int, Mapping[str, float]], Path]
"""Keeps the batch that stopped a run, given with its step and metrics; returns the file."""


class SkippedUpdates:
    """Counts updates without a finite loss and gradient, and stops the run past a bound.

    Weights that are spoilt themselves skip every update from then on, few of them in each phase:
    so the bound also holds for updates in a row, over phases.

    Args:
        bound: How many may be skipped in a phase, and in a row.
        section: Of the config, in the message.
        keep: Keeps the batch of the last one; None: nobody does.

    Attributes:
        in_a_row: Skipped since the last one that was applied; part of a checkpoint.
    """

    def __init__(self, *, bound: int, section: str, keep: Keep | None = None) -> None:
        self._bound, self._section, self._keep = bound, section, keep
        self.in_a_row = 0

    def note(self, updates: Sequence[Update], batch: Any, *, step: int) -> None:
        """Count the last update of a phase.

        Args:
            updates: Of the phase so far.
            batch: The global batch of the last one.
            step: Number of the phase.

        Raises:
            RunFailure: Too many were skipped.
        """
        last = updates[-1]
        if last.outcome == "applied":
            self.in_a_row = 0
        if last.outcome != "skipped":
            return
        self.in_a_row += 1
        in_phase = sum(update.outcome == "skipped" for update in updates)
        if max(in_phase, self.in_a_row) <= self._bound:
            return
        which = f"{in_phase} updates of training phase {step}"
        if self.in_a_row > in_phase:
            which = f"{self.in_a_row} updates in a row, up to training phase {step},"
        where = ""
        if self._keep is not None:
            file = self._keep(batch, step, last.metrics)
            where = f"; the batch is in {file}"
        raise RunFailure(
            f"{which} had a loss or gradient that is not finite; lower {self._section}.optim.lr "
            f"or {self._section}.optim.max_grad_norm{where}"
        )
