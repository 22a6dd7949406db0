"""The shape of a cluster that need not exist, of that which a recipe describes, and how it does.

Written ``512x8:H100`` for 512 nodes of 8 H100; several groups follow each other after a comma, and
a memory per device may be given: ``4x8:H100,16x8:RTX4090/24GB``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import psutil
from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.nearest import join_choices, nearest_names
from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig, accelerators_here
from rlinf.flow.plan import Plan
from rlinf.planner.profile import Profile
from rlinf.scheduler.accelerators import accelerator_model, installed_accelerators

GIGABYTE = 10**9
CPU = "cpu"
"""Kind of devices that are shares of the cores of a machine."""

# Memory per device as its vendor states it [GB].
MEMORY_GB = {
    "A100": 80,
    "A800": 80,
    "H100": 80,
    "H800": 80,
    "H200": 141,
    "H20": 96,
    "B200": 180,
    "L40S": 48,
    "RTX4090": 24,
    "RTX4090D": 24,
}

_GROUP = re.compile(
    r"(?P<nodes>\d+)x(?P<devices>\d+)(:(?P<kind>[A-Za-z][\w-]*)(/(?P<memory>\d+(\.\d+)?)GB)?)?"
)
_SIZE = re.compile(r"\b(\d+) ?GB\b")


class NodeGroup(StrictModel):
    """Equal nodes."""

    nodes: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)
    kind: str = ""
    """Kind of the devices, such as ``H100`` or ``cpu``; empty: the one that was measured."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Memory of a device; None: not limited."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        kind = f":{self.kind}" if self.kind else ""
        return f"{self.nodes}x{self.devices_per_node}{kind}"


class ClusterShape(StrictModel):
    """Groups of nodes, each of another kind, in the order in which their devices are numbered."""

    groups: tuple[NodeGroup, ...] = Field(min_length=1)

    @property
    def devices(self) -> int:
        """Devices of all groups."""
        return self.offset(len(self.groups))

    def offset(self, group: int) -> int:
        """Number of the first device of a group."""
        return sum(before.devices for before in self.groups[:group])

    def __str__(self) -> str:
        return ",".join(map(str, self.groups))


# -- in words -----------------------------------------------------------------------------------


def parse_cluster_shape(text: str) -> ClusterShape:
    """Read a shape such as ``512x8:H100`` or ``4x8:H100,16x8:RTX4090/24GB``.

    A kind without a memory has the one that its vendor states; of an unknown kind, or without a
    kind, the memory is not limited.

    Raises:
        ConfigError: A group cannot be read, has no node or device, or repeats a kind.
    """
    groups = [_parse_group(part.strip(), text) for part in text.split(",")]
    repeated = _twice([group.kind for group in groups])
    if repeated is not None:
        raise ConfigError(
            f"cluster '{text}' has two groups of {repeated or 'no kind'}; "
            "add up their nodes, or give each a kind of its own"
        )
    return ClusterShape(groups=tuple(groups))


def _twice(kinds: list[str]) -> str | None:
    return next((kind for kind in kinds if kinds.count(kind) > 1), None)


def _parse_group(part: str, text: str) -> NodeGroup:
    match = _GROUP.fullmatch(part)
    if match is None:
        where = f" in '{text}'" if part != text else ""
        raise ConfigError(
            f"cluster '{part}'{where} is not NODESxDEVICES[:KIND[/MEMORYGB]]; "
            "for 512 nodes of 8 H100 write 512x8:H100"
        )
    nodes, devices = int(match["nodes"]), int(match["devices"])
    if nodes < 1 or devices < 1:
        raise ConfigError(
            f"cluster '{part}' has no device; nearest: {max(nodes, 1)}x{max(devices, 1)}"
        )
    kind = kind_name(match["kind"] or "")
    memory = float(match["memory"]) if match["memory"] else MEMORY_GB.get(kind)
    if memory is not None and memory * GIGABYTE < 1:
        near = f"{part.partition('/')[0]}/{MEMORY_GB.get(kind, 80)}GB"
        raise ConfigError(f"cluster '{part}' gives a device no memory; nearest: {near}")
    if kind and memory is None and nearest_names(kind, MEMORY_GB):
        close = nearest_names(kind, MEMORY_GB)[0]
        raise ConfigError(
            f"cluster '{part}': the memory of {kind} is not known; did you mean {close}? "
            f"Otherwise give it: {part}/80GB"
        )
    size = None if memory is None else int(memory * GIGABYTE)
    return NodeGroup(nodes=nodes, devices_per_node=devices, kind=kind, memory_bytes=size)


def kind_name(text: str) -> str:
    """A kind of device as it is written here: ``H100`` for ``h100``; unknown ones as they are."""
    known = {name.upper(): name for name in (*MEMORY_GB, CPU)}
    return known.get(text.upper(), text)


def kind_of_model(model: str) -> str:
    """Kind of device of a vendor's model name: ``H100`` for ``NVIDIA H100 80GB HBM3``.

    Of a model that is not known here it is the name without its vendor, in letters that the kind of
    a shape can have; empty for a name without any.
    """
    words = model.replace(" ", "").upper()
    known = max((name for name in MEMORY_GB if name in words), key=len, default=None)
    if known is not None:
        return known
    name = re.sub(r"^(NVIDIA|AMD|Intel)\b|\bGeForce\b", "", model.strip(), flags=re.IGNORECASE)
    return re.sub(r"^[^A-Za-z]+|[^\w-]", "", name)


# -- of this machine ----------------------------------------------------------------------------


def free_memory() -> int:
    """What new processes can have: the free memory of the machine, or of its control group
    [bytes]."""
    left = [max(0, limit - used) for limit, used in _control_groups()]
    return min([psutil.virtual_memory().available, *left])


def total_memory() -> int:
    """What all processes together can have: the memory of the machine, or the limit of its control
    group [bytes]."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _control_groups())])


def _device_memory(config: PlacedConfig) -> int | None:
    """Memory of one device of a recipe's cluster, whose nodes are as this machine [bytes].

    A CPU slot has its share of the host. None where it is not known: accelerators that are
    described and not here, or of a model of which nothing is known.
    """
    if not config.on_accelerators:
        return total_memory() // (config.devices // config.cluster.num_nodes)
    if not accelerators_here():
        return None
    model = _accelerator_model()
    stated = _SIZE.search(model)
    known = int(stated[1]) if stated else MEMORY_GB.get(kind_of_model(model))
    return None if known is None else known * GIGABYTE


def _device_kind(config: PlacedConfig) -> str:
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
    return accelerator_model(installed_accelerators()[0])


# -- of a recipe --------------------------------------------------------------------------------


def cluster_of(config: PlacedConfig) -> ClusterShape:
    """The cluster that a recipe runs on; its devices are those that a placement can name.

    Nodes of a node group that says so have devices of its kind, all others those of this machine.

    Raises:
        ConfigError: Nodes of one kind do not follow each other.
    """
    groups = tuple(node_groups(config))
    apart = _twice([group.kind for group in groups])
    if apart is not None:
        raise ConfigError(
            f"the nodes with {apart or 'devices of no named kind'} do not follow each other, as "
            "devices of one kind must to be planned; nearest: number the nodes so that they do",
            key="cluster.node_groups",
        )
    return ClusterShape(groups=groups)


def node_groups(config: PlacedConfig) -> Iterator[NodeGroup]:
    """Nodes of one kind that follow each other, of the cluster of a recipe."""
    for kind, nodes in groupby(_kinds_of_nodes(config)):
        stated = MEMORY_GB.get(kind)
        here = kind == _device_kind(config)
        yield NodeGroup(
            nodes=len(list(nodes)),
            devices_per_node=config.devices // config.cluster.num_nodes,
            kind=kind,
            memory_bytes=_device_memory(config) if here else stated and stated * GIGABYTE,
        )


def _kinds_of_nodes(config: PlacedConfig) -> list[str]:
    found = [_device_kind(config)] * config.cluster.num_nodes
    for group in config.cluster.node_groups or ():
        if group.device_kind is not None:
            for node in group.node_ranks:
                found[node] = kind_name(group.device_kind)
    return found


def kinds_of_components(config: PlacedConfig, plan: Plan) -> dict[str, str]:
    """Kind of the devices of each component; of several kinds their names, joined by ``+``."""
    each, nodes = config.devices // config.cluster.num_nodes, _kinds_of_nodes(config)
    return {
        name: "+".join(sorted({nodes[device // each] for device in part.devices}))
        for name, part in plan.components.items()
    }


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
    kinds = {group.kind for group in cluster.groups}
    known = kinds <= {"", *_kinds_of_nodes(config)}
    on_accelerators = config.on_accelerators if known else kinds != {CPU}
    if on_accelerators != config.on_accelerators or counts[0] * now.num_nodes != config.devices:
        key, other = "accelerators_per_node", "cpu_devices_per_node"
        key, other = (key, other) if on_accelerators else (other, key)
        if getattr(now, other) is not None:
            found.append(f"cluster.{other}=null")
        found.append(f"cluster.{key}={counts[0]}")
    if len(cluster.groups) > 1 and not now.node_groups:
        found.append(f"cluster.node_groups=[{', '.join(_described_groups(cluster))}]")
    return found


def _described_groups(cluster: ClusterShape) -> Iterator[str]:
    first = 0
    for group in cluster.groups:
        last = first + group.nodes - 1
        label = f"label: '{group.kind or 'others'}', node_ranks: '{first}-{last}'"
        yield f"{{{label}{f', device_kind: {group.kind!r}' if group.kind else ''}}}"
        first = last + 1
