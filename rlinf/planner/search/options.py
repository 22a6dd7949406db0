"""Sets of options for a part of a flow, of which none is worse than another in every respect.

An option has a size on each kind of device, the times of its form, and the memory it needs. The
options of a part are columns of arrays, so that all pairs of two parts are composed at once; each
remembers where it came from, so that the tree of the best one can be read back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf.planner.search.formulas import Floats, Kind, Stream

Integers = NDArray[np.int64]

# A grid of more cells takes longer to go through than rows take to be compared with each other.
CELLS_PER_ROW = 128


class Indexed(Protocol):
    """What gives a placement by its index."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class NodeSource:
    """Options that place one node."""

    placements: Indexed


@dataclass(frozen=True)
class JoinSource:
    """Options that compose two parts at one granularity."""

    kind: Kind
    granularity: int
    left: Options
    right: Options


@dataclass(frozen=True)
class Options:
    """Options of one part, in one form and at one granularity.

    With N options and K kinds of devices:

    Args:
        devices: [N, K] devices in use.
        stream: Times, [N] each.
        peak: [N, K] most memory of one device while the part runs [bytes].
        idle: [N, K] most memory of one device while the part does not run [bytes].
        source: [N] index into ``sources``.
        left: [N] index of the placement, or of the option of the left part.
        right: [N] index of the option of the right part.
        sources: Where options come from.
    """

    devices: Integers
    stream: Stream
    peak: Floats
    idle: Floats
    source: Integers
    left: Integers
    right: Integers
    sources: tuple[NodeSource | JoinSource, ...]

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, indices: Integers) -> Options:
        """The options at some indices."""
        return Options(
            self.devices[indices],
            self.stream.take(indices),
            self.peak[indices],
            self.idle[indices],
            self.source[indices],
            self.left[indices],
            self.right[indices],
            self.sources,
        )

    def slowed(self, factor: float) -> Options:
        """The options with longer times."""
        first, head, tail, single = self.stream
        return replace(self, stream=Stream(factor * first, factor * head, factor * tail, single))

    def undominated(self) -> Options:
        """The options that no other one equals or beats in every respect; the first of equals."""
        # A barrier inside is another behaviour, neither better nor worse.
        single = self.stream.single
        columns = [*self.devices.T, *self.stream[:3], single, ~single, *self.peak.T, *self.idle.T]
        return self.take(undominated(np.column_stack(columns).astype(float)))


def join(parts: Sequence[Options]) -> Options:
    """All options of several sets."""
    sources: list[NodeSource | JoinSource] = []
    numbers = []
    for part in parts:
        numbers.append(part.source + len(sources))
        sources.extend(part.sources)
    return Options(
        np.concatenate([p.devices for p in parts]),
        Stream(
            np.concatenate([p.stream.first for p in parts]),
            np.concatenate([p.stream.head for p in parts]),
            np.concatenate([p.stream.tail for p in parts]),
            np.concatenate([p.stream.single for p in parts]),
        ),
        np.concatenate([p.peak for p in parts]),
        np.concatenate([p.idle for p in parts]),
        np.concatenate(numbers),
        np.concatenate([p.left for p in parts]),
        np.concatenate([p.right for p in parts]),
        tuple(sources),
    )


def undominated(values: Floats) -> Integers:
    """Indices of the rows that no other row equals or undercuts in every column.

    Of equal rows the first stays.

    Args:
        values: [N, D], finite.
    """
    if len(values) < 2:
        return np.arange(len(values))
    values = values[:, np.ptp(values, axis=0) > 0]
    if values.shape[1] == 0:
        return np.zeros(1, np.int64)
    # In either order a row can only be dominated by one before it; the sort is stable.
    if values.shape[1] <= 2:
        order = np.lexsort(values.T[::-1])
        last = values[order][:, -1]
        kept = _staircase(last) if values.shape[1] == 2 else np.arange(1)
        return np.sort(order[kept])
    levels = [np.unique(column) for column in values.T]
    widest = max(range(len(levels)), key=lambda column: len(levels[column]))
    sides = [column for column in range(len(levels)) if column != widest]
    shape = tuple(len(levels[column]) for column in sides)
    if math.prod(shape) <= CELLS_PER_ROW * len(values):
        places = tuple(np.searchsorted(levels[column], values[:, column]) for column in sides)
        return _lowest(np.ravel_multi_index(places, shape), shape, values[:, widest])
    # Rows that are small altogether come first: they dominate most of the others.
    low, width = values.min(axis=0), np.ptp(values, axis=0)
    order = np.lexsort((*values.T[::-1], ((values - low) / width).sum(axis=1)))
    return np.sort(order[_front(values[order])])


def _staircase(last: Floats) -> Integers:
    """Rows that are below all rows before them."""
    least = np.minimum.accumulate(last)
    return np.flatnonzero(np.append(True, last[1:] < least[:-1]))


def _lowest(cells: Integers, shape: tuple[int, ...], heights: Floats) -> Integers:
    """Rows, as cells of a grid and heights, below which no cell before or beside them has a row.

    One pass over the grid compares a row with all others. Times of parts differ from row to row,
    while numbers of devices and amounts of memory repeat, so that a grid of these is small.

    Args:
        cells: [N] index of the cell.
        shape: Of the grid.
        heights: [N] what the cell does not say.
    """
    least = np.full(shape, np.inf)
    np.minimum.at(least.reshape(-1), cells, heights)
    reached = least
    for axis in range(len(shape)):
        reached = np.minimum.accumulate(reached, axis=axis)
    before = np.full(shape, np.inf)
    for axis in range(len(shape)):
        one, other = np.moveaxis(before, axis, 0), np.moveaxis(reached, axis, 0)
        np.minimum(one[1:], other[:-1], out=one[1:])
    lowest = (heights == least.reshape(-1)[cells]) & (heights < before.reshape(-1)[cells])
    rows = np.flatnonzero(lowest)
    _, first = np.unique(cells[rows], return_index=True)
    return np.sort(rows[first])


def _front(rows: Floats, block: int = 256) -> Integers:
    """Rows that no row before them is at most equal to, block by block."""
    kept = np.zeros(0, np.int64)
    for begin in range(0, len(rows), block):
        candidates = np.arange(begin, min(begin + block, len(rows)))
        if len(kept):
            candidates = candidates[~_dominated(rows[kept], rows[candidates])]
        if len(candidates):
            inside = np.triu(_covers(rows[candidates], rows[candidates]), 1).any(axis=0)
            kept = np.concatenate([kept, candidates[~inside]])
    return kept


def _covers(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """[N, M] whether row ``n`` of the left is at most row ``m`` of the right everywhere."""
    covers = np.ones((len(left), len(right)), bool)
    for column in range(left.shape[1]):
        covers &= left[:, column, None] <= right[None, :, column]
    return covers


def _dominated(front: Floats, rows: Floats) -> NDArray[np.bool_]:
    return np.asarray(_covers(front, rows).any(axis=0))
