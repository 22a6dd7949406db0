"""The cluster that a recipe describes, and how a recipe describes another one."""

from __future__ import annotations

from rlinf.config.nearest import join_choices
from rlinf.errors import ConfigError
from rlinf.flow.cluster_shape import ClusterShape, NodeGroup
from rlinf.runners.device_memory import device_memory
from rlinf.runners.placed_config import PlacedConfig


def cluster_of(config: PlacedConfig) -> ClusterShape:
    """The cluster that a recipe runs on; its devices are those that a placement can name."""
    nodes = config.cluster.num_nodes
    group = NodeGroup(
        nodes=nodes,
        devices_per_node=config.devices // nodes,
        memory_bytes=device_memory(config),
    )
    return ClusterShape(groups=(group,))


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
    if counts[0] * now.num_nodes != config.devices:
        kind = "accelerators" if config.on_accelerators else "cpu_devices"
        found.append(f"cluster.{kind}_per_node={counts[0]}")
    return found
