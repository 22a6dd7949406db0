"""All ways to run one node: sizes, kinds of devices, sub-batches in flight, residency."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlinf.flow.graph import Node
from rlinf.planner.search.formulas import Floats, loop_seconds
from rlinf.planner.search.memory import MemoryOfOthers
from rlinf.planner.search.options import (
    Blocks,
    Integers,
    NodeOptions,
    NodePlacement,
    PlacementGrid,
    undominated,
)
from rlinf.planner.search.problem import (
    Problem,
    component_bytes,
    component_closing,
    component_lead,
    component_seconds,
    legal_sizes,
)


def node_options(
    problem: Problem, node: Node, granularity: int, others: MemoryOfOthers | None = None
) -> NodeOptions | None:
    """Ways to run a node in chunks of ``granularity`` items that fit; None: there is none.

    Args:
        problem: What is planned.
        node: The node.
        granularity: Items per chunk.
        others: Most memory of the other nodes; None keeps dominated ways, too.
    """
    whole = granularity == problem.constraints.items
    if not whole and not all(problem.limits(name).streams for name in node.components):
        return None
    tables = [
        table
        for blocks in partitions(tuple(range(len(node.stages))))
        for kinds in itertools.product(*(_common_kinds(problem, node, b) for b in blocks))
        for stages in _stage_counts(problem, node)
        for table in _tables(
            problem, node, _division(node, blocks, kinds, stages), granularity, others
        )
    ]
    found = _legal(problem, tables) if tables else None
    return found if found is None or others is None else _undominated(found, others)


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


def block_order(problem: Problem, components: Sequence[str], blocks: Blocks) -> list[int]:
    """Blocks in the order of their devices: those of the largest replicas first."""
    alignments = [problem.alignment([components[i] for i in block]) for block in blocks]
    return sorted(range(len(blocks)), key=lambda position: -alignments[position])


def _common_kinds(problem: Problem, node: Node, block: Sequence[int]) -> list[int]:
    sets = [set(problem.kinds(node.components[stage])) for stage in block]
    return sorted(set.intersection(*sets))


def _stage_counts(problem: Problem, node: Node) -> list[int]:
    """Numbers of sub-batches that all components of a loop can have."""
    if not node.is_loop:
        return [1]
    counts = [set(problem.limits(name).pipeline_stages) for name in node.components]
    return sorted(set.intersection(*counts))


def _residencies(problem: Problem, node: Node) -> list[frozenset[str]]:
    """Who may keep its memory while a node is idle.

    All that are not limited do, which is preferred where it costs the same, or none of them.
    """
    asked = {name: problem.limits(name).residency for name in node.components}
    pinned = frozenset(name for name, residency in asked.items() if residency == "resident")
    free = frozenset(name for name, residency in asked.items() if residency is None)
    return [pinned | free, pinned] if free else [pinned]


def _division(node: Node, blocks: Blocks, kinds: tuple[int, ...], stages: int) -> NodePlacement:
    """A placement for a node without its sizes."""
    resident = frozenset(node.components)
    return NodePlacement(node.name, node.components, blocks, kinds, (), stages, resident)


def _tables(
    problem: Problem, node: Node, division: NodePlacement, items: int, others: MemoryOfOthers | None
) -> Iterator[NodeOptions]:
    """All sizes of one division of a node, for each legal residency."""
    per_block = [
        _block_sizes(problem, division, block, items, others)
        for block in range(len(division.blocks))
    ]
    grid = tuple(g.ravel() for g in np.meshgrid(*per_block, indexing="ij"))
    devices = _devices(problem, node, division.blocks, division.kinds, grid)
    fits = (devices <= problem.capacity()).all(axis=1) & all_serve(problem, division, grid)
    grid, devices = tuple(g[fits] for g in grid), devices[fits]
    count = len(devices)
    if count == 0:
        return
    chunk = _seconds(problem, node, division, grid, items=items)
    lead = _lead(problem, division, grid)
    zeros, index = np.zeros(count, np.int64), np.arange(count)
    for resident in _residencies(problem, node):
        placement = replace(division, resident=resident)
        peak, idle = _memory(problem, placement, grid)
        switch = lead + _switch(problem, placement)
        grids = (PlacementGrid(placement, grid),)
        yield NodeOptions(devices, chunk, switch, peak, idle, zeros, index, grids)


def all_serve(
    problem: Problem, division: NodePlacement, grid: Sequence[Integers]
) -> NDArray[np.bool_]:
    """[N] whether every process of a component that serves another has a sub-batch of it."""
    found = np.ones(len(grid[0]), bool)
    processes: dict[str, Integers] = {}
    for block, sizes in zip(division.blocks, grid, strict=True):
        for name in (division.components[stage] for stage in block):
            processes[name] = sizes // problem.limits(name).devices_per_process
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
    kind, stages = division.kinds[block], division.stages
    names = [division.components[stage] for stage in division.blocks[block]]
    legal = [legal_sizes(problem, name, kind, items=items, stages=stages) for name in names]
    sizes = legal[0][np.logical_and.reduce([np.isin(legal[0], other) for other in legal])]
    values: list[Floats] = [sizes.astype(float)]
    for name in names:
        # What passes before the first result is a share of these seconds.
        values.append(component_seconds(problem, name, kind, sizes, items=items, stages=stages))
        if np.isfinite(problem.memory()[kind]):
            held = component_bytes(problem, name, kind, sizes, stages=stages)
            values.append(others.raised(held, kind) if others and len(names) == 1 else held)
    finite = np.flatnonzero(np.isfinite(values[1:]).all(axis=0))
    served = {problem.limits(name).serves for name in division.components}
    if others is None or served & set(names):
        return sizes[finite]
    return sizes[finite][undominated(np.column_stack(values)[finite])]


def _devices(
    problem: Problem, node: Node, blocks: Blocks, kinds: Sequence[int], grid: Sequence[Integers]
) -> Integers:
    """[N, K] devices of a node, with the gaps that its replicas need to stay on their nodes."""
    used = np.zeros((len(grid[0]), len(problem.cluster.groups)), np.int64)
    for position in block_order(problem, node.components, blocks):
        align = problem.alignment([node.components[i] for i in blocks[position]])
        column = used[:, kinds[position]]
        used[:, kinds[position]] = -(-column // align) * align + grid[position]
    return used


def _seconds(
    problem: Problem,
    node: Node,
    division: NodePlacement,
    grid: Sequence[Integers],
    *,
    items: int,
    without: str | None = None,
) -> Floats:
    """[N] time per chunk."""
    seconds: list[Floats] = [np.zeros(0)] * len(node.stages)
    closing = list(seconds)
    for block, kind, sizes in zip(division.blocks, division.kinds, grid, strict=True):
        for stage in block:
            name = node.components[stage]
            time = component_seconds(
                problem, name, kind, sizes, items=items, stages=division.stages
            )
            seconds[stage] = np.zeros_like(time) if name == without else time
            if node.is_loop:
                share = component_closing(
                    problem, name, kind, sizes, items=items, stages=division.stages
                )
                closing[stage] = seconds[stage] * share
    if not node.is_loop:
        return seconds[0]
    return loop_seconds(
        seconds,
        [list(block) for block in division.blocks],
        exchanges=problem.constraints.exchanges.get(node.name, 1),
        stages=division.stages,
        flowing=any(problem.profile.components[n].concurrent for n in node.components),
        closing=closing,
        between=_between(problem, node, grid),
    )


def _between(problem: Problem, node: Node, grid: Sequence[Integers]) -> Floats:
    """[N] time of an exchange of a loop in which none of its stages works."""
    found = np.zeros(len(grid[0]))
    if problem.profile.exchanges:
        devices, apart = np.sum(np.stack(grid), axis=0), len(grid) > 1
        for size in np.unique(devices).tolist():
            seconds = problem.profile.exchange_seconds(node.name, size, apart=apart)
            found[devices == size] = seconds
    return found


def _lead(
    problem: Problem,
    division: NodePlacement,
    grid: Sequence[Integers],
    *,
    without: str | None = None,
) -> Floats:
    """[N] time before the first result, of the slowest component that serves all items at once."""
    found = np.zeros(len(grid[0]))
    for block, kind, sizes in zip(division.blocks, division.kinds, grid, strict=True):
        for name in (division.components[stage] for stage in block):
            if name != without:
                lead = component_lead(problem, name, kind, sizes, stages=division.stages)
                found = np.maximum(found, lead)
    return found


def _memory(
    problem: Problem, division: NodePlacement, grid: Sequence[Integers]
) -> tuple[Floats, Floats]:
    """[N, K] peak and idle memory."""
    shape = (len(grid[0]), len(problem.cluster.groups))
    peak, idle = np.zeros(shape), np.zeros(shape)
    for block, kind, sizes in zip(division.blocks, division.kinds, grid, strict=True):
        names = [division.components[stage] for stage in block]
        held = sum(component_bytes(problem, n, kind, sizes, stages=division.stages) for n in names)
        peak[:, kind] = np.maximum(peak[:, kind], held)
        idle[:, kind] = np.maximum(idle[:, kind], kept_bytes(problem, division, names))
    return peak, idle


def kept_bytes(problem: Problem, placement: NodePlacement, names: Sequence[str]) -> int:
    """What some components of a node keep of a device while the node is idle."""
    components = problem.profile.components
    return sum(components[name].resident_bytes for name in names if name in placement.resident)


def _switch(problem: Problem, placement: NodePlacement, *, without: str | None = None) -> float:
    """Time of loading and offloading what is not resident [s].

    Workers load at the same time, and offload at the same time, so the slowest counts.
    """
    away = [name for name in placement.components if name not in {*placement.resident, without}]
    profiles = [problem.profile.components[name] for name in away]
    onload = max((profile.onload_seconds or 0.0 for profile in profiles), default=0.0)
    return onload + max((profile.offload_seconds or 0.0 for profile in profiles), default=0.0)


def _legal(problem: Problem, tables: Sequence[NodeOptions]) -> NodeOptions | None:
    """Put tables together, and keep what is legal and fits into memory."""
    offsets = np.cumsum([0, *(len(table.grids) for table in tables[:-1])])
    whole = NodeOptions(
        devices=np.concatenate([t.devices for t in tables]),
        chunk=np.concatenate([t.chunk for t in tables]),
        switch=np.concatenate([t.switch for t in tables]),
        peak=np.concatenate([t.peak for t in tables]),
        idle=np.concatenate([t.idle for t in tables]),
        grid=np.concatenate([t.grid + o for t, o in zip(tables, offsets, strict=True)]),
        index=np.concatenate([t.index for t in tables]),
        grids=tuple(grid for table in tables for grid in table.grids),
    )
    legal = np.isfinite(whole.chunk) & (whole.peak <= problem.memory()).all(axis=1)
    return whole.take(np.flatnonzero(legal)) if legal.any() else None


def _undominated(table: NodeOptions, others: MemoryOfOthers) -> NodeOptions:
    """The ways that no other one equals or beats in every respect that can matter."""
    peak, idle = others.relevant(table.peak, table.idle)
    table = replace(table, peak=peak, idle=idle)
    values = (table.devices, table.chunk, table.switch, table.peak, table.idle)
    return table.take(undominated(np.column_stack(values).astype(float)))


def price(
    problem: Problem,
    node: Node,
    placement: NodePlacement,
    items: int,
    *,
    without: str | None = None,
) -> tuple[float, float]:
    """Time per chunk of ``items``, and time that is spent once, of one placement [s].

    ``without`` names a component that takes no time.
    """
    grid = [np.array([size]) for size in placement.sizes]
    seconds = _seconds(problem, node, placement, grid, items=items, without=without)
    lead = float(_lead(problem, placement, grid, without=without)[0])
    return float(seconds[0]), lead + _switch(problem, placement, without=without)
