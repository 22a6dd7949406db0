"""A found tree as a plan that can be read: devices, expected times and memory, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.planner.search.composition import JoinTree, NodeTree, Tree, layout, node_trees, value
from rlinf.planner.search.formulas import Floats
from rlinf.planner.search.node_options import all_serve, memory_of
from rlinf.planner.search.pareto import Integers, NodePlacement
from rlinf.planner.search.problem import Problem

SIGNS = {"temporal": " ; ", "spatial": " | ", "parallel": " & "}


@dataclass(frozen=True)
class Planned:
    """A plan and what it promises."""

    plan: Plan  # what the executor runs
    seconds: float  # expected time of a step, with what is spent outside of components [s]
    peak_bytes: dict[str, float]  # expected most memory of a device, by kind of device
    shape: str
    """How the plan is composed: ``;`` for taking turns, ``|`` for streaming into each other, ``&``
    for side by side, such as ``(rollout | inference) ; train``."""
    extended: tuple[str, ...]
    """Sizes and switches that were not measured, and what was assumed for them."""
    hand_overs: Mapping[str, int] = field(default_factory=dict)
    """Items per hand-over of each node, as the times assume it: all of a step where it does not
    stream."""
    alternatives: tuple[Planned, ...] = ()  # the next best placements


def describe(tree: Tree) -> str:
    """The composition in one line."""
    if isinstance(tree, NodeTree):
        return tree.placement.node
    parts = [
        f"({describe(part)})"
        if isinstance(part, JoinTree) and part.kind != tree.kind
        else describe(part)
        for part in (tree.left, tree.right)
    ]
    return SIGNS[tree.kind].join(parts)


def write_plan(problem: Problem, tree: Tree) -> Planned:
    """The plan of a tree."""
    writer = _Writer(problem, tree)
    groups, (peak, _) = problem.cluster.groups, _memory(problem, tree)
    return Planned(
        plan=Plan(components=dict(writer.components())),
        seconds=writer.total + problem.profile.fixed_seconds,
        peak_bytes={g.kind or "device": float(p) for g, p in zip(groups, peak, strict=True)},
        shape=describe(tree),
        extended=(*_assumed_kinds(problem, tree), *_extended(problem, tree)),
        hand_overs={
            node_tree.placement.node: node_tree.granularity for node_tree in node_trees(tree)
        },
    )


class _Writer:
    """Works out what a plan says about each component of one tree."""

    def __init__(self, problem: Problem, tree: Tree) -> None:
        self._problem = problem
        self._tree = tree
        self._layout = layout(tree, problem)
        self.total = value(problem, tree)

    def components(self) -> Iterator[tuple[str, ComponentPlan]]:
        """Plans of the components, in the order of the flow."""
        tree_of = {node_tree.placement.node: node_tree for node_tree in node_trees(self._tree)}
        for node in self._problem.flow.nodes:
            for name in node.components:
                yield name, self._component(tree_of[node.name], name)

    def _component(self, node_tree: NodeTree, name: str) -> ComponentPlan:
        problem, placement, devices = self._problem, node_tree.placement, self._layout[name]
        block, kind = placement.position(name)
        size, stages = np.array([placement.sizes[block]]), placement.stages
        items = node_tree.granularity
        chunk = problem.seconds(name, kind, size, items=items, stages=stages)
        lead = problem.lead(name, kind, size, stages=stages)
        busy = float(lead[0] + chunk[0] * (problem.constraints.items // items))
        return ComponentPlan(
            devices=devices,
            processes=len(devices) // problem.limits(name).devices_per_process,
            residency="resident" if name in placement.resident else "offload",
            pipeline_stages=stages,
            predicted_seconds=busy,
            predicted_bytes=int(problem.peak(name, kind, size, stages=stages)[0]),
            reason=self._reason(node_tree, name, busy),
        )

    # -- reasons --------------------------------------------------------------------------------

    def _reason(self, node_tree: NodeTree, name: str, busy: float) -> str:
        bound = max(self._gains, key=lambda other: self._gains[other])
        if name == bound:
            role = f"{name}-bound"
        elif self._gains[name] < 0.02 * self.total:
            role = f"hidden behind {bound}"
        else:
            role = f"adds to {bound}"
        of_total = f"{_seconds(busy)} of {_seconds(self.total)}"
        return f"{role}: {of_total}; {self._next_size(node_tree, name)}"

    @cached_property
    def _gains(self) -> dict[str, float]:
        """By how much the step would be shorter if a component took no time [s]."""
        return {
            name: self.total - value(self._problem, self._tree, without=name)
            for node_tree in node_trees(self._tree)
            for name in node_tree.placement.components
        }

    def _next_size(self, node_tree: NodeTree, name: str) -> str:
        """What the next larger number of devices would change."""
        placement = node_tree.placement
        block, _ = placement.position(name)
        sizes, now = self._larger(node_tree, block), placement.sizes[block]
        if len(sizes) == 0 and len(self._larger(node_tree, block, unmeasured=True)):
            return f"more than {now} device{'' if now == 1 else 's'} were not measured"
        if len(sizes) == 0:
            devices = "device is" if now == 1 else "devices are"
            streams = node_tree.granularity < self._problem.constraints.items
            pieces = f" for {node_tree.granularity} items at once" if streams else ""
            return f"{now} {devices} the most that it can use{pieces}"
        # One device more is often too few to divide the items better; twice as many are not.
        for size in (int(sizes[0]), int(sizes[sizes <= 2 * now].max(initial=sizes[0]))):
            changed = tuple(size if i == block else s for i, s in enumerate(placement.sizes))
            other = _exchange(self._tree, placement, replace(placement, sizes=changed))
            change = value(self._problem, other) / self.total - 1
            if abs(change) >= 0.005:
                return f"{size} devices instead of {now}: {100 * change:+.0f} %"
        return f"{size} devices instead of {now} would not change the step"

    def _larger(self, node_tree: NodeTree, block: int, *, unmeasured: bool = False) -> Integers:
        """Larger numbers of devices of a block, on a cluster of twice the nodes."""
        problem, placement = self._problem, node_tree.placement
        groups, kind = list(problem.cluster.groups), placement.kinds[block]
        groups[kind] = groups[kind].model_copy(update={"nodes": 2 * groups[kind].nodes})
        wider = replace(
            problem, cluster=problem.cluster.model_copy(update={"groups": tuple(groups)})
        )
        items, stages, names = node_tree.granularity, placement.stages, placement.names(block)
        found, *others = (
            wider.legal_sizes(name, kind, items=items, stages=stages, unmeasured=unmeasured)
            for name in names
        )
        for sizes in others:
            found = found[np.isin(found, sizes)]
        larger = found[found > placement.sizes[block]]
        grid = [np.full(len(larger), size) for size in placement.sizes]
        grid[block] = larger
        return larger[all_serve(problem, placement, grid)]


def _exchange(tree: Tree, old: NodePlacement, new: NodePlacement) -> Tree:
    if isinstance(tree, NodeTree):
        return replace(tree, placement=new) if tree.placement is old else tree
    return replace(tree, left=_exchange(tree.left, old, new), right=_exchange(tree.right, old, new))


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _memory(problem: Problem, tree: Tree) -> tuple[Floats, Floats]:
    """[K] peak while a tree runs, and what it keeps while it does not."""
    if isinstance(tree, NodeTree):
        return memory_of(problem, tree.placement)
    (peak_a, idle_a), (peak_b, idle_b) = (_memory(problem, p) for p in (tree.left, tree.right))
    if tree.kind == "temporal":
        return np.maximum(peak_a + idle_b, peak_b + idle_a), idle_a + idle_b
    return np.maximum(peak_a, peak_b), np.maximum(idle_a, idle_b)


def _extended(problem: Problem, tree: Tree) -> Iterator[str]:
    """Which sizes and switches of a plan lie beyond measurements."""
    for node_tree in node_trees(tree):
        placement = node_tree.placement
        for name in placement.components:
            block, kind = placement.position(name)
            cost = problem.cost(name, kind)
            concurrent = cost.profile.concurrent
            seen = problem.constraints.items if concurrent else node_tree.granularity
            for words in cost.extensions(seen, placement.sizes[block], placement.stages):
                yield f"{name}: {words}"
            # What stays is right without it: no switch is faster than none.
            if name not in placement.resident and not cost.profile.switch_is_measured:
                yield f"switch of {name}, taken as 0 s"


def _assumed_kinds(problem: Problem, tree: Tree) -> Iterator[str]:
    """Figures that do not say on what kind of device they were measured."""
    used: dict[int, list[str]] = {}
    for node_tree in node_trees(tree):
        for name in node_tree.placement.components:
            _, kind = node_tree.placement.position(name)
            if problem.cost(name, kind).assumed:
                used.setdefault(kind, []).append(name)
    for kind, names in used.items():
        group = problem.cluster.groups[kind]
        yield (
            f"{', '.join(names)}: figures that name no kind of device, taken for those of "
            f"{group.kind}"
        )
