"""The planner's time of a plan that was not found but given: a hand-written placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from rlinf.errors import ConfigError
from rlinf.flow.constraints import Constraints
from rlinf.flow.graph import Flow, Node
from rlinf.flow.plan import Plan
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.search.choices import NodePlacement
from rlinf.planner.search.formulas import PARTS, Form, Kind
from rlinf.planner.search.node_options import price
from rlinf.planner.search.problem import Problem
from rlinf.planner.search.solve import make_problem
from rlinf.planner.search.tree import JoinTree, NodeTree, Tree, value


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
