"""Placement strategies: which process runs on which node with which devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index

from rlinf.scheduler.errors import NodeRankError, PlacementError
from rlinf.scheduler.hardware import Accelerator, AcceleratorType
from rlinf.scheduler.node import NodeGroupInfo, NodeInfo, NodeTable


@dataclass(frozen=True)
class Placement:
    """Where one process of a worker group runs."""

    rank: int  # in its group
    cluster_node_rank: int
    placement_node_rank: int  # rank of its node among the nodes of the group
    local_accelerator_rank: int  # its first device on the node, -1 without one of its own
    accelerator_type: AcceleratorType  # of the node's devices
    local_rank: int  # among the group's processes on the node
    local_world_size: int  # the group's processes on the node
    visible_accelerators: list[str]  # devices of the node that the process sees
    isolate_accelerator: bool  # whether it sees only its own devices
    local_hardware_ranks: list[int]
    """Resources of the node that are assigned to the process; empty when it was placed by node."""
    node_group_label: str  # through which it was placed


class PlacementStrategy(ABC):
    """Assigns the processes of a worker group to nodes and devices."""

    def __init__(self, node_group_label: str | Sequence[str] | None = None) -> None:
        single = isinstance(node_group_label, str)
        labels = [node_group_label] if single else node_group_label
        self._labels = None if labels is None else [str(label) for label in labels]

    @abstractmethod
    def get_placement(
        self, cluster: NodeTable, isolate_accelerator: bool = True
    ) -> list[Placement]:
        """Place every process, in order of rank.

        Raises:
            PlacementError: The cluster has no such resources (also an ``AssertionError``).
            NodeRankError: It has no such node (also an ``IndexError``).
        """

    def _node_groups(self, cluster: NodeTable) -> list[NodeGroupInfo]:
        return find_node_groups(cluster, self._labels)


@contextmanager
def _whole_numbers(expected: str, given: object) -> Iterator[None]:
    """Say what was expected where something else than whole numbers is given."""
    try:
        yield
    except TypeError:
        raise PlacementError(f"{expected}, got {given!r}.") from None


def find_node_groups(
    cluster: NodeTable, labels: Sequence[str] | None, components: Sequence[str] = ()
) -> list[NodeGroupInfo]:
    """Node groups of these labels, or the group of all nodes; ``components`` are for the error."""
    groups = []
    for label in labels or (None,):
        group = cluster.get_node_group(label)
        if group is None:
            whose = f" for components {list(components)}" if components else ""
            raise PlacementError(
                f"Node group not found{whose}: node group with label '{label}' not found in the "
                "cluster. Define it in cluster.node_groups, or use 'cluster' (devices of all "
                "nodes) or 'node' (all nodes)."
            )
        groups.append(group)
    return groups


class NodePlacementStrategy(PlacementStrategy):
    """One process per listed node, without devices of its own.

    ``NodePlacementStrategy([0] * 4)`` runs four processes on node 0, which see all its devices.
    Ranks count the nodes of the groups in the order given, and are sorted.
    """

    def __init__(
        self, node_ranks: Sequence[int], node_group_label: str | Sequence[str] | None = None
    ) -> None:
        super().__init__(node_group_label)
        with _whole_numbers(
            "node_ranks is a list of one node per process, such as [0, 0]", node_ranks
        ):
            self._node_ranks = sorted(map(index, node_ranks))
        if not self._node_ranks:
            raise PlacementError(
                "The node_ranks list must not be empty: it has one node per process. Nearest "
                "legal: [0]."
            )

    def get_placement(
        self, cluster: NodeTable, isolate_accelerator: bool = True
    ) -> list[Placement]:
        """Place every process, see :meth:`PlacementStrategy.get_placement`."""
        nodes = [(node, group) for group in self._node_groups(cluster) for node in group.nodes]
        if len({node.node_rank for node, _ in nodes}) < len(nodes):
            raise PlacementError(
                f"Node groups {self._labels} have overlapping nodes. Placing by node across groups "
                "needs groups without a common node."
            )
        last = len(nodes) - 1
        for rank in self._node_ranks:
            if not 0 <= rank <= last:
                raise NodeRankError(
                    f"Node rank {rank} is out of range for selected node groups {self._labels} "
                    f"(total nodes {len(nodes)}). Nearest legal: {min(max(rank, 0), last)}."
                )
        shares = [_Share(*nodes[rank], local_ranks=[]) for rank in self._node_ranks]
        return _placements(shares, isolate_accelerator)


class FlexiblePlacementStrategy(PlacementStrategy):
    """Any list of resources for each process.

    ``FlexiblePlacementStrategy([[0, 1], [2], [3]])`` runs three processes, the first with two
    devices. Processes may share resources. Ranks are sorted within a process and, by their first,
    across processes; they count the resources of the groups in the order given.
    """

    def __init__(
        self,
        hardware_ranks_list: Sequence[Sequence[int]],
        node_group_label: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(node_group_label)
        expected = "hardware_ranks_list has a list of resources per process, such as [[0, 1], [2]]"
        with _whole_numbers(expected, hardware_ranks_list):
            processes = [sorted(map(index, ranks)) for ranks in hardware_ranks_list]
        if not processes or not all(processes):
            raise PlacementError(
                "The hardware_ranks_list must not be empty, and neither may the ranks of a "
                "process. Nearest legal: [[0]]. A process without hardware is placed by "
                "NodePlacementStrategy."
            )
        self._hardware_ranks = sorted(processes, key=lambda ranks: ranks[0])
        if self._hardware_ranks[0][0] < 0:
            raise PlacementError(
                f"The start hardware rank {self._hardware_ranks[0][0]} must be non-negative. "
                "Nearest legal: 0."
            )

    def get_placement(
        self, cluster: NodeTable, isolate_accelerator: bool = True
    ) -> list[Placement]:
        """Place every process, see :meth:`PlacementStrategy.get_placement`."""
        resources = _Resources(self._node_groups(cluster))
        shares = [resources.share(ranks) for ranks in self._hardware_ranks]
        return _placements(shares, isolate_accelerator)


class PackedPlacementStrategy(PlacementStrategy):
    """Equal shares of a range of resources, node after node.

    With a stride the resources of a process are that far apart:
    ``PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)`` gives
    ``[0, 2], [1, 3], [4, 6], [5, 7]``. The last rank is included.
    """

    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(node_group)
        given = start_hardware_rank, end_hardware_rank, num_hardware_per_process, stride
        with _whole_numbers("a packed placement is given by whole numbers, such as 0, 3", given):
            # Programs read these to divide a placement.
            self._start_hw_rank, self._end_hw_rank = index(given[0]), index(given[1])
            self._num_hardware_per_process, self._stride = index(given[2]), index(given[3])
        if start_hardware_rank < 0 or end_hardware_rank < start_hardware_rank:
            raise PlacementError(
                "The hardware range must be non-negative and its end must be greater than or equal "
                f"to its start, got {start_hardware_rank}-{end_hardware_rank}. Nearest legal: "
                f"{max(0, start_hardware_rank)}-{max(0, start_hardware_rank, end_hardware_rank)}."
            )
        if num_hardware_per_process < 1 or stride < 1:
            raise PlacementError(
                "num_hardware_per_process and stride must be 1 or more, got "
                f"{num_hardware_per_process} and {stride}."
            )
        self._block = num_hardware_per_process * stride
        size = end_hardware_rank - start_hardware_rank + 1
        if size % self._block:
            nearest = start_hardware_rank + max(1, size // self._block) * self._block - 1
            raise PlacementError(
                f"The number of hardware {size} must be divisible by num_hardware_per_process * "
                f"stride ({self._block}), or some would be left over. Nearest legal: "
                f"end_hardware_rank {nearest}."
            )

    def get_placement(
        self, cluster: NodeTable, isolate_accelerator: bool = True
    ) -> list[Placement]:
        """Place every process, see :meth:`PlacementStrategy.get_placement`."""
        groups = self._node_groups(cluster)
        without = [group.label for group in groups if group.hardware_type is None]
        if without:
            raise PlacementError(
                f"Packed placement requires hardware resources, but node groups {without} have "
                "none. Use NodePlacementStrategy, or set cluster.cpu_devices_per_node to divide "
                "the cores into devices."
            )
        resources = _Resources(groups)
        starts = range(self._start_hw_rank, self._end_hw_rank + 1, self._block)
        shares = [
            resources.share(list(range(start + lane, start + self._block, self._stride)))
            for start in starts
            for lane in range(self._stride)
        ]
        return _placements(shares, isolate_accelerator)


@dataclass(frozen=True)
class _Share:
    """What one process gets."""

    node: NodeInfo
    group: NodeGroupInfo
    local_ranks: list[int]


class _Resources:
    """The resources of several node groups, numbered in the order of the groups."""

    def __init__(self, groups: Sequence[NodeGroupInfo]) -> None:
        self._labels = [group.label for group in groups]
        self._all = [
            (group, node, local_rank) for group in groups for node, local_rank in group.resources
        ]

    def share(self, ranks: Sequence[int]) -> _Share:
        """Resources of one process, checked to be on one node and of one kind."""
        total = len(self._all)
        outside = [rank for rank in ranks if not 0 <= rank < total]
        if outside:
            raise PlacementError(
                f"Hardware rank {outside[0]} is out of range: node groups {self._labels} have "
                f"{total} resources, so ranks must be between 0 and {total - 1}."
            )
        if len(set(ranks)) < len(ranks):
            raise PlacementError(
                f"All hardware ranks {list(ranks)} for a process must be unique. Nearest legal: "
                f"{sorted(set(ranks))}."
            )
        chosen = [self._all[rank] for rank in ranks]
        group, node, _ = chosen[0]
        nodes = sorted({other.node_rank for _, other, _ in chosen})
        if len(nodes) > 1:
            raise PlacementError(
                f"All hardware ranks {list(ranks)} for a process must be on the same node, but "
                f"they are on nodes {nodes}: one process cannot span machines. Give each node its "
                "own process."
            )
        kinds = {other.hardware_type for other, _, _ in chosen}
        if len(kinds) > 1:
            raise PlacementError(
                f"All hardware ranks {list(ranks)} for a process must use the same hardware type, "
                f"got {sorted(map(str, kinds))}. Give each kind its own process."
            )
        return _Share(node, group, [rank for _, _, rank in chosen])


def _placements(shares: Sequence[_Share], isolate: bool) -> list[Placement]:
    on_node = [share.node.node_rank for share in shares]
    nodes = list(dict.fromkeys(on_node))
    placements = []
    for rank, share in enumerate(shares):
        node = share.node.node_rank
        everything = list(range(share.node.num_accelerators))
        owns_devices = share.local_ranks and share.group.hardware_type == Accelerator.HW_TYPE
        own = share.local_ranks if owns_devices else []
        visible = own if own and isolate else everything
        placements.append(
            Placement(
                rank=rank,
                cluster_node_rank=node,
                placement_node_rank=nodes.index(node),
                local_accelerator_rank=own[0] if own else -1,
                accelerator_type=share.node.accelerator_type,
                local_rank=on_node[:rank].count(node),
                local_world_size=on_node.count(node),
                visible_accelerators=[str(r) for r in visible],
                isolate_accelerator=isolate,
                local_hardware_ranks=share.local_ranks,
                node_group_label=share.group.label,
            )
        )
    return placements
