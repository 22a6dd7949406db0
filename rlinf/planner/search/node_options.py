"""All ways to run one node: sizes, kinds of devices, sub-batches in flight, residency."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlinf.flow.graph import Node
from rlinf.planner.search.formulas import Floats, loop_seconds
from rlinf.planner.search.pareto import (
    Blocks,
    Integers,
    NodeOptions,
    NodePlacement,
    PlacementGrid,
    join,
    undominated,
)
from rlinf.planner.search.problem import Problem

# Sums of memory that are told apart, at most; with more, memory is compared as it is.
MOST_SUMS = 4096


@dataclass(frozen=True)
class MemoryOfOthers:
    """What other nodes may keep on a device while one runs.

    A node fits beside some of the others or it does not; how many bytes are left over is of no
    interest. Its memory is therefore raised to the next amount at which the answer changes.
    """

    amounts: tuple[Floats, ...]
    """Per kind of device, ascending, the memory that each set of others leaves."""
    plenty: NDArray[np.bool_]  # [K] whether any nodes fit together in any way

    def raised(self, peak: Floats, kind: int) -> Floats:
        """[N] the least amount that holds each peak, of one kind of device; or else the peak."""
        amounts = self.amounts[kind]
        if len(amounts) == 0:
            return peak
        index = np.searchsorted(amounts, peak)
        above = amounts[np.minimum(index, len(amounts) - 1)]
        return np.where(index < len(amounts), above, peak)

    def undominated(self, table: NodeOptions) -> NodeOptions:
        """The ways that no other one equals or beats in every respect that can matter."""
        raised = [self.raised(peak, kind) for kind, peak in enumerate(table.peak.T)]
        peak = np.where(self.plenty, 0.0, np.stack(raised, axis=1))
        table = replace(table, peak=peak, idle=np.where(self.plenty, 0.0, table.idle))
        values = (table.devices, table.chunk, table.switch, table.peak, table.idle)
        return table.take(undominated(np.column_stack(values).astype(float)))


def memory_of_others(
    problem: Problem, tables: Mapping[str, NodeOptions]
) -> dict[str, MemoryOfOthers]:
    """What memory can matter for each node, from all ways to run each with all items."""
    memory = problem.memory()
    peak = {name: table.peak.max(axis=0) for name, table in tables.items()}
    kept = {name: table.idle.max(axis=0) for name, table in tables.items()}
    every = np.sum(list(kept.values()), axis=0)
    plenty = np.logical_and.reduce([peak[n] + every - kept[n] <= memory for n in tables])
    found = {}
    for name in tables:
        others = [table for other, table in tables.items() if other != name]
        amounts = tuple(
            np.unique(memory[kind] - _sums([table.idle[:, kind] for table in others]))
            for kind in range(len(memory))
        )
        found[name] = MemoryOfOthers(amounts, plenty)
    return found


def _sums(kept: list[Floats]) -> Floats:
    """All sums of one value, or none, of each node."""
    choices = [np.unique(np.append(values, 0.0)) for values in kept]
    if int(np.prod([len(values) for values in choices])) > MOST_SUMS:
        return np.zeros(0)
    return np.array([sum(values) for values in itertools.product(*choices)])


# -- ways to run a node -------------------------------------------------------------------------


def node_options(
    problem: Problem, node: Node, granularity: int, others: MemoryOfOthers | None = None
) -> NodeOptions | None:
    """Ways to run a node in chunks of ``granularity`` items that fit; None: there is none.

    ``others`` is the most memory of the other nodes; None keeps dominated ways, too.
    """
    names, whole = node.components, granularity == problem.constraints.items
    if not whole and not all(problem.limits(name).streams for name in names):
        return None
    counts = [problem.limits(name).pipeline_stages if node.is_loop else (1,) for name in names]
    tables = [
        table
        for blocks in partitions(tuple(range(len(names))))
        for kinds in itertools.product(*(_common_kinds(problem, node, b) for b in blocks))
        for stages in sorted(set(counts[0]).intersection(*counts))
        for table in _tables(
            problem,
            NodePlacement(node.name, names, blocks, kinds, (), stages, frozenset(names)),
            granularity,
            others,
        )
    ]
    if not tables:
        return None
    found = join(tables)
    legal = np.isfinite(found.chunk) & (found.peak <= problem.memory()).all(axis=1)
    if not legal.any():
        return None
    found = found.take(np.flatnonzero(legal))
    return found if others is None else others.undominated(found)


def partitions(stages: tuple[int, ...]) -> Iterator[Blocks]:
    """All ways to share devices among the stages of a node."""
    if not stages:
        yield ()
        return
    first, rest = stages[0], stages[1:]
    for count in range(len(rest), -1, -1):
        for others in itertools.combinations(rest, count):
            remaining = tuple(stage for stage in rest if stage not in others)
            for partition in partitions(remaining):
                yield ((first, *others), *partition)


def block_order(problem: Problem, placement: NodePlacement) -> list[int]:
    """Blocks in the order of their devices: those of the largest replicas first."""
    blocks = range(len(placement.blocks))
    return sorted(blocks, key=lambda block: -problem.alignment(placement.names(block)))


def _common_kinds(problem: Problem, node: Node, block: Sequence[int]) -> list[int]:
    sets = [set(problem.kinds(node.components[stage])) for stage in block]
    return sorted(set.intersection(*sets))


def _residencies(problem: Problem, names: Sequence[str]) -> list[frozenset[str]]:
    """Who may keep its memory while a node is idle.

    All that are not limited do, which is preferred where it costs the same, or none of them.
    """
    asked = {name: problem.limits(name).residency for name in names}
    pinned = frozenset(name for name, residency in asked.items() if residency == "resident")
    free = frozenset(name for name, residency in asked.items() if residency is None)
    return [pinned | free, pinned] if free else [pinned]


def _tables(
    problem: Problem, division: NodePlacement, items: int, others: MemoryOfOthers | None
) -> Iterator[NodeOptions]:
    """All sizes of one division of a node, for each legal residency."""
    per_block = [
        _block_sizes(problem, division, block, items, others)
        for block in range(len(division.blocks))
    ]
    grid = tuple(g.ravel() for g in np.meshgrid(*per_block, indexing="ij"))
    devices = _devices(problem, division, grid)
    fits = (devices <= problem.capacity()).all(axis=1) & all_serve(problem, division, grid)
    grid, devices = tuple(g[fits] for g in grid), devices[fits]
    if len(devices) == 0:
        return
    chunk, lead = _chunk_and_lead(problem, division, grid, items=items)
    source, index = np.zeros(len(devices), np.int64), np.arange(len(devices))
    for resident in _residencies(problem, division.components):
        placement = replace(division, resident=resident)
        peak, idle = _memory(problem, placement, grid)
        switch = lead + _switch(problem, placement)
        sources = (PlacementGrid(placement, grid),)
        yield NodeOptions(devices, peak, idle, source, index, sources, chunk=chunk, switch=switch)


def all_serve(
    problem: Problem, division: NodePlacement, grid: Sequence[Integers]
) -> NDArray[np.bool_]:
    """[N] whether every process of a component that serves another has a sub-batch of it."""
    found = np.ones(len(grid[0]), bool)
    processes = {
        name: sizes // problem.limits(name).devices_per_process
        for name, _, sizes in division.spread(grid)
    }
    for name in division.components:
        served = problem.limits(name).serves
        if served:
            found &= processes[name] <= processes[served] * division.stages
    return found


def _block_sizes(
    problem: Problem, division: NodePlacement, block: int, items: int, others: MemoryOfOthers | None
) -> Integers:
    """Sizes that are legal, and measured or covered by a law, for all components of a block.

    Those at which no component is faster, or holds less to the ``others``, than at a smaller one
    are left out, but where another component serves one of them and may have more processes for it;
    without ``others`` every size is kept.
    """
    kind, stages, names = division.kinds[block], division.stages, division.names(block)
    legal = [problem.legal_sizes(name, kind, items=items, stages=stages) for name in names]
    sizes = legal[0][np.logical_and.reduce([np.isin(legal[0], other) for other in legal])]
    values: list[Floats] = [sizes.astype(float)]
    for name in names:
        # What passes before the first result is a share of these seconds.
        values.append(problem.seconds(name, kind, sizes, items=items, stages=stages))
        if np.isfinite(problem.memory()[kind]):
            held = problem.peak(name, kind, sizes, stages=stages)
            values.append(others.raised(held, kind) if others and len(names) == 1 else held)
    finite = np.flatnonzero(np.isfinite(values[1:]).all(axis=0))
    served = {problem.limits(name).serves for name in division.components}
    if others is None or served & set(names):
        return sizes[finite]
    return sizes[finite][undominated(np.column_stack(values)[finite])]


def _devices(problem: Problem, division: NodePlacement, grid: Sequence[Integers]) -> Integers:
    """[N, K] devices of a node, with the gaps that its replicas need to stay on their nodes."""
    used = np.zeros((len(grid[0]), len(problem.cluster.groups)), np.int64)
    for block in block_order(problem, division):
        align = problem.alignment(division.names(block))
        column = used[:, division.kinds[block]]
        column[:] = -(-column // align) * align + grid[block]
    return used


def _chunk_and_lead(
    problem: Problem,
    division: NodePlacement,
    grid: Sequence[Integers],
    *,
    items: int,
    without: str | None = None,
) -> tuple[Floats, Floats]:
    """[N] time per chunk, and before the first result of who serves all items at once."""
    names, stages = division.components, division.stages
    lead = np.zeros(len(grid[0]))
    seconds: dict[str, Floats] = {}
    closing: dict[str, Floats] = {}
    for name, kind, sizes in division.spread(grid):
        time = problem.seconds(name, kind, sizes, items=items, stages=stages)
        seconds[name] = np.zeros_like(time) if name == without else time
        if name != without:
            lead = np.maximum(lead, problem.lead(name, kind, sizes, stages=stages))
        if len(names) > 1:
            share = problem.closing(name, kind, sizes, items=items, stages=stages)
            closing[name] = seconds[name] * share
    if len(names) == 1:
        return seconds[names[0]], lead
    chunk = loop_seconds(
        [seconds[name] for name in names],
        [list(block) for block in division.blocks],
        exchanges=problem.constraints.exchanges.get(division.node, 1),
        stages=stages,
        flowing=any(problem.profile.components[name].concurrent for name in names),
        closing=[closing[name] for name in names],
        between=_between(problem, division.node, grid),
    )
    return chunk, lead


def _between(problem: Problem, node: str, grid: Sequence[Integers]) -> Floats:
    """[N] time of an exchange of a loop in which none of its stages works."""
    found = np.zeros(len(grid[0]))
    if problem.profile.exchanges:
        devices, apart = np.sum(np.stack(grid), axis=0), len(grid) > 1
        for size in np.unique(devices).tolist():
            found[devices == size] = problem.profile.exchange_seconds(node, size, apart=apart)
    return found


def _memory(
    problem: Problem, placement: NodePlacement, grid: Sequence[Integers]
) -> tuple[Floats, Floats]:
    """[N, K] peak and idle memory."""
    shape = (len(grid[0]), len(problem.cluster.groups))
    peak, idle, components = np.zeros(shape), np.zeros(shape), problem.profile.components
    for block, (kind, sizes) in enumerate(zip(placement.kinds, grid, strict=True)):
        names = placement.names(block)
        held = sum(problem.peak(n, kind, sizes, stages=placement.stages) for n in names)
        peak[:, kind] = np.maximum(peak[:, kind], held)
        kept = sum(components[n].resident_bytes for n in names if n in placement.resident)
        idle[:, kind] = np.maximum(idle[:, kind], kept)
    return peak, idle


def _switch(problem: Problem, placement: NodePlacement, *, without: str | None = None) -> float:
    """Time of loading and offloading what is not resident [s]."""
    away = [name for name in placement.components if name not in {*placement.resident, without}]
    return sum(problem.profile.switch_seconds(away))


def _one_size(placement: NodePlacement) -> list[Integers]:
    return [np.array([size]) for size in placement.sizes]


def price(
    problem: Problem, placement: NodePlacement, items: int, *, without: str | None = None
) -> tuple[Floats, Floats]:
    """[1] time per chunk of ``items``, and time that is spent once, of one placement [s].

    ``without`` names a component that takes no time.
    """
    grid = _one_size(placement)
    chunk, lead = _chunk_and_lead(problem, placement, grid, items=items, without=without)
    return chunk, lead + _switch(problem, placement, without=without)


def memory_of(problem: Problem, placement: NodePlacement) -> tuple[Floats, Floats]:
    """[K] peak and idle memory of one placement [bytes]."""
    peak, idle = _memory(problem, placement, _one_size(placement))
    return peak[0], idle[0]
