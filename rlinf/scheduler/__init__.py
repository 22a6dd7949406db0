"""Cluster, workers, channels and placement on two runtimes.

Names are imported when they are used: some of them need torch, and a program that only reads a
configuration should start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.scheduler.accelerators import CollectiveGroupOptions
    from rlinf.scheduler.address import WorkerAddress, WorkerInfo
    from rlinf.scheduler.channel.channel import Channel, WeightedItem
    from rlinf.scheduler.channel.channel_worker import ChannelWorker
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.cluster_config import ClusterConfig
    from rlinf.scheduler.compat.batches import (
        get_batch_size,
        infer_batch_size,
        merge_batches,
        split_batch,
    )
    from rlinf.scheduler.compat.routing import (
        CommMapper,
        build_recv_plan,
        build_route_channel_key,
        build_send_key,
        build_send_plan,
        decoupled_build_recv_plan,
        get_group_world_size,
        split_channel_message,
    )
    from rlinf.scheduler.component_placement import ComponentPlacement
    from rlinf.scheduler.hardware import (
        AcceleratorType,
        AcceleratorUtil,
        FrankaHWInfo,
        HardwareInfo,
    )
    from rlinf.scheduler.placement import (
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
        PlacementStrategy,
    )
    from rlinf.scheduler.services.tracer import Tracer
    from rlinf.scheduler.worker import Worker
    from rlinf.scheduler.worker_group import WorkerGroup, WorkerGroupFuncResult

_HOMES = {
    "AcceleratorType": "hardware",
    "AcceleratorUtil": "hardware",
    "Channel": "channel",
    "ChannelWorker": "channel.channel_worker",
    "Cluster": "cluster",
    "ClusterConfig": "cluster_config",
    "CollectiveGroupOptions": "accelerators",
    "CommMapper": "compat.routing",
    "ComponentPlacement": "component_placement",
    "FlexiblePlacementStrategy": "placement",
    "FrankaHWInfo": "hardware",
    "HardwareInfo": "hardware",
    "NodePlacementStrategy": "placement",
    "PackedPlacementStrategy": "placement",
    "PlacementStrategy": "placement",
    "Tracer": "services.tracer",
    "WeightedItem": "channel.channel",
    "Worker": "worker",
    "WorkerAddress": "address",
    "WorkerGroup": "worker_group",
    "WorkerGroupFuncResult": "worker_group",
    "WorkerInfo": "address",
    "build_recv_plan": "compat.routing",
    "build_route_channel_key": "compat.routing",
    "build_send_key": "compat.routing",
    "build_send_plan": "compat.routing",
    "decoupled_build_recv_plan": "compat.routing",
    "get_batch_size": "compat.batches",
    "get_group_world_size": "compat.routing",
    "infer_batch_size": "compat.batches",
    "merge_batches": "compat.batches",
    "split_batch": "compat.batches",
    "split_channel_message": "compat.routing",
}

__all__ = [
    "AcceleratorType",
    "AcceleratorUtil",
    "Channel",
    "ChannelWorker",
    "Cluster",
    "ClusterConfig",
    "CollectiveGroupOptions",
    "CommMapper",
    "ComponentPlacement",
    "FlexiblePlacementStrategy",
    "FrankaHWInfo",
    "HardwareInfo",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PlacementStrategy",
    "Tracer",
    "WeightedItem",
    "Worker",
    "WorkerAddress",
    "WorkerGroup",
    "WorkerGroupFuncResult",
    "WorkerInfo",
    "build_recv_plan",
    "build_route_channel_key",
    "build_send_key",
    "build_send_plan",
    "decoupled_build_recv_plan",
    "get_batch_size",
    "get_group_world_size",
    "infer_batch_size",
    "merge_batches",
    "split_batch",
    "split_channel_message",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
