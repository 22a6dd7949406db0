"""A plan as a tree of compositions: reading it back, laying it out on devices, valuing it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.errors import ConfigError
from rlinf.flow.constraints import Constraints
from rlinf.flow.graph import Flow, Node
from rlinf.flow.plan import Plan
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.search.formulas import PARTS, Form, Kind, Stream, compose, single_node
from rlinf.planner.search.node_options import block_order, price
from rlinf.planner.search.options import NodePlacement, NodeSource, Options
from rlinf.planner.search.problem import Problem, make_problem

# Time per chunk and time of the switch of a placement, for a number of items [s].
Pricing = Callable[[NodePlacement, int], tuple[float, float]]


@dataclass(frozen=True)
class NodeTree:
    """One node, run in one way, in chunks of ``granularity`` items."""

    placement: NodePlacement
    granularity: int


@dataclass(frozen=True)
class JoinTree:
    """Two parts, composed."""

    kind: Kind
    granularity: int
    left: Tree
    right: Tree


Tree = NodeTree | JoinTree


def read_tree(options: Options, index: int, items: int, form: Form = "closed") -> Tree:
    """The tree of one option.

    Args:
        options: Options of a part.
        index: Which of them.
        items: Items of a step, the granularity of what is not a stream.
        form: Form of the part.
    """
    return _read(options, index, items, items, form)


def _read(options: Options, index: int, granularity: int, items: int, form: Form) -> Tree:
    source = options.sources[options.source[index]]
    if isinstance(source, NodeSource):
        return NodeTree(source.placements[int(options.left[index])], granularity)
    forms = PARTS[source.kind, form]
    chosen = (int(options.left[index]), int(options.right[index]))
    left, right = (
        _read(part, i, items if f == "closed" else source.granularity, items, f)
        for part, i, f in zip((source.left, source.right), chosen, forms, strict=True)
    )
    return JoinTree(source.kind, source.granularity, left, right)


def node_trees(tree: Tree) -> Iterator[NodeTree]:
    """All nodes of a tree, from left to right."""
    if isinstance(tree, NodeTree):
        yield tree
    else:
        yield from node_trees(tree.left)
        yield from node_trees(tree.right)


def value(tree: Tree, pricing: Pricing, items: int, *, overlap: float = 1.0) -> float:
    """Time of a step by the formulas of :mod:`rlinf.planner.search.formulas` [s].

    ``overlap`` is :attr:`~rlinf.planner.search.problem.Problem.overlap`.
    """
    factor = overlap if isinstance(tree, JoinTree) and tree.kind == "parallel" else 1.0
    return factor * float(_value(tree, pricing, items, "closed").first[0])


def _value(tree: Tree, pricing: Pricing, items: int, form: Form) -> Stream:
    if isinstance(tree, NodeTree):
        chunk, switch = pricing(tree.placement, tree.granularity)
        chunks = items // tree.granularity
        return single_node(form, np.array([chunk]), np.array([switch]), chunks)
    left, right = (
        _value(part, pricing, items, part_form)
        for part, part_form in zip((tree.left, tree.right), PARTS[tree.kind, form], strict=True)
    )
    return compose(tree.kind, form, left, right, items // tree.granularity)


Layout = dict[str, tuple[int, ...]]


def layout(tree: Tree, problem: Problem) -> Layout:
    """Devices of each component, numbered over the whole cluster.

    Parts that take turns begin at the same device; parts side by side follow each other, the one
    with the larger replicas first, so that none crosses two nodes.
    """
    found: Layout = {}
    _place(tree, problem, [0] * len(problem.cluster.groups), found)
    return found


def _place(tree: Tree, problem: Problem, begin: list[int], found: Layout) -> list[int]:
    """Place a tree from a device of each kind on; return the device after it, of each kind."""
    if isinstance(tree, NodeTree):
        return _place_choice(tree.placement, problem, begin, found)
    parts, aligned = (
        [tree.left, tree.right],
        [_alignment(p, problem) for p in (tree.left, tree.right)],
    )
    if tree.kind == "temporal":
        ends = [_place(part, problem, begin, found) for part in parts]
        return [max(end) for end in zip(*ends, strict=True)]
    order = (1, 0) if aligned[1] > aligned[0] else (0, 1)
    end = _place(parts[order[0]], problem, begin, found)
    unit = aligned[order[1]]
    start = [b + -(-(e - b) // unit) * unit for b, e in zip(begin, end, strict=True)]
    last = _place(parts[order[1]], problem, start, found)
    return [e if n == s else n for e, s, n in zip(end, start, last, strict=True)]


def _place_choice(
    placement: NodePlacement, problem: Problem, begin: list[int], found: Layout
) -> list[int]:
    end = list(begin)
    for position in block_order(problem, placement.components, placement.blocks):
        names = [placement.components[i] for i in placement.blocks[position]]
        kind, size = placement.kinds[position], placement.sizes[position]
        unit = problem.alignment(names)
        start = begin[kind] + -(-(end[kind] - begin[kind]) // unit) * unit
        end[kind] = start + size
        offset = problem.cluster.offset(kind)
        for name in names:
            found[name] = tuple(range(offset + start, offset + end[kind]))
    return end


def _alignment(tree: Tree, problem: Problem) -> int:
    return problem.alignment([n for each in node_trees(tree) for n in each.placement.components])


def predict(
    flow: Flow,
    plan: Plan,
    profile: Profile,
    cluster: ClusterShape,
    constraints: Constraints,
    *,
    hand_overs: Mapping[str, int] | None = None,
) -> float:
    """Time of a step under a plan, by the formulas that plans are found with [s].

    Parts that share a device take turns; those that do not stream into each other, or work on
    different steps where the constraints allow staleness.

    Args:
        flow: What happens in a step.
        plan: Where it runs.
        profile: What was measured.
        cluster: The devices that the plan numbers.
        constraints: The work of a step.
        hand_overs: Items per hand-over by node; else what the constraints say.

    Raises:
        ConfigError: The plan needs a size that was not measured.
    """
    problem = make_problem(flow, profile, cluster, constraints)
    nodes = {node.name: node for node in flow.nodes}

    def pricing(placement: NodePlacement, items: int) -> tuple[float, float]:
        return price(problem, nodes[placement.node], placement, items)

    trees = _Trees(problem, plan, hand_overs or {}).of(flow.order(), "closed", constraints.items)
    found = min(value(tree, pricing, constraints.items, overlap=problem.overlap) for tree in trees)
    if found == float("inf"):
        raise ConfigError("the plan needs a number of devices that was not measured")
    return found + profile.fixed_seconds


class _Trees:
    """Compositions of nodes, in the order of the flow, that a placement allows."""

    def __init__(self, problem: Problem, plan: Plan, hand_overs: Mapping[str, int]) -> None:
        self._problem = problem
        self._hand_overs = hand_overs
        self._plan = plan
        self._feeds = problem.flow.feeds()

    def of(self, nodes: Sequence[Node], form: Form, granularity: int) -> Iterator[Tree]:
        """All compositions of some nodes, as a part of a form in chunks of a granularity."""
        if len(nodes) == 1:
            yield NodeTree(_choice(self._problem, self._plan, nodes[0]), granularity)
            return
        items = self._problem.constraints.items
        for cut in range(1, len(nodes)):
            parts = (nodes[:cut], nodes[cut:])
            kind = self._kind(*parts)
            streams = kind == "spatial" and form == "closed"
            inner = self._handed_over(nodes) if streams else granularity
            left, right = (
                list(self.of(part, part_form, items if part_form == "closed" else inner))
                for part, part_form in zip(parts, PARTS[kind, form], strict=True)
            )
            for one, other in itertools.product(left, right):
                yield JoinTree(kind, inner, one, other)

    def _kind(self, first: Sequence[Node], second: Sequence[Node]) -> Kind:
        names = [tuple(c for node in part for c in node.components) for part in (first, second)]
        if self._plan.overlap(*names):
            return "temporal"
        whole = len(first) + len(second) == len(self._problem.flow.nodes)
        if whole and self._problem.constraints.staleness:
            return "parallel"
        feeds = any(a.name in self._feeds[b.name] for a in first for b in second)
        return "spatial" if feeds else "parallel"

    def _handed_over(self, nodes: Sequence[Node]) -> int:
        given = (self._hand_overs[n.name] for n in nodes if n.name in self._hand_overs)
        return min(given, default=self._problem.constraints.handed_over)


def _choice(problem: Problem, plan: Plan, node: Node) -> NodePlacement:
    """How a plan runs a node."""
    parts = [plan.components[name] for name in node.components]
    homes = list(dict.fromkeys(part.devices for part in parts))
    blocks = tuple(
        tuple(i for i, part in enumerate(parts) if part.devices == devices) for devices in homes
    )
    kinds = tuple(problem.kind_of(devices[0]) for devices in homes)
    return NodePlacement(
        node=node.name,
        components=node.components,
        blocks=blocks,
        kinds=kinds,
        sizes=tuple(len(devices) for devices in homes),
        stages=parts[0].pipeline_stages,
        resident=frozenset(
            name
            for name, part in zip(node.components, parts, strict=True)
            if part.residency == "resident"
        ),
    )
