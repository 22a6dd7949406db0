"""A plan as a tree of compositions: reading it back, laying it out on devices, valuing it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Node
from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import Constraints
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.search.formulas import PARTS, Form, Kind, Stream, compose, single_node
from rlinf.planner.search.node_options import block_order, price
from rlinf.planner.search.pareto import NodePlacement, Options, PlacementGrid
from rlinf.planner.search.problem import Problem, make_problem


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


def read_tree(
    options: Options, index: int, items: int, granularity: int, form: Form = "closed"
) -> Tree:
    """The tree of one option of a part; what is no stream has all ``items`` of the step at once."""
    source = options.sources[options.source[index]]
    if isinstance(source, PlacementGrid):
        return NodeTree(source[int(options.left[index])], granularity)
    forms = PARTS[source.kind, form]
    chosen = (int(options.left[index]), int(options.right[index]))
    left, right = (
        read_tree(part, i, items, items if f == "closed" else source.granularity, f)
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


def value(problem: Problem, tree: Tree, *, without: str | None = None) -> float:
    """Time of a step by the formulas of :mod:`rlinf.planner.search.formulas` [s].

    ``without`` names a component that takes no time.
    """
    factor = problem.overlap if isinstance(tree, JoinTree) and tree.kind == "parallel" else 1.0
    return factor * float(_stream(problem, tree, "closed", without).first[0])


def _stream(problem: Problem, tree: Tree, form: Form, without: str | None) -> Stream:
    chunks = problem.constraints.items // tree.granularity
    if isinstance(tree, NodeTree):
        chunk, switch = price(problem, tree.placement, tree.granularity, without=without)
        return single_node(form, chunk, switch, chunks)
    left, right = (
        _stream(problem, part, part_form, without)
        for part, part_form in zip((tree.left, tree.right), PARTS[tree.kind, form], strict=True)
    )
    return compose(tree.kind, form, left, right, chunks)


# -- devices ------------------------------------------------------------------------------------

PlacedDevices = dict[str, tuple[int, ...]]


def layout(tree: Tree, problem: Problem) -> PlacedDevices:
    """Devices of each component, numbered over the whole cluster.

    Parts that take turns begin at the same device; parts side by side follow each other, the one
    with the larger replicas first, so that none crosses two nodes.
    """
    found: PlacedDevices = {}
    _place(tree, problem, [0] * len(problem.cluster.groups), found)
    return found


def _place(tree: Tree, problem: Problem, begin: list[int], found: PlacedDevices) -> list[int]:
    """Place a tree from a device of each kind on; return the device after it, of each kind."""
    if isinstance(tree, NodeTree):
        return _place_node(tree.placement, problem, begin, found)
    if tree.kind == "temporal":
        ends = [_place(part, problem, begin, found) for part in (tree.left, tree.right)]
        return [max(end) for end in zip(*ends, strict=True)]
    parts = [(part, _alignment(part, problem)) for part in (tree.left, tree.right)]
    (first, _), (second, unit) = sorted(parts, key=lambda part: -part[1])
    end = _place(first, problem, begin, found)
    start = [b + -(-(e - b) // unit) * unit for b, e in zip(begin, end, strict=True)]
    last = _place(second, problem, start, found)
    return [e if n == s else n for e, s, n in zip(end, start, last, strict=True)]


def _place_node(
    placement: NodePlacement, problem: Problem, begin: list[int], found: PlacedDevices
) -> list[int]:
    end = list(begin)
    for block in block_order(problem, placement):
        names, kind = placement.names(block), placement.kinds[block]
        unit = problem.alignment(names)
        start = begin[kind] + -(-(end[kind] - begin[kind]) // unit) * unit
        end[kind] = start + placement.sizes[block]
        offset = problem.cluster.offset(kind)
        found |= dict.fromkeys(names, tuple(range(offset + start, offset + end[kind])))
    return end


def _alignment(tree: Tree, problem: Problem) -> int:
    return problem.alignment([n for each in node_trees(tree) for n in each.placement.components])


# -- a plan that is given -----------------------------------------------------------------------


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
    different steps where the constraints allow staleness. ``hand_overs`` are the items per
    hand-over by node; else what the constraints say.

    Raises:
        ConfigError: The plan needs a size that was not measured.
    """
    problem = make_problem(flow, profile, cluster, constraints)
    trees = _Trees(problem, plan, hand_overs or {}).of(flow.order(), "closed", constraints.items)
    found = min(value(problem, tree) for tree in trees)
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
            yield NodeTree(_as_planned(self._problem, self._plan, nodes[0]), granularity)
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


def _as_planned(problem: Problem, plan: Plan, node: Node) -> NodePlacement:
    """How a plan runs a node."""
    parts = {name: plan.components[name] for name in node.components}
    homes = list(dict.fromkeys(part.devices for part in parts.values()))
    return NodePlacement(
        node=node.name,
        components=node.components,
        blocks=tuple(
            tuple(i for i, name in enumerate(node.components) if parts[name].devices == devices)
            for devices in homes
        ),
        kinds=tuple(problem.kind_of(devices[0]) for devices in homes),
        sizes=tuple(len(devices) for devices in homes),
        stages=parts[node.components[0]].pipeline_stages,
        resident=frozenset(n for n, part in parts.items() if part.residency == "resident"),
    )
