"""From a flow, a profile, a cluster and constraints to a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from rlinf.flow.constraints import Constraints
from rlinf.flow.graph import Flow
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.search.infeasible import explain_node, explain_together
from rlinf.planner.search.memory import memory_of_others
from rlinf.planner.search.node_options import node_options
from rlinf.planner.search.options import Options
from rlinf.planner.search.problem import Problem, make_problem
from rlinf.planner.search.recursion import Search
from rlinf.planner.search.report import Planned, describe, write_plan
from rlinf.planner.search.tree import Tree, layout, read_tree

# Sizes per component in the first, rough search, and how much slower its alternatives may be.
ROUGH_SIZES = 12
SLACK = 2.0


def plan(
    flow: Flow,
    profile: Profile,
    cluster: ClusterShape,
    constraints: Constraints,
    *,
    alternatives: int = 3,
) -> Planned:
    """Find the fastest plan of a step.

    Args:
        flow: What happens in a step.
        profile: Measured costs of every component of the flow.
        cluster: Where it can run.
        constraints: The work of a step and the limits of the components.
        alternatives: How many of the next best placements to return.

    Raises:
        ConfigError: No plan exists; the limit that binds is named, with the nearest value that
            would do. Or a component has no profile, or a constraint names what is not there.
    """
    problem = make_problem(flow, profile, cluster, constraints)
    order = flow.order()
    tables = {node.name: node_options(problem, node, constraints.items) for node in order}
    for node in order:
        if tables[node.name] is None:
            raise explain_node(problem, node)
    others = memory_of_others(problem, {n: t for n, t in tables.items() if t is not None})
    # Few sizes give a bound that is close, and alternatives; with the bound all sizes are fast.
    rough = Search(replace(problem, most_sizes=ROUGH_SIZES), others, slower=SLACK).root()
    known = np.inf if rough is None else float(rough.stream.first.min())
    found = Search(problem, others, known=known).root()
    ranked = _ranked([options for options in (found, rough) if options is not None])
    if not ranked:
        raise explain_together(problem, order)
    trees = [read_tree(options, index, constraints.items) for options, index in ranked]
    best, *rest = [write_plan(problem, t) for t in _distinct(problem, trees, 1 + alternatives)]
    return replace(best, alternatives=tuple(rest))


def _distinct(problem: Problem, trees: list[Tree], count: int) -> list[Tree]:
    """The fastest tree, then the fastest of other compositions, then of other placements."""
    chosen: list[Tree] = []
    for differs in (describe, lambda tree: str(layout(tree, problem))):
        seen = {differs(tree) for tree in chosen}
        for tree in trees:
            if len(chosen) < count and differs(tree) not in seen:
                seen.add(differs(tree))
                chosen.append(tree)
    order = {id(tree): rank for rank, tree in enumerate(trees)}
    return sorted(chosen, key=lambda tree: order[id(tree)])


def _ranked(found: list[Options], per_source: int = 4) -> list[tuple[Options, int]]:
    """The fastest options of each source, the fastest and smallest first."""
    best: list[tuple[tuple[float, int, int], Options, int]] = []
    for options in found:
        devices = options.devices.sum(axis=1)
        taken: Counter[int] = Counter()
        for index in np.lexsort((devices, options.stream.first)).tolist():
            source = int(options.source[index])
            taken[source] += 1
            if taken[source] <= per_source:
                key = (float(options.stream.first[index]), int(devices[index]), len(best))
                best.append((key, options, index))
    return [(options, index) for _, options, index in sorted(best, key=lambda entry: entry[0])]
