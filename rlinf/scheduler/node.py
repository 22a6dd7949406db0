"""Nodes and groups of nodes, as the cluster found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

from rlinf.scheduler.errors import ClusterConfigValueError, NodeRankError
from rlinf.scheduler.hardware import (
    Accelerator,
    AcceleratorType,
    HardwareInfo,
    HardwareResource,
)

if TYPE_CHECKING:  # what reads configurations takes long to import, and workers do not need it
    from rlinf.scheduler.cluster_config import ClusterConfig, NodeGroupEnvConfig


@dataclass(frozen=True)
class NodeInfo:
    """One machine of the cluster."""

    node_labels: list[str]  # of the configured node groups that it is in
    node_rank: int
    ray_id: str  # Ray's identifier of the node, empty on the local runtime
    node_ip: str  # under which other nodes reach it
    num_cpus: int
    python_interpreter_path: str  # runs its workers
    default_env_vars: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment of the node before any worker."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Variables that the scheduler sets for its workers."""
    hardware_resources: list[HardwareResource] = field(default_factory=list)
    """What it offers, by kind."""
    cpu_slots: tuple[tuple[int, ...], ...] = ()
    """Cores of each CPU slot, when its devices are CPU slots."""
    missing_programs: tuple[str, ...] = ()
    """Interpreters and profilers that the configuration names for it, and that it does not have."""

    def get_hw_resource_count(self, hw_type: str | None) -> int:
        """Number of pieces of one kind of hardware."""
        return sum(r.count for r in self.hardware_resources if r.type == hw_type)

    @property
    def num_accelerators(self) -> int:
        """Number of devices: accelerators or CPU slots."""
        return self.get_hw_resource_count(Accelerator.HW_TYPE)

    @property
    def accelerator_model(self) -> str:
        """Model of its devices as ``TYPE:name``, empty without any."""
        devices = (r.infos for r in self.hardware_resources if r.type == Accelerator.HW_TYPE)
        return next((info.model for infos in devices for info in infos), "")

    @property
    def accelerator_type(self) -> AcceleratorType:
        """Kind of its devices."""
        return Accelerator.type_of(self.accelerator_model)


@dataclass
class NodeGroupInfo:
    """Nodes under one label. Its resources are numbered node by node from 0.

    The resource is the declared hardware type if there is one, else the nodes' devices, else (also
    with ``ignore_hardware``) the node itself.
    """

    label: str
    nodes: list[NodeInfo]  # in order of rank
    hardware_type: str | None = None  # kind of the resource, None when a node counts as one
    ignore_hardware: bool = False
    env_configs: list[NodeGroupEnvConfig] | None = None

    DEFAULT_GROUP_LABEL: ClassVar[str] = "cluster"
    NODE_PLACEMENT_GROUP_LABEL: ClassVar[str] = "node"
    RESERVED_LABELS: ClassVar[tuple[str, ...]] = (DEFAULT_GROUP_LABEL, NODE_PLACEMENT_GROUP_LABEL)

    def __post_init__(self) -> None:
        counts = any(node.num_accelerators for node in self.nodes)
        if self.hardware_type is None and not self.ignore_hardware and counts:
            self.hardware_type = Accelerator.HW_TYPE

    @property
    def node_ranks(self) -> list[int]:
        """Ranks of its nodes in the cluster."""
        return [node.node_rank for node in self.nodes]

    @property
    def resources(self) -> list[tuple[NodeInfo, int]]:
        """Node and local rank of every resource, by its rank in the group."""
        if self.hardware_type is None:
            return [(node, 0) for node in self.nodes]
        kind = self.hardware_type
        return [(n, local) for n in self.nodes for local in range(n.get_hw_resource_count(kind))]

    @property
    def hardware_resource_count(self) -> int:
        """Number of resources."""
        return len(self.resources)

    @property
    def local_hardware_ranks(self) -> list[list[int]]:
        """Group ranks of the resources of each node."""
        owners = [node.node_rank for node, _ in self.resources]
        return [[rank for rank, owner in enumerate(owners) if owner == n] for n in self.node_ranks]

    def get_hardware_infos(self, node_rank: int) -> list[HardwareInfo]:
        """The resources of one of its nodes."""
        return [
            info
            for node in self.nodes
            if node.node_rank == node_rank
            for resource in node.hardware_resources
            if resource.type == self.hardware_type
            for info in resource.infos
        ]

    def group_ranks_to_global_ranks(self, group_ranks: Sequence[int]) -> list[int]:
        """Cluster ranks of the nodes that have these ranks in the group."""
        outside = [rank for rank in group_ranks if not 0 <= rank < len(self.nodes)]
        if outside:
            raise NodeRankError(
                f"Group rank out of range: node group '{self.label}' has {len(self.nodes)} nodes "
                f"(ranks 0-{len(self.nodes) - 1}), got {outside}."
            )
        return [self.nodes[rank].node_rank for rank in group_ranks]

    def get_node_by_hardware_rank(self, hardware_rank: int) -> NodeInfo | None:
        """Node that owns a resource, None beyond the last."""
        return self._owner(hardware_rank)[0]

    def get_local_hardware_rank(self, hardware_rank: int) -> int | None:
        """Rank of a resource on its node, None beyond the last."""
        return self._owner(hardware_rank)[1]

    def _owner(self, hardware_rank: int) -> tuple[NodeInfo, int] | tuple[None, None]:
        inside = 0 <= hardware_rank < self.hardware_resource_count
        return self.resources[hardware_rank] if inside else (None, None)

    def get_node_env_vars(self, node_rank: int) -> dict[str, str]:
        """Configured environment variables of one of its nodes."""
        environments = [c for c in self.env_configs or [] if node_rank in c.node_ranks]
        variables = [variable for c in environments for variable in c.env_vars or []]
        return {name: value for variable in variables for name, value in variable.items()}

    def get_node_python_interpreter_path(self, node_rank: int) -> str | None:
        """Configured interpreter of one of its nodes, None if there is none; never two."""
        paths = {
            config.python_interpreter_path
            for config in self.env_configs or []
            if node_rank in config.node_ranks and config.python_interpreter_path is not None
        }
        if len(paths) > 1:
            raise ClusterConfigValueError(
                f"Conflicting Python interpreter paths {sorted(paths)} for node {node_rank} in "
                f"node group '{self.label}'. Keep one of them."
            )
        return next(iter(paths), None)


@dataclass(eq=False, repr=False)
class NodeTable:
    """The nodes of a cluster and their groups: all that placements need to know of it."""

    nodes: Sequence[NodeInfo]  # in order of rank
    node_groups: Mapping[str, NodeGroupInfo]  # by label, the reserved ones included

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        """Number of devices on all nodes."""
        return sum(node.num_accelerators for node in self.nodes)

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """Cluster-wide ranks of each node's devices."""
        ends = list(accumulate(node.num_accelerators for node in self.nodes))
        return [list(range(start, end)) for start, end in pairwise([0, *ends])]

    def get_node_group(self, label: str | None = None) -> NodeGroupInfo | None:
        """Group of a label, the whole cluster for None; None for an unknown label."""
        return self.node_groups.get(NodeGroupInfo.DEFAULT_GROUP_LABEL if label is None else label)

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """Node of a rank; a ``ValueError`` if there is none."""
        if not 0 <= node_rank < len(self.nodes):
            raise ClusterConfigValueError(
                f"Node rank {node_rank} is out of range: the cluster has {len(self.nodes)} nodes "
                f"(ranks 0-{len(self.nodes) - 1})."
            )
        return self.nodes[node_rank]


def build_node_table(nodes: Sequence[NodeInfo], config: ClusterConfig) -> NodeTable:
    """Nodes in order of rank, with the configured node groups and the two reserved ones.

    ``cluster`` counts the devices of all nodes, ``node`` counts the nodes.
    """
    everything = list(nodes)
    groups = [
        NodeGroupInfo(NodeGroupInfo.DEFAULT_GROUP_LABEL, everything),
        NodeGroupInfo(NodeGroupInfo.NODE_PLACEMENT_GROUP_LABEL, everything, ignore_hardware=True),
    ]
    for group in config.node_groups or []:
        members = [node for node in everything if node.node_rank in group.node_ranks]
        kind, ignored = group.hardware_type, group.ignore_hardware
        groups.append(NodeGroupInfo(group.label, members, kind, ignored, group.env_configs))
    return NodeTable(everything, {group.label: group for group in groups})


def slot_cores(node: NodeInfo, local_ranks: Sequence[int]) -> tuple[int, ...]:
    """Cores of a worker that is placed on these CPU slots of a node; empty on other devices."""
    if node.accelerator_type is not AcceleratorType.CPU_SLOT:
        return ()
    return tuple(sorted({core for rank in local_ranks for core in node.cpu_slots[rank]}))
