"""Sets of options for a part of a flow, of which none is worse than another in every respect.

The options of a part are columns of arrays, so that all pairs of two parts are composed at once;
each remembers where it came from, so that the tree of the best one can be read back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlinf.planner.search.formulas import Floats, Form, Kind, Stream, single_node

Integers = NDArray[np.int64]
Blocks = tuple[tuple[int, ...], ...]

# A grid of more cells takes longer to go through than rows take to be compared with each other.
CELLS_PER_ROW = 128


@dataclass(frozen=True)
class NodePlacement:
    """One way to run a node, whose components are in the order of its stages.

    Stages that share devices are a block (of their indices), with a kind of device and a number of
    them. ``stages`` are the sub-batches in flight inside a loop, and the ``resident`` components
    keep their memory while the node is idle.
    """

    node: str
    components: tuple[str, ...]
    blocks: Blocks
    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    stages: int
    resident: frozenset[str]

    def names(self, block: int) -> list[str]:
        """Components of a block."""
        return [self.components[stage] for stage in self.blocks[block]]

    def position(self, name: str) -> tuple[int, int]:
        """Block of a component, and its kind of device."""
        block = next(n for n in range(len(self.blocks)) if name in self.names(n))
        return block, self.kinds[block]

    def spread(self, grid: Sequence[Integers]) -> Iterator[tuple[str, int, Integers]]:
        """Every component, its kind of device, and its sizes of a grid that has them per block."""
        for block, (kind, sizes) in enumerate(zip(self.kinds, grid, strict=True)):
            for name in self.names(block):
                yield name, kind, sizes


@dataclass(frozen=True)
class PlacementGrid:
    """Placements that differ only in their sizes, made when they are asked for."""

    template: NodePlacement
    sizes: tuple[Integers, ...]

    def __getitem__(self, index: int) -> NodePlacement:
        return replace(self.template, sizes=tuple(int(column[index]) for column in self.sizes))


@dataclass(frozen=True)
class Join:
    """Options that compose two parts at one granularity."""

    kind: Kind
    granularity: int
    left: Options
    right: Options


@dataclass(frozen=True)
class _Rows:
    """Columns of N options, for K kinds of devices."""

    devices: Integers  # [N, K] devices in use, with gaps that keep processes on their nodes
    peak: Floats  # [N, K] most memory of one device while the part runs [bytes]
    idle: Floats  # [N, K] most memory of one device while it does not [bytes]
    source: Integers  # [N] index into ``sources``
    left: Integers  # [N] index of the placement, or of the option of the left part
    sources: tuple[PlacementGrid | Join, ...]  # where options come from

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, indices: Integers) -> Self:
        """The options at some indices."""
        found: dict[str, Any] = {
            name: column[indices] if isinstance(column, np.ndarray) else column.take(indices)
            for name, column in vars(self).items()
            if name != "sources"
        }
        return replace(self, **found)


@dataclass(frozen=True)
class Options(_Rows):
    """Options of one part, in one form and at one granularity."""

    stream: Stream  # times, [N] each
    right: Integers  # [N] index of the option of the right part

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


@dataclass(frozen=True)
class NodeOptions(_Rows):
    """Undominated ways to run a node in chunks of one granularity."""

    chunk: Floats  # [N] time per chunk [s]
    switch: Floats  # [N] time that is spent once: to load, to offload, and before results come [s]

    def options(self, form: Form, chunks: int) -> Options:
        """The ways as a part of a flow, in one form, for a number of chunks of a step."""
        return Options(
            self.devices,
            self.peak,
            self.idle,
            self.source,
            self.left,
            self.sources,
            stream=single_node(form, self.chunk, self.switch, chunks),
            right=np.zeros_like(self.left),
        )


R = TypeVar("R", Options, NodeOptions)


def join(parts: Sequence[R]) -> R:
    """All options of several sets."""
    before = np.cumsum([0, *(len(part.sources) for part in parts[:-1])])
    numbered = [replace(p, source=p.source + n) for p, n in zip(parts, before, strict=True)]
    found: dict[str, Any] = {
        name: Stream._make(map(np.concatenate, zip(*columns, strict=True)))
        if isinstance(columns[0], Stream)
        else np.concatenate(columns)
        for name in vars(parts[0])
        if name != "sources" and (columns := [vars(part)[name] for part in numbered])
    }
    return replace(parts[0], **found, sources=tuple(s for part in parts for s in part.sources))


def undominated(values: Floats) -> Integers:
    """Indices of the rows of [N, D] finite values that none equals or undercuts in every column.

    Of equal rows the first stays.
    """
    if len(values) < 2:
        return np.arange(len(values))
    values = values[:, np.ptp(values, axis=0) > 0]
    if values.shape[1] < 2:
        return values.argmin(axis=0) if values.shape[1] else np.zeros(1, np.int64)
    levels = [np.unique(column) for column in values.T]
    widest = max(range(len(levels)), key=lambda column: len(levels[column]))
    sides = [column for column in range(len(levels)) if column != widest]
    shape = tuple(len(levels[column]) for column in sides)
    if math.prod(shape) <= CELLS_PER_ROW * len(values):
        places = tuple(np.searchsorted(levels[column], values[:, column]) for column in sides)
        return _lowest(np.ravel_multi_index(places, shape), shape, values[:, widest])
    # Rows that are small altogether come first: they dominate most of the others, and in this
    # order a row can only be dominated by one before it; the sort is stable.
    low, width = values.min(axis=0), np.ptp(values, axis=0)
    order = np.lexsort((*values.T[::-1], ((values - low) / width).sum(axis=1)))
    return np.sort(order[_front(values[order])])


def _lowest(cells: Integers, shape: tuple[int, ...], heights: Floats) -> Integers:
    """Rows, as cells of a grid and heights, below which no cell before or beside them has a row.

    One pass over the grid compares a row with all others. Times of parts differ from row to row,
    while numbers of devices and amounts of memory repeat, so that a grid of these is small.
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
        candidates = candidates[~_covers(rows[kept], rows[candidates]).any(axis=0)]
        inside = np.triu(_covers(rows[candidates], rows[candidates]), 1).any(axis=0)
        kept = np.concatenate([kept, candidates[~inside]])
    return kept


def _covers(left: Floats, right: Floats) -> NDArray[np.bool_]:
    """[N, M] whether row ``n`` of the left is at most row ``m`` of the right everywhere."""
    covers = np.ones((len(left), len(right)), bool)
    for column in range(left.shape[1]):
        covers &= left[:, column, None] <= right[None, :, column]
    return covers
