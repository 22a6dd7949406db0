"""Why no plan exists: the limit that binds, and the nearest value that would do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf.config.nearest import join_choices, nearest_divisors
from rlinf.errors import ConfigError
from rlinf.flow.graph import Node
from rlinf.planner.cluster_shape import GIGABYTE
from rlinf.planner.profile import named_kinds
from rlinf.planner.search.problem import Problem, legal_sizes


def explain_node(problem: Problem, node: Node) -> ConfigError:
    """Why a node cannot run at all, alone on the whole cluster."""
    for name in node.components:
        error = _explain_component(problem, node, name)
        if error is not None:
            return error
    names = " and ".join(node.components)
    return ConfigError(
        f"loop '{node.name}': {names} each fit, but not at the same time, on {problem.cluster}: "
        "neither on shared nor on separate devices; nearest: a cluster of twice the nodes"
    )


def explain_together(problem: Problem, order: Sequence[Node]) -> ConfigError:
    """Why nodes that each can run have no plan together: all of them, offloaded, take turns."""
    pinned = [
        name
        for node in order
        for name in node.components
        if problem.limits(name).residency == "resident"
    ]
    return ConfigError(
        f"no plan on {problem.cluster} keeps {', '.join(pinned) or 'all components'} resident "
        "within the memory of a device; nearest: residency 'offload' for one of them"
    )


def _explain_component(problem: Problem, node: Node, name: str) -> ConfigError | None:
    limits, kinds = problem.limits(name), problem.kinds(name)
    if not kinds:
        return _explain_kinds(problem, name)
    whole = limits.devices_per_replica
    if all(g.devices < whole for g in problem.cluster.groups):
        most = max(g.devices for g in problem.cluster.groups)
        return ConfigError(
            f"'{name}': one replica needs {whole} devices; {problem.cluster} has {most}; nearest: "
            f"a cluster of {whole}, or a replica of {most}"
        )
    counts = limits.pipeline_stages if node.is_loop else (1,)
    models = [problem.cost(name, kind) for kind in kinds]
    covered = [s for s in counts if any(model.covers(s) for model in models)]
    if not covered:
        return models[0].not_measured(counts)
    sizes = {
        kind: np.unique(
            np.concatenate(
                [
                    legal_sizes(problem, name, kind, items=problem.constraints.items, stages=s)
                    for s in counts
                ]
            )
        )
        for kind in kinds
    }
    if not any(len(found) for found in sizes.values()):
        return _explain_division(problem, name, counts)
    return _explain_memory(problem, name, sizes, covered[0])


def _explain_kinds(problem: Problem, name: str) -> ConfigError:
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


def _explain_division(problem: Problem, name: str, counts: Sequence[int]) -> ConfigError:
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


def _explain_memory(
    problem: Problem, name: str, sizes: dict[int, np.ndarray], stages: int
) -> ConfigError | None:
    """The component does not fit on a device of any legal size."""
    items, memory = problem.constraints.items, problem.memory()
    for kind, found in sizes.items():
        peak = problem.cost(name, kind).peak_bytes(items, found, stages)
        if (peak <= memory[kind]).any():
            return None
    kind = next(kind for kind, found in sizes.items() if len(found))
    peak = problem.cost(name, kind).peak_bytes(items, sizes[kind], stages)
    least = int(np.argmin(peak))
    low, high = problem.cost(name, kind).bounds()
    larger = np.arange(low, min(high, 16 * int(problem.capacity()[kind])) + 1)
    larger = larger[larger % problem.limits(name).devices_per_replica == 0]
    fits = larger[problem.cost(name, kind).peak_bytes(items, larger, stages) <= memory[kind]]
    near = f"{fits[0]} devices" if len(fits) else f"{peak[least] / GIGABYTE:.1f} GB per device"
    label = problem.cluster.groups[kind].kind or "device"
    return ConfigError(
        f"'{name}' needs {peak[least] / GIGABYTE:.1f} GB on each of {sizes[kind][least]} devices; "
        f"a {label} has {memory[kind] / GIGABYTE:.1f} GB; nearest: {near}"
    )
