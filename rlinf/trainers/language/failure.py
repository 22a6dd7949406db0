"""Keeps the batch that stopped a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rlinf.errors import RunFailure
from rlinf.trainers.language.core import Update


class SkippedUpdates:
    """Counts updates without a finite loss and gradient, and stops the run past a bound.

    Weights that are spoilt themselves skip every update from then on, few of them in each phase:
    so the bound also holds for updates in a row, over phases.

    Args:
        bound: How many may be skipped in a phase, and in a row.
        section: Of the config, in the message.
        directory: Where the batch of the last one is written; None: nowhere, as on ranks other
            than 0.

    Attributes:
        in_a_row: Skipped since the last one that was applied; part of a checkpoint.
    """

    def __init__(self, *, bound: int, section: str, directory: Path | None) -> None:
        self._bound, self._section, self._directory = bound, section, directory
        self.in_a_row = 0

    def note(self, updates: list[Update], batch: Any, *, step: int) -> None:
        """Count the last update of a phase.

        Args:
            updates: Of the phase so far.
            batch: The global batch of the last one.
            step: Number of the phase.

        Raises:
            RunFailure: Too many were skipped.
        """
        outcome = updates[-1].outcome
        if outcome == "applied":
            self.in_a_row = 0
        if outcome != "skipped":
            return
        self.in_a_row += 1
        in_phase = sum(update.outcome == "skipped" for update in updates)
        if max(in_phase, self.in_a_row) <= self._bound:
            return
        which = f"{in_phase} updates of training phase {step}"
        if self.in_a_row > in_phase:
            which = f"{self.in_a_row} updates in a row, up to training phase {step},"
        where = ""
        if self._directory is not None:
            path = self._directory / f"{self._section}_batch_of_step_{step}"
            save_batch(path, batch, step=step, metrics=updates[-1].metrics)
            where = f"; the batch is in {path}.safetensors"
        raise RunFailure(
            f"{which} had a loss or gradient that is not finite; lower {self._section}.optim.lr "
            f"or {self._section}.optim.max_grad_norm{where}"
        )


def save_batch(path: Path, batch: Any, *, step: int, metrics: Mapping[str, float]) -> None:
    """Write the tensors of a batch as ``path``.safetensors, the rest as ``path``.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: c.contiguous() for name, c in columns.items() if isinstance(c, Tensor)}
    save_file(tensors, path.with_name(path.name + ".safetensors"))
    about = {
        "step": step,
        "metrics": {name: repr(value) for name, value in metrics.items()},
        "sequences": len(batch),
        "other": {name: c for name, c in columns.items() if isinstance(c, int | str)},
    }
    path.with_name(path.name + ".json").write_text(json.dumps(about, indent=2) + "\n")
