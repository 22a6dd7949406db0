"""The recursion: the best ways to run a part of a flow, over all cuts of it into two.

A part is a set of nodes. A cut divides it into nodes that come first and the others, so that no
edge runs back. Parts of parts are met again and again; each is solved once per form and
granularity, and keeps only options that are not dominated. All formulas increase in the times of
their parts, so nothing that is dropped could have been in the best plan: the result is that of
trying everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlinf.planner.search.formulas import PARTS, Floats, Form, Kind, compose, least_total
from rlinf.planner.search.node_options import MemoryOfOthers, node_options
from rlinf.planner.search.pareto import Integers, Join, NodeOptions, Options, join
from rlinf.planner.search.problem import Problem

# So few pairs are composed in less time than it takes to say which of them may win.
FEW_PAIRS = 4096


@dataclass(frozen=True)
class OptionBounds:
    """What an option must keep to: [K] devices of each kind, and their memory [bytes].

    An option that takes more ``seconds`` is of no interest.
    """

    devices: Integers
    memory: Floats
    seconds: float = np.inf


@dataclass(frozen=True)
class Composition:
    """How two parts are composed to a whole of a form, in chunks of so many items.

    ``alignment`` has the multiples at which the devices of the left and right part must begin.
    """

    kind: Kind
    form: Form
    granularity: int
    chunks: int
    alignment: tuple[int, int]

    def combine(self, left: Options, right: Options, limits: OptionBounds) -> Options | None:
        """Pairs that fit and are not too slow, of which one may win; None: there is none.

        Parts that take turns use the same devices, and each finds there what the other keeps while
        it is idle. Parts side by side use devices of their own.
        """
        rows, columns = self._pairs(left, right)
        stream = compose(
            self.kind, self.form, left.stream.take(rows), right.stream.take(columns), self.chunks
        )
        kept = np.flatnonzero(least_total(self.form, stream, self.chunks) <= limits.seconds)
        a, b = left.take(rows[kept]), right.take(columns[kept])
        if self.kind == "temporal":
            devices = np.maximum(a.devices, b.devices)
            peak = np.maximum(a.peak + b.idle, b.peak + a.idle)
            idle = a.idle + b.idle
        else:
            devices = self._side_by_side(a.devices, b.devices)
            peak, idle = np.maximum(a.peak, b.peak), np.maximum(a.idle, b.idle)
        fits = (devices <= limits.devices).all(axis=1) & (peak <= limits.memory).all(axis=1)
        if not fits.any():
            return None
        kept = kept[fits]
        return Options(
            devices[fits],
            peak[fits],
            idle[fits],
            source=np.zeros(len(kept), np.int64),
            left=rows[kept],
            sources=(Join(self.kind, self.granularity, left, right),),
            stream=stream.take(kept),
            right=columns[kept],
        )

    def _pairs(self, left: Options, right: Options) -> tuple[Integers, Integers]:
        """Indices into both parts, in ascending order.

        Parts that take turns need the devices of the larger one. With an option of one part, only
        the fastest options of the other are looked at that have no more devices: one of each group
        that is alike otherwise. What is left out is worse.
        """
        size = (len(left), len(right))
        if self.kind == "temporal" and left.devices.shape[1] == 1 and size[0] * size[1] > FEW_PAIRS:
            groups = (_alike(left, left.stream.head), _alike(right, right.stream.tail))
            looked_at = len(groups[0]) * size[1] + len(groups[1]) * size[0]
            if looked_at < size[0] * size[1]:
                one, beside_one = _fastest(left, groups[0], right.devices[:, 0])
                other, beside_other = _fastest(right, groups[1], left.devices[:, 0])
                rows, columns = np.append(one, beside_other), np.append(beside_one, other)
                pairs = np.unique(rows * size[1] + columns)
                return pairs // size[1], pairs % size[1]
        rows, columns = np.indices(size, np.int64).reshape(2, -1)
        return rows, columns

    def _side_by_side(self, a: Integers, b: Integers) -> Integers:
        """[N, K] devices of both parts; the one with the larger replicas comes first."""
        align_a, align_b = self.alignment
        if align_b > align_a:
            a, b, align_b = b, a, align_a
        padded = -(-a // align_b) * align_b
        return np.where(b > 0, padded + b, a)


def _alike(part: Options, pace: Floats) -> list[Integers]:
    """Groups of options of one kind of device, ascending in it, that else differ in time alone."""
    same = np.column_stack([pace, part.peak[:, 0], part.idle[:, 0]])
    _, group = np.unique(same, axis=0, return_inverse=True)
    order = np.lexsort((part.devices[:, 0], group))
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _fastest(part: Options, groups: list[Integers], devices: Integers) -> tuple[Integers, Integers]:
    """The fastest option of each group on at most so many devices, the first of equals.

    Returns its index, and the one into ``devices``.
    """
    order = np.argsort(part.stream.first, kind="stable")
    rank = np.empty(len(part), np.int64)
    rank[order] = np.arange(len(part))
    options, places = [], []
    for group in groups:
        best = order[np.minimum.accumulate(rank[group])]
        last = np.searchsorted(part.devices[group, 0], devices, side="right") - 1
        fits = np.flatnonzero(last >= 0)
        options.append(best[last[fits]])
        places.append(fits)
    return np.concatenate(options), np.concatenate(places)


@dataclass(frozen=True)
class Cut:
    """A part, divided into two sets of nodes (bits of their positions), and how they go on."""

    left: int
    right: int
    kind: Kind


class Search:
    """Finds the options of all parts of one flow.

    Args:
        others: Memory that is irrelevant, by node.
        slower: Options that take more than this many times the least time that is known of any
            plan are dropped; 1 keeps the best.
        known: Time of a plan that is known to exist [s].
    """

    def __init__(
        self,
        problem: Problem,
        others: dict[str, MemoryOfOthers],
        *,
        slower: float = 1.0,
        known: float = np.inf,
    ) -> None:
        self._problem = problem
        self._others = others
        self._items = problem.constraints.items
        self._order = problem.flow.order()
        self._whole = (1 << len(self._order)) - 1
        place = {node.name: position for position, node in enumerate(self._order)}
        self._edges = [
            (place[source], place[target])
            for target, sources in problem.flow.feeds().items()
            for source in sources
        ]
        self._tables: dict[tuple[int, int], NodeOptions | None] = {}
        self._found: dict[tuple[int, Form, int], Options | None] = {}
        self._limits = OptionBounds(problem.capacity(), problem.memory())
        # A plan that is exactly as fast must survive rounding.
        bound = slower * min(known, self._simple_plan()) * (1 + 1e-9)
        self._limits = replace(self._limits, seconds=bound)

    def root(self) -> Options | None:
        """Options for the whole flow, also those that others dominate; None: nothing fits."""
        if len(self._order) == 1:
            return self._options(self._whole, "closed", self._items)
        found = self._composed(self._whole, "closed", self._items)
        return join(found) if found else None

    def _simple_plan(self) -> float:
        """Time of the best plan in which all nodes take turns; infinite where none fits."""
        found = self._leaf(1, "closed", self._items)
        turns = Composition("temporal", "closed", self._items, 1, (1, 1))
        for position in range(1, len(self._order)):
            other = self._leaf(1 << position, "closed", self._items)
            if found is None or other is None:
                return np.inf
            combined = turns.combine(found, other, self._limits)
            found = combined and combined.undominated()
        return np.inf if found is None else float(found.stream.first.min())

    def _options(self, part: int, form: Form, granularity: int) -> Options | None:
        """Undominated options of a part; a closed part may use any granularity inside."""
        key = (part, form, granularity)
        if key not in self._found:
            if part & (part - 1) == 0:
                self._found[key] = self._bounded(part, form, granularity)
            else:
                found = self._composed(part, form, granularity)
                self._found[key] = join(found).undominated() if found else None
        return self._found[key]

    def _composed(self, part: int, form: Form, granularity: int) -> list[Options]:
        """Options of every cut, composition and granularity of a part of several nodes."""
        found = []
        considered = self._problem.constraints.considered()
        for cut in self._cuts(part):
            pipelines = cut.kind == "spatial" and form == "closed"
            for inner in considered if pipelines else (granularity,):
                combined = self._join(cut, form, inner)
                if combined is not None:
                    found.append(combined)
        return found

    def _join(self, cut: Cut, form: Form, granularity: int) -> Options | None:
        """Options of one cut, composed in one way."""
        left, right = (
            self._options(part, part_form, self._items if part_form == "closed" else granularity)
            for part, part_form in zip((cut.left, cut.right), PARTS[cut.kind, form], strict=True)
        )
        if left is None or right is None:
            return None
        alignment = (self._alignment(cut.left), self._alignment(cut.right))
        chunks = self._items // granularity
        composition = Composition(cut.kind, form, granularity, chunks, alignment)
        found = composition.combine(left, right, self._limits)
        if found is None:
            return None
        if cut.kind == "parallel" and cut.left | cut.right == self._whole:
            found = found.slowed(self._problem.overlap)
        return found.undominated()

    def _leaf(self, part: int, form: Form, granularity: int) -> Options | None:
        position = part.bit_length() - 1
        key = (position, granularity)
        if key not in self._tables:
            node = self._order[position]
            others = self._others[node.name]
            self._tables[key] = node_options(self._problem, node, granularity, others)
        table = self._tables[key]
        return None if table is None else table.options(form, self._items // granularity)

    def _bounded(self, part: int, form: Form, granularity: int) -> Options | None:
        """Options of one node that are not too slow."""
        options = self._leaf(part, form, granularity)
        if options is None:
            return None
        totals = least_total(form, options.stream, self._items // granularity)
        kept = np.flatnonzero(totals <= self._limits.seconds)
        return options.take(kept) if len(kept) else None

    def _alignment(self, part: int) -> int:
        """Multiple at which the devices of a part must begin."""
        nodes = [node for i, node in enumerate(self._order) if part >> i & 1]
        return self._problem.alignment([name for node in nodes for name in node.components])

    def _cuts(self, part: int) -> Iterator[Cut]:
        """All cuts of a part.

        Parts take turns only in the order in which the executor reserves devices: all of the
        first before all of the second. Parts without an edge between them run side by side.
        """
        left = (part - 1) & part
        while left:
            right = part & ~left
            if not self._crosses(right, left):
                yield from self._cut(left, right)
            left = (left - 1) & part

    def _cut(self, left: int, right: int) -> Iterator[Cut]:
        if left.bit_length() <= (right & -right).bit_length():
            yield Cut(left, right, "temporal")
        if self._crosses(left, right):
            yield Cut(left, right, "spatial")
            if left | right == self._whole and self._problem.constraints.staleness:
                # Each part is busy with another step, so that neither waits for the other.
                yield Cut(left, right, "parallel")
        elif left & -left < right & -right:
            yield Cut(left, right, "parallel")

    def _crosses(self, sources: int, targets: int) -> bool:
        return any(sources >> a & 1 and targets >> b & 1 for a, b in self._edges)
