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

from rlinf.planner.search.formulas import Floats, Form, Kind, Stream, single_node

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


Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodePlacement:
    """One way to run a node.

    Args:
        node: Name of the node.
        components: Its components, in the order of its stages.
        blocks: Indices of stages, by the devices that they share.
        kinds: Index of the kind of device, per block.
        sizes: Devices, per block.
        stages: Sub-batches in flight inside a loop.
        resident: Components that keep their memory while it is idle.
    """

    node: str
    components: tuple[str, ...]
    blocks: Blocks
    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    stages: int
    resident: frozenset[str]


@dataclass(frozen=True)
class PlacementGrid:
    """Choices that differ only in their sizes, made when they are asked for."""

    template: NodePlacement
    sizes: tuple[Integers, ...]

    def __getitem__(self, index: int) -> NodePlacement:
        return replace(self.template, sizes=tuple(int(column[index]) for column in self.sizes))


@dataclass(frozen=True)
class NodeOptions:
    """Undominated ways to run a node in chunks of one granularity.

    With N ways and K kinds of devices:

    Args:
        devices: [N, K] devices in use, with gaps that keep processes on their nodes.
        chunk: [N] time per chunk [s].
        switch: [N] time that is spent once: to load, to offload, and before results come [s].
        peak: [N, K] memory of one device while the node runs [bytes].
        idle: [N, K] memory of one device while it does not [bytes].
        grid: [N] index into ``grids``.
        index: [N] index into that grid.
        grids: The choices.
    """

    devices: Integers
    chunk: Floats
    switch: Floats
    peak: Floats
    idle: Floats
    grid: Integers
    index: Integers
    grids: tuple[PlacementGrid, ...]

    def options(self, form: Form, chunks: int) -> Options:
        """The ways as a part of a flow, in one form, for a number of chunks of a step."""
        return Options(
            devices=self.devices,
            stream=single_node(form, self.chunk, self.switch, chunks),
            peak=self.peak,
            idle=self.idle,
            source=self.grid,
            left=self.index,
            right=np.zeros_like(self.index),
            sources=tuple(NodeSource(grid) for grid in self.grids),
        )

    def take(self, indices: Integers) -> NodeOptions:
        """The ways at some indices."""
        return NodeOptions(
            self.devices[indices],
            self.chunk[indices],
            self.switch[indices],
            self.peak[indices],
            self.idle[indices],
            self.grid[indices],
            self.index[indices],
            self.grids,
        )
