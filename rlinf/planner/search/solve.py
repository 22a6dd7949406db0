"""From a flow, a profile, a cluster and constraints to a plan, or to why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlinf.config.nearest import join_choices, nearest_divisors
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Node
from rlinf.flow.planning_traits import Constraints
from rlinf.planner.cluster_shape import GIGABYTE, ClusterShape
from rlinf.planner.profile import Profile, named_kinds
from rlinf.planner.search.composition import Tree, layout, read_tree
from rlinf.planner.search.node_options import memory_of_others, node_options
from rlinf.planner.search.pareto import Integers, Options
from rlinf.planner.search.problem import Problem, make_problem
from rlinf.planner.search.recursion import Search
from rlinf.planner.search.report import Planned, describe, write_plan

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
    """Find the fastest plan of a step, with so many of the next best placements.

    Raises:
        ConfigError: No plan exists; the limit that binds is named, with the nearest value that
            would do. Or a component has no profile, or a constraint names what is not there.
    """
    problem = make_problem(flow, profile, cluster, constraints)
    order, items = flow.order(), constraints.items
    tables = {}
    for node in order:
        table = node_options(problem, node, items)
        if table is None:
            raise _why_not(problem, node)
        tables[node.name] = table
    others = memory_of_others(problem, tables)
    # Few sizes give a bound that is close, and alternatives; with the bound all sizes are fast.
    rough = Search(replace(problem, most_sizes=ROUGH_SIZES), others, slower=SLACK).root()
    known = np.inf if rough is None else float(rough.stream.first.min())
    found = Search(problem, others, known=known).root()
    ranked = _ranked([options for options in (found, rough) if options is not None])
    if not ranked:
        raise _why_not_together(problem)
    trees = [read_tree(options, index, items, items) for options, index in ranked]
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


# -- why no plan exists: the limit that binds, and the nearest value that would do --------------


def _why_not(problem: Problem, node: Node) -> ConfigError:
    """Why a node cannot run at all, alone on the whole cluster."""
    for name in node.components:
        error = _why_not_component(problem, node, name)
        if error is not None:
            return error
    names = " and ".join(node.components)
    return ConfigError(
        f"loop '{node.name}': {names} each fit, but not at the same time, on {problem.cluster}: "
        "neither on shared nor on separate devices; nearest: a cluster of twice the nodes"
    )


def _why_not_together(problem: Problem) -> ConfigError:
    """Why nodes that each can run have no plan together: all of them, offloaded, take turns."""
    pinned = [
        name
        for node in problem.flow.order()
        for name in node.components
        if problem.limits(name).residency == "resident"
    ]
    return ConfigError(
        f"no plan on {problem.cluster} keeps {', '.join(pinned) or 'all components'} resident "
        "within the memory of a device; nearest: residency 'offload' for one of them"
    )


def _why_not_component(problem: Problem, node: Node, name: str) -> ConfigError | None:
    limits, kinds = problem.limits(name), problem.kinds(name)
    if not kinds:
        return _wrong_kinds(problem, name)
    whole, most = limits.devices_per_replica, max(g.devices for g in problem.cluster.groups)
    if most < whole:
        return ConfigError(
            f"'{name}': one replica needs {whole} devices; {problem.cluster} has {most}; nearest: "
            f"a cluster of {whole}, or a replica of {most}"
        )
    counts = limits.pipeline_stages if node.is_loop else (1,)
    models = [problem.cost(name, kind) for kind in kinds]
    covered = [s for s in counts if any(model.covers(s) for model in models)]
    if not covered:
        return models[0].not_measured(counts)
    items = problem.constraints.items
    legal = {
        kind: [problem.legal_sizes(name, kind, items=items, stages=s) for s in counts]
        for kind in kinds
    }
    sizes = {kind: np.unique(np.concatenate(found)) for kind, found in legal.items()}
    if not any(len(found) for found in sizes.values()):
        return _no_division(problem, name, counts)
    return _no_memory(problem, name, sizes, covered[0])


def _wrong_kinds(problem: Problem, name: str) -> ConfigError:
    """It may not run on the kinds of devices that there are, or was measured on none of them."""
    wanted, measured = problem.limits(name).device_kinds, problem.profile.components[name].kinds
    groups = problem.cluster.groups
    has = named_kinds(group.kind for group in groups)
    if wanted and not set(wanted) & {group.kind for group in groups}:
        return ConfigError(
            f"'{name}' can run on {named_kinds(wanted)}; the cluster has {has}; nearest: "
            f"{groups[0].nodes}x{groups[0].devices_per_node}:{wanted[0]}"
        )
    bare = f"{sum(group.nodes for group in groups)}x{groups[0].devices_per_node}"
    return ConfigError(
        f"'{name}' was measured on {named_kinds(measured)}; the cluster has {has}, and times on "
        "one kind of device say nothing of another; nearest: measure it there, or leave the kind "
        f"out to plan for devices like those it was measured on: {bare}"
    )


def _no_division(problem: Problem, name: str, counts: Sequence[int]) -> ConfigError:
    """No number of processes divides the items, or none that does was measured."""
    limits, constraints = problem.limits(name), problem.constraints
    groups = constraints.items // constraints.group_size
    fitting = [s for s in counts if groups % s == 0]
    if not fitting:
        near = nearest_divisors(groups, counts[0])
        return ConfigError(
            f"'{name}': {groups} groups of {constraints.group_size} items do not divide into "
            f"{join_choices(counts)} pipeline stages; nearest: {join_choices(near)}"
        )
    groups //= fitting[0]
    together = limits.processes_per_replica
    replicas = [p // together for p in limits.processes if p % together == 0]
    if limits.processes and limits.even and not any(groups % n == 0 for n in replicas):
        near = [together * n for n in nearest_divisors(groups, limits.processes[0] // together)]
        return ConfigError(
            f"'{name}': {groups} groups cannot be shared evenly by "
            f"{join_choices(limits.processes)} processes; nearest: {join_choices(near)}"
        )
    low, high = problem.cost(name, problem.kinds(name)[0]).bounds()
    most = max(g.devices for g in problem.cluster.groups)
    return ConfigError(
        f"'{name}' was measured on {low} to {high} devices, and no legal number of its processes "
        f"({limits.devices_per_process} devices each, {groups} groups, cluster of {most}) is "
        f"among them; nearest: measure it on "
        f"{min(max(low, limits.devices_per_replica), most)} devices, or declare a scaling law"
    )


def _no_memory(
    problem: Problem, name: str, sizes: dict[int, Integers], stages: int
) -> ConfigError | None:
    """The component does not fit on a device of any legal size."""
    items, memory = problem.constraints.items, problem.memory()
    peaks = {k: problem.cost(name, k).peak_bytes(items, n, stages) for k, n in sizes.items()}
    if any((peak <= memory[kind]).any() for kind, peak in peaks.items()):
        return None
    kind = next(kind for kind, found in sizes.items() if len(found))
    peak, cost = peaks[kind], problem.cost(name, kind)
    least = int(np.argmin(peak))
    low, high = cost.bounds()
    larger = np.arange(low, min(high, 16 * int(problem.capacity()[kind])) + 1)
    larger = larger[larger % problem.limits(name).devices_per_replica == 0]
    fits = larger[cost.peak_bytes(items, larger, stages) <= memory[kind]]
    near = f"{fits[0]} devices" if len(fits) else f"{peak[least] / GIGABYTE:.1f} GB per device"
    label = problem.cluster.groups[kind].kind or "device"
    return ConfigError(
        f"'{name}' needs {peak[least] / GIGABYTE:.1f} GB on each of {sizes[kind][least]} devices; "
        f"a {label} has {memory[kind] / GIGABYTE:.1f} GB; nearest: {near}"
    )
