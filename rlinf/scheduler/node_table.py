"""From machines to the table of nodes and node groups that placements are computed on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rlinf.scheduler.accelerators import AcceleratorType
from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.cpu_slots import available_cores, divide_cores
from rlinf.scheduler.hardware import enumerate_hardware
from rlinf.scheduler.node import NodeGroupInfo, NodeInfo, NodeTable


def probe_node(
    config: ClusterConfig,
    node_rank: int = 0,
    *,
    ray_id: str = "",
    node_ip: str = "127.0.0.1",
    environment: Mapping[str, str] | None = None,
) -> NodeInfo:
    """Describe the machine that this process runs on as node ``node_rank`` of a cluster.

    Args:
        config: Labels, declared hardware, interpreter and number of CPU slots.
        node_rank: Rank of the node.
        ray_id: Ray's identifier of the node.
        node_ip: Address under which other nodes reach it.
        environment: Variables of the node before any worker; None takes those of this process.

    Raises:
        HardwareError: More CPU slots than cores.
    """
    slots = config.cpu_devices_per_node
    cores = available_cores()
    interpreters = config.get_node_python_interpreter_path_by_rank(node_rank)
    return NodeInfo(
        node_labels=config.get_node_labels_by_rank(node_rank),
        node_rank=node_rank,
        ray_id=ray_id,
        node_ip=node_ip,
        num_cpus=len(cores),
        python_interpreter_path=interpreters[0] if interpreters else sys.executable,
        default_env_vars=dict(os.environ if environment is None else environment),
        hardware_resources=enumerate_hardware(config.get_node_hw_configs_by_rank(node_rank), slots),
        cpu_slots=() if slots is None else divide_cores(cores, slots),
    )


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
        groups.append(
            NodeGroupInfo(
                label=group.label,
                nodes=[node for node in everything if node.node_rank in group.node_ranks],
                hardware_type=group.hardware_type,
                ignore_hardware=group.ignore_hardware,
                env_configs=group.env_configs,
            )
        )
    return NodeTable(everything, {group.label: group for group in groups})


def assumed_cluster(config: ClusterConfig) -> NodeTable:
    """The cluster as it would be if every node were like this machine; starts nothing.

    Enough to check and print placements before a run.

    Raises:
        HardwareError: More CPU slots than cores.
    """
    return build_node_table([probe_node(config, rank) for rank in range(config.num_nodes)], config)


def slot_cores(node: NodeInfo, local_ranks: Sequence[int]) -> tuple[int, ...]:
    """Cores of a worker that is placed on these CPU slots of a node; empty on other devices."""
    if node.accelerator_type is not AcceleratorType.CPU_SLOT:
        return ()
    return tuple(sorted({core for rank in local_ranks for core in node.cpu_slots[rank]}))
