"""Clusters of imagined machines."""

from collections.abc import Mapping, Sequence

from rlinf.scheduler.hardware import Accelerator, HardwareInfo, HardwareResource
from rlinf.scheduler.node import NodeGroupInfo, NodeInfo, NodeTable


def node(rank: int, devices: int, arms: int = 0, model: str = "NV_GPU:Imagined") -> NodeInfo:
    resources = []
    if devices:
        resources.append(Accelerator.resource([model] * devices))
    if arms:
        resources.append(HardwareResource("Franka", [HardwareInfo("Franka", "Franka")] * arms))
    return NodeInfo(
        node_labels=[],
        node_rank=rank,
        ray_id=f"node-{rank}",
        node_ip=f"10.0.0.{rank + 1}",
        num_cpus=32,
        python_interpreter_path="python",
        hardware_resources=resources,
    )


def table(
    nodes: Sequence[NodeInfo],
    groups: Mapping[str, Sequence[int]] | None = None,
    hardware_types: Mapping[str, str] | None = None,
) -> NodeTable:
    built = [
        NodeGroupInfo("cluster", list(nodes)),
        NodeGroupInfo("node", list(nodes), ignore_hardware=True),
    ]
    for label, ranks in (groups or {}).items():
        kind = (hardware_types or {}).get(label)
        built.append(NodeGroupInfo(label, [nodes[rank] for rank in ranks], hardware_type=kind))
    return NodeTable(list(nodes), {group.label: group for group in built})


def cluster(devices: Sequence[int], groups: Mapping[str, Sequence[int]] | None = None) -> NodeTable:
    """One node per entry, with that many devices."""
    return table([node(rank, count) for rank, count in enumerate(devices)], groups)
