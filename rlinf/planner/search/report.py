"""A found tree as a plan that can be read: devices, expected times and memory, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.planner.search.formulas import Floats
from rlinf.planner.search.node_options import all_serve, kept_bytes, price
from rlinf.planner.search.options import NodePlacement
from rlinf.planner.search.problem import (
    Problem,
    component_bytes,
    component_lead,
    component_seconds,
    legal_sizes,
)
from rlinf.planner.search.tree import JoinTree, NodeTree, Tree, layout, node_trees, value

SIGNS = {"temporal": " ; ", "spatial": " | ", "parallel": " & "}


@dataclass(frozen=True)
class Planned:
    """A plan and what it promises.

    Args:
        plan: What the executor runs.
        seconds: Expected time of a step, with what is spent outside of components [s].
        peak_bytes: Expected most memory of a device, by kind of device.
        shape: How the plan is composed: ``;`` for taking turns, ``|`` for streaming into each
            other, ``&`` for side by side, such as ``(rollout | inference) ; train``.
        extended: Sizes and switches that were not measured, and what was assumed for them.
        hand_overs: Items per hand-over of each node that streams, as the times assume it.
        alternatives: The next best placements.
    """

    plan: Plan
    seconds: float
    peak_bytes: dict[str, float]
    shape: str
    extended: tuple[str, ...]
    hand_overs: Mapping[str, int] = field(default_factory=dict)
    alternatives: tuple[Planned, ...] = ()


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
    return Planned(
        plan=Plan(components=dict(writer.components())),
        seconds=writer.total + problem.profile.fixed_seconds,
        peak_bytes=writer.peak_bytes(),
        shape=describe(tree),
        extended=tuple(writer.extended()),
        hand_overs=writer.hand_overs(),
    )


class _Writer:
    """Works out what a plan says about each component of one tree."""

    def __init__(self, problem: Problem, tree: Tree) -> None:
        self._problem = problem
        self._tree = tree
        self._nodes = {node.name: node for node in problem.flow.nodes}
        self._layout = layout(tree, problem)
        self.total = self._value(tree)

    def components(self) -> Iterator[tuple[str, ComponentPlan]]:
        """Plans of the components, in the order of the flow."""
        tree_of = {node_tree.placement.node: node_tree for node_tree in node_trees(self._tree)}
        for node in self._problem.flow.nodes:
            node_tree = tree_of[node.name]
            for name in node.components:
                yield name, self._component(node_tree, name)

    def _component(self, node_tree: NodeTree, name: str) -> ComponentPlan:
        placement, devices = node_tree.placement, self._layout[name]
        return ComponentPlan(
            devices=devices,
            processes=len(devices) // self._problem.limits(name).devices_per_process,
            residency="resident" if name in placement.resident else "offload",
            pipeline_stages=placement.stages,
            predicted_seconds=self._busy(node_tree, name),
            predicted_bytes=int(self._held(placement, name)),
            reason=self._reason(node_tree, name),
        )

    def hand_overs(self) -> dict[str, int]:
        """Items per hand-over of the nodes that stream."""
        return {
            node_tree.placement.node: node_tree.granularity
            for node_tree in node_trees(self._tree)
            if self._streams(node_tree)
        }

    def _streams(self, node_tree: NodeTree) -> bool:
        return node_tree.granularity < self._problem.constraints.items

    def _busy(self, node_tree: NodeTree, name: str) -> float:
        """Time per step that a component works [s]."""
        block, kind = _position(node_tree.placement, name)
        size, stages = np.array([node_tree.placement.sizes[block]]), node_tree.placement.stages
        problem, items = self._problem, node_tree.granularity
        chunk = component_seconds(problem, name, kind, size, items=items, stages=stages)
        lead = component_lead(problem, name, kind, size, stages=stages)
        return float(lead[0] + chunk[0] * (problem.constraints.items // items))

    # -- reasons --------------------------------------------------------------------------------

    def _reason(self, node_tree: NodeTree, name: str) -> str:
        own, total = _seconds(self._busy(node_tree, name)), _seconds(self.total)
        gained = self._gains[name]
        bound = max(self._gains, key=lambda other: self._gains[other])
        if name == bound:
            role = f"{name}-bound"
        elif gained < 0.02 * self.total:
            role = f"hidden behind {bound}"
        else:
            role = f"adds to {bound}"
        return f"{role}: {own} of {total}; {self._next_size(node_tree, name)}"

    @cached_property
    def _gains(self) -> dict[str, float]:
        """By how much the step would be shorter if a component took no time [s]."""
        names = [
            name for node_tree in node_trees(self._tree) for name in node_tree.placement.components
        ]
        return {name: self.total - self._value(self._tree, without=name) for name in names}

    def _next_size(self, node_tree: NodeTree, name: str) -> str:
        """What the next larger number of devices would change."""
        placement = node_tree.placement
        block, kind = _position(placement, name)
        sizes = self._larger(node_tree, name, kind)
        if len(sizes) == 0:
            pieces = (
                f" for {node_tree.granularity} items at once" if self._streams(node_tree) else ""
            )
            most = placement.sizes[block]
            devices = "device is" if most == 1 else "devices are"
            return f"{most} {devices} the most that it can use{pieces}"
        now = placement.sizes[block]
        # One device more is often too few to divide the items better; twice as many are not.
        for size in (int(sizes[0]), int(sizes[sizes <= 2 * now].max(initial=sizes[0]))):
            changed = tuple(size if i == block else s for i, s in enumerate(placement.sizes))
            other = _exchange(self._tree, placement, replace(placement, sizes=changed))
            change = self._value(other) / self.total - 1
            if abs(change) >= 0.005:
                return f"{size} devices instead of {now}: {100 * change:+.0f} %"
        return f"{size} devices instead of {now} would not change the step"

    def _larger(self, node_tree: NodeTree, name: str, kind: int) -> np.ndarray:
        problem, placement = self._problem, node_tree.placement
        groups = problem.cluster.groups
        twice = groups[kind].model_copy(update={"nodes": 2 * groups[kind].nodes})
        wider = problem.cluster.model_copy(
            update={"groups": (*groups[:kind], twice, *groups[kind + 1 :])}
        )
        block, _ = _position(placement, name)
        found = None
        for stage in placement.blocks[block]:
            sizes = legal_sizes(
                replace(problem, cluster=wider),
                placement.components[stage],
                kind,
                items=node_tree.granularity,
                stages=placement.stages,
            )
            found = sizes if found is None else found[np.isin(found, sizes)]
        assert found is not None
        larger = found[found > placement.sizes[block]]
        grid = [np.full(len(larger), size) for size in placement.sizes]
        grid[block] = larger
        return larger[all_serve(problem, placement, grid)]

    # -- times and memory -----------------------------------------------------------------------

    def _value(self, tree: Tree, without: str | None = None) -> float:
        def pricing(placement: NodePlacement, items: int) -> tuple[float, float]:
            return price(
                self._problem, self._nodes[placement.node], placement, items, without=without
            )

        items, overlap = self._problem.constraints.items, self._problem.overlap
        return value(tree, pricing, items, overlap=overlap)

    def peak_bytes(self) -> dict[str, float]:
        """Most memory of a device of each kind."""
        peak, _ = self._memory(self._tree)
        groups = self._problem.cluster.groups
        return {group.kind or "device": float(p) for group, p in zip(groups, peak, strict=True)}

    def _memory(self, tree: Tree) -> tuple[Floats, Floats]:
        """[K] peak while a tree runs, and what it keeps while it does not."""
        if isinstance(tree, NodeTree):
            kinds = len(self._problem.cluster.groups)
            peak, idle = np.zeros(kinds), np.zeros(kinds)
            placement = tree.placement
            for block, kind in zip(placement.blocks, placement.kinds, strict=True):
                names = [placement.components[stage] for stage in block]
                peak[kind] = max(peak[kind], sum(self._held(placement, name) for name in names))
                idle[kind] = max(idle[kind], kept_bytes(self._problem, placement, names))
            return peak, idle
        (peak_a, idle_a), (peak_b, idle_b) = self._memory(tree.left), self._memory(tree.right)
        if tree.kind == "temporal":
            return np.maximum(peak_a + idle_b, peak_b + idle_a), idle_a + idle_b
        return np.maximum(peak_a, peak_b), np.maximum(idle_a, idle_b)

    def _held(self, placement: NodePlacement, name: str) -> float:
        """Most memory of a device that a component holds [bytes]."""
        block, kind = _position(placement, name)
        size = np.array([placement.sizes[block]])
        return float(component_bytes(self._problem, name, kind, size, stages=placement.stages)[0])

    def extended(self) -> Iterator[str]:
        """What of the plan lies beyond measurements: kinds of devices, sizes, and switches."""
        yield from self._assumed_kinds()
        items = self._problem.constraints.items
        for node_tree in node_trees(self._tree):
            for name in node_tree.placement.components:
                block, kind = _position(node_tree.placement, name)
                cost = self._problem.cost(name, kind)
                seen = items if cost.profile.concurrent else node_tree.granularity
                size = node_tree.placement.sizes[block]
                for words in cost.extensions(seen, size, node_tree.placement.stages):
                    yield f"{name}: {words}"
                # What stays is right without it: no switch is faster than none.
                if name not in node_tree.placement.resident and not cost.profile.switch_is_measured:
                    yield f"switch of {name}, taken as 0 s"

    def _assumed_kinds(self) -> Iterator[str]:
        """Figures that do not say on what kind of device they were measured."""
        used: dict[int, list[str]] = {}
        for node_tree in node_trees(self._tree):
            for name in node_tree.placement.components:
                _, kind = _position(node_tree.placement, name)
                if self._problem.cost(name, kind).assumed:
                    used.setdefault(kind, []).append(name)
        for kind, names in used.items():
            group = self._problem.cluster.groups[kind]
            yield (
                f"{', '.join(names)}: figures that name no kind of device, taken for those of "
                f"{group.kind}"
            )


def _position(placement: NodePlacement, name: str) -> tuple[int, int]:
    """Block of a component, and its kind of device."""
    stage = placement.components.index(name)
    block = next(i for i, members in enumerate(placement.blocks) if stage in members)
    return block, placement.kinds[block]


def _exchange(tree: Tree, old: NodePlacement, new: NodePlacement) -> Tree:
    if isinstance(tree, NodeTree):
        return replace(tree, placement=new) if tree.placement is old else tree
    return replace(tree, left=_exchange(tree.left, old, new), right=_exchange(tree.right, old, new))


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"
