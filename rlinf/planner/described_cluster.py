"""The cluster that a recipe describes, and how a recipe describes another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import psutil

from rlinf.config.nearest import join_choices
from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig, accelerators_here
from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import Trial
from rlinf.planner.cluster_shape import (
    CPU,
    GIGABYTE,
    MEMORY_GB,
    ClusterShape,
    NodeGroup,
    kind_name,
    kind_of_model,
)
from rlinf.planner.profile import Profile
from rlinf.scheduler.accelerators import accelerator_model, installed_accelerators

_SIZE = re.compile(r"\b(\d+) ?GB\b")


def free_memory() -> int:
    """What new processes can have: the free memory of the machine, or of its control group."""
    left = [limit - used for limit, used in _control_groups()]
    return min([psutil.virtual_memory().available, *left])


def device_memory(config: PlacedConfig) -> int | None:
    """Memory of one device of a recipe's cluster, whose nodes are as this machine [bytes].

    A CPU slot has its share of the host. None where it is not known: accelerators that are
    described and not here, or of a model of which nothing is known.
    """
    if config.on_accelerators:
        return _memory_of_model(_accelerator_model()) if accelerators_here() else None
    limits = [limit for limit, _ in _control_groups()]
    total = min([psutil.virtual_memory().total, *limits])
    return total // (config.devices // config.cluster.num_nodes)


def device_kind(config: PlacedConfig) -> str:
    """Kind of the devices of a recipe's cluster, whose nodes are as this machine.

    ``cpu`` for slots, and for nodes without accelerators. Empty for accelerators that are described
    and not here.
    """
    if not config.on_accelerators:
        return CPU
    return kind_of_model(_accelerator_model()) if accelerators_here() else ""


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit and use of the control groups that this process is in [bytes]."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                limit = int((root / most).read_text("ascii"))
                yield limit, int((root / used).read_text("ascii"))
            except (OSError, ValueError):
                continue  # no such group, or no limit


def _accelerator_model() -> str:
    kind, _ = installed_accelerators()
    return accelerator_model(kind)


def _memory_of_model(model: str) -> int | None:
    """Memory that a model's name states, or its vendor for it [bytes]."""
    size = _SIZE.search(model)
    if size is not None:
        return int(size[1]) * GIGABYTE
    known = MEMORY_GB.get(kind_of_model(model))
    return None if known is None else known * GIGABYTE


def cluster_of(config: PlacedConfig) -> ClusterShape:
    """The cluster that a recipe runs on; its devices are those that a placement can name.

    Nodes of a node group that says so have devices of its kind, all others those of this machine.

    Raises:
        ConfigError: Nodes of one kind do not follow each other.
    """
    groups = tuple(_node_groups(config))
    kinds = [group.kind for group in groups]
    apart = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if apart is not None:
        raise ConfigError(
            f"the nodes with {apart or 'devices of no named kind'} do not follow each other, as "
            "devices of one kind must to be planned; nearest: number the nodes so that they do",
            key="cluster.node_groups",
        )
    return ClusterShape(groups=groups)


def check_measured(config: PlacedConfig, profile: Profile) -> None:
    """Refuse times of a processor for accelerators that a recipe describes and that are not here.

    Of what kind these are is not known, so that it cannot be compared with that of the figures.

    Raises:
        ConfigError: Some figures were measured on a processor.
    """
    if config.on_accelerators and "" in _kinds_of_nodes(config) and CPU in profile.kinds:
        raise ConfigError(
            "the profile was measured on cpu, and the cluster of the recipe has accelerators; "
            "times on one kind of device say nothing of another; nearest: measure it there, or "
            "cluster.cpu_devices_per_node in place of cluster.accelerators_per_node"
        )


def as_measured(cluster: ClusterShape) -> ClusterShape:
    """A cluster of one kind with devices of the kind that was measured, whatever that is.

    So a run is predicted by its own profile on a machine of another kind.
    """
    if len(cluster.groups) > 1:
        return cluster
    return ClusterShape(groups=(cluster.groups[0].model_copy(update={"kind": ""}),))


def spans_of_kinds(config: PlacedConfig) -> dict[str, tuple[int, int]]:
    """Of each kind the first device and the number of devices, of nodes that follow each other."""
    found: dict[str, tuple[int, int]] = {}
    first = 0
    for group in _node_groups(config):
        found.setdefault(group.kind, (first, group.devices))
        first += group.devices
    return found


def kinds_of_components(config: PlacedConfig, plan: Plan) -> dict[str, str]:
    """Kind of the devices of each component; of several kinds their names, joined by ``+``."""
    each, nodes = config.devices // config.cluster.num_nodes, _kinds_of_nodes(config)
    return {
        name: "+".join(sorted({nodes[device // each] for device in part.devices}))
        for name, part in plan.components.items()
    }


def _node_groups(config: PlacedConfig) -> Iterator[NodeGroup]:
    """Nodes of one kind that follow each other."""
    for kind, nodes in groupby(_kinds_of_nodes(config)):
        stated = MEMORY_GB.get(kind)
        here = kind == device_kind(config)
        yield NodeGroup(
            nodes=len(list(nodes)),
            devices_per_node=config.devices // config.cluster.num_nodes,
            kind=kind,
            memory_bytes=device_memory(config) if here else stated and stated * GIGABYTE,
        )


def _kinds_of_nodes(config: PlacedConfig) -> list[str]:
    found = [device_kind(config)] * config.cluster.num_nodes
    for group in config.cluster.node_groups or ():
        if group.device_kind is not None:
            for node in group.node_ranks:
                found[node] = kind_name(group.device_kind)
    return found


def cluster_overrides(config: PlacedConfig, cluster: ClusterShape) -> list[str]:
    """What to write into a recipe so that it describes a cluster; nothing for its own.

    Raises:
        ConfigError: The nodes have unequal numbers of devices, which a recipe cannot say.
    """
    counts = sorted({group.devices_per_node for group in cluster.groups})
    if len(counts) > 1:
        raise ConfigError(
            f"a recipe describes nodes of equally many devices; {cluster} has nodes of "
            f"{join_choices(counts)}; nearest: {counts[0]} devices of every node"
        )
    now, nodes = config.cluster, sum(group.nodes for group in cluster.groups)
    found = []
    if nodes != now.num_nodes:
        found.append(f"cluster.num_nodes={nodes}")
    if nodes > 1 and now.runtime == "local":
        found.append("cluster.runtime=ray")
    on_accelerators = _on_accelerators(config, cluster)
    if on_accelerators != config.on_accelerators or counts[0] * now.num_nodes != config.devices:
        key, other = "accelerators_per_node", "cpu_devices_per_node"
        key, other = (key, other) if on_accelerators else (other, key)
        if getattr(now, other) is not None:
            found.append(f"cluster.{other}=null")
        found.append(f"cluster.{key}={counts[0]}")
    if len(cluster.groups) > 1 and not now.node_groups:
        found.append(f"cluster.node_groups=[{', '.join(_described_groups(cluster))}]")
    return found


def _on_accelerators(config: PlacedConfig, cluster: ClusterShape) -> bool:
    kinds = {group.kind for group in cluster.groups}
    if kinds <= {"", *_kinds_of_nodes(config)}:
        return config.on_accelerators
    return kinds != {CPU}


def _described_groups(cluster: ClusterShape) -> Iterator[str]:
    first = 0
    for group in cluster.groups:
        last = first + group.nodes - 1
        label = f"label: '{group.kind or 'others'}', node_ranks: '{first}-{last}'"
        yield f"{{{label}{f', device_kind: {group.kind!r}' if group.kind else ''}}}"
        first = last + 1


def trials_on_each_kind(config: PlacedConfig) -> tuple[Trial, ...]:
    """Trials of a recipe on the devices of each kind of its cluster."""
    spans = spans_of_kinds(config)
    return tuple(
        trial if len(spans) == 1 else replace(trial, label=f"{trial.label} of {kind}")
        for kind, (first, count) in spans.items()
        for trial in config.planning.trials(first, count)
    )
