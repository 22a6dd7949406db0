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

from rlinf.planner.search.composition import Composition, OptionBounds
from rlinf.planner.search.formulas import PARTS, Form, Kind, least_total
from rlinf.planner.search.memory import MemoryOfOthers
from rlinf.planner.search.node_options import node_options
from rlinf.planner.search.options import NodeOptions, Options, join
from rlinf.planner.search.problem import Problem


@dataclass(frozen=True)
class Cut:
    """A part, divided into two sets of nodes (bits of their positions), and how they go on."""

    left: int
    right: int
    kind: Kind


class Search:
    """Finds the options of all parts of one flow.

    Args:
        problem: What is planned.
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
        self.order = problem.flow.order()
        self._whole = (1 << len(self.order)) - 1
        place = {node.name: position for position, node in enumerate(self.order)}
        self._edges = [
            (place[source], place[target])
            for target, sources in problem.flow.feeds().items()
            for source in sources
        ]
        self._granularities = problem.constraints.considered()
        self._tables: dict[tuple[int, int], NodeOptions | None] = {}
        self._found: dict[tuple[int, Form, int], Options | None] = {}
        self._limits = OptionBounds(problem.capacity(), problem.memory())
        # A plan that is exactly as fast must survive rounding.
        bound = slower * min(known, self._simple_plan()) * (1 + 1e-9)
        self._limits = replace(self._limits, seconds=bound)

    def root(self) -> Options | None:
        """Options for the whole flow, also those that others dominate; None: nothing fits."""
        whole = self._whole
        if len(self.order) == 1:
            return self._options(whole, "closed", self._items)
        found = self._composed(whole, "closed", self._items)
        return join(found) if found else None

    @property
    def _items(self) -> int:
        return self._problem.constraints.items

    def _simple_plan(self) -> float:
        """Time of the best plan in which all nodes take turns; infinite where none fits."""
        found = self._leaf(1, "closed", self._items)
        for position in range(1, len(self.order)):
            other = self._leaf(1 << position, "closed", self._items)
            if found is None or other is None:
                return np.inf
            turns = Composition("temporal", "closed", self._items, 1, (1, 1))
            combined = turns.combine(found, other, self._limits)
            found = None if combined is None else combined.undominated()
        return np.inf if found is None else float(found.stream.first.min())

    def _options(self, part: int, form: Form, granularity: int) -> Options | None:
        """Undominated options of a part; a closed part may use any granularity inside."""
        key = (part, form, granularity)
        if key not in self._found:
            self._found[key] = self._solve(part, form, granularity)
        return self._found[key]

    def _solve(self, part: int, form: Form, granularity: int) -> Options | None:
        if part & (part - 1) == 0:
            return self._bounded(self._leaf(part, form, granularity), form, granularity)
        found = self._composed(part, form, granularity)
        return join(found).undominated() if found else None

    def _composed(self, part: int, form: Form, granularity: int) -> list[Options]:
        """Options of every cut, composition and granularity of a part of several nodes."""
        found = []
        for cut in self.cuts(part):
            pipelines = cut.kind == "spatial" and form == "closed"
            for inner in self._granularities if pipelines else (granularity,):
                combined = self._join(cut, form, inner)
                if combined is not None:
                    found.append(combined)
        return found

    def _join(self, cut: Cut, form: Form, granularity: int) -> Options | None:
        """Options of one cut, composed in one way."""
        parts = [
            self._options(part, part_form, self._items if part_form == "closed" else granularity)
            for part, part_form in zip((cut.left, cut.right), PARTS[cut.kind, form], strict=True)
        ]
        if parts[0] is None or parts[1] is None:
            return None
        alignment = (self.alignment(cut.left), self.alignment(cut.right))
        chunks = self._items // granularity
        composition = Composition(cut.kind, form, granularity, chunks, alignment)
        found = composition.combine(parts[0], parts[1], self._limits)
        if found is None:
            return None
        if cut.kind == "parallel" and cut.left | cut.right == self._whole:
            found = found.slowed(self._problem.overlap)
        return found.undominated()

    def _leaf(self, part: int, form: Form, granularity: int) -> Options | None:
        position = part.bit_length() - 1
        key = (position, granularity)
        if key not in self._tables:
            node = self.order[position]
            others = self._others[node.name]
            self._tables[key] = node_options(self._problem, node, granularity, others)
        table = self._tables[key]
        return None if table is None else table.options(form, self._items // granularity)

    def _bounded(self, options: Options | None, form: Form, granularity: int) -> Options | None:
        if options is None:
            return None
        totals = least_total(form, options.stream, self._items // granularity)
        kept = np.flatnonzero(totals <= self._limits.seconds)
        return options.take(kept) if len(kept) else None

    def alignment(self, part: int) -> int:
        """Multiple at which the devices of a part must begin."""
        nodes = [node for i, node in enumerate(self.order) if part >> i & 1]
        return self._problem.alignment([name for node in nodes for name in node.components])

    def cuts(self, part: int) -> Iterator[Cut]:
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
        ordered = left.bit_length() <= (right & -right).bit_length()
        if ordered:
            yield Cut(left, right, "temporal")
        if self._crosses(left, right):
            yield Cut(left, right, "spatial")
            whole = left | right == self._whole
            if whole and self._problem.constraints.staleness:
                # Each part is busy with another step, so that neither waits for the other.
                yield Cut(left, right, "parallel")
        elif left & -left < right & -right:
            yield Cut(left, right, "parallel")

    def _crosses(self, sources: int, targets: int) -> bool:
        return any(sources >> a & 1 and targets >> b & 1 for a, b in self._edges)
