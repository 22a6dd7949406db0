"""Replay: the newest transitions of a run, from which batches are drawn uniformly.

The rows lie in preallocated tensors of the run's own: a ring in memory, a hundred lines, whose
order and draws are the same to the bit wherever it runs and after a resume. Libraries of replay
buffers (TorchRL, cpprl, Reverb) bring storages, samplers and services that a run does not need, and
draw from random states of their own, which no checkpoint of ours could hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = Mapping[str, Tensor]
"""Columns by name, each [N, ...]."""
_DRAWS = 1
"""What sets these random numbers apart from others of the same seed and step."""


class ReplayStore:
    """The newest ``capacity`` rows, first in, first out.

    A row is addressed by its age, so that what is drawn does not depend on where in the ring it
    lies. The first rows decide about names, shapes and types of the columns.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._columns: dict[str, Tensor] = {}
        self._oldest = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, rows: Rows) -> None:
        """Add rows [N, ...], behind the newest; the oldest make room.

        Raises:
            ValueError: Their columns differ from those of the rows before.
        """
        if not self._columns:
            self._columns = {
                name: column.new_empty((self.capacity, *column.shape[1:]))
                for name, column in rows.items()
            }
        kept, given = _forms(self._columns), _forms(rows)
        if kept != given:
            differing = (
                f"{name}: {given.get(name, 'none')} after {kept.get(name, 'none')}"
                for name in sorted({name for name, _ in kept.items() ^ given.items()})
            )
            raise ValueError(
                f"rows differ from those before in {', '.join(differing)}; all rows of a replay "
                "have the same columns: nearest: a new run, whose replay is empty"
            )
        count = len(next(iter(rows.values())))
        skipped = max(0, count - self.capacity)  # they would be pushed out at once
        first = self._oldest + self._size
        places = torch.arange(first + skipped, first + count) % self.capacity
        for name, column in rows.items():
            self._columns[name][places] = column[skipped:].to(self._columns[name].device)
        grown = self._size + count
        self._size = min(grown, self.capacity)
        self._oldest = (self._oldest + grown - self._size) % self.capacity

    def at(self, ages: Tensor) -> dict[str, Tensor]:
        """The rows at the given places [M], 0 the oldest; copies."""
        places = (ages + self._oldest) % self.capacity
        return {name: column[places] for name, column in self._columns.items()}

    def sample(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """``count`` rows drawn uniformly, with replacement; ValueError where there are none."""
        if not self._size:
            raise ValueError("nothing was appended yet")
        return self.at(torch.randint(self._size, (count,), generator=generator))

    def state_dict(self) -> dict[str, Any]:
        """All rows, oldest first: ``rows``, and behind them ``newer`` where the ring goes on at its
        begin. They share memory with the store: write or copy them before rows are added."""
        end = self._oldest + self._size
        state = {"rows": self._between(self._oldest, min(end, self.capacity))}
        if end > self.capacity:
            state["newer"] = self._between(0, end - self.capacity)
        return state

    def _between(self, first: int, end: int) -> dict[str, Tensor]:
        return {name: column[first:end] for name, column in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, perhaps with another capacity."""
        self._columns, self._oldest, self._size = {}, 0, 0
        for rows in (state["rows"], state.get("newer")):
            if rows:
                self.append(rows)


def _forms(rows: Rows) -> dict[str, str]:
    return {name: f"{list(column.shape[1:])} {column.dtype}" for name, column in rows.items()}


def draws(seed: int, step: int) -> torch.Generator:
    """Random numbers of one training step: a function of run seed and step alone."""
    # Exploration of the step is drawn from a sequence of the same numbers with zeros behind them,
    # which would be the same one without a key.
    sequence = np.random.SeedSequence((seed, step), spawn_key=(_DRAWS,))
    state = sequence.generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
