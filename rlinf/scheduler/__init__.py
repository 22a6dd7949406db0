"""Cluster, workers, channels and placement on two runtimes.

Names are imported when they are used: some of them need torch, and a program that only reads a
configuration should start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.scheduler.accelerators import AcceleratorType as AcceleratorType
    from rlinf.scheduler.accelerators import AcceleratorUtil as AcceleratorUtil
    from rlinf.scheduler.accelerators import CollectiveGroupOptions as CollectiveGroupOptions
    from rlinf.scheduler.address import WorkerAddress as WorkerAddress
    from rlinf.scheduler.address import WorkerInfo as WorkerInfo
    from rlinf.scheduler.channel.channel import Channel as Channel
    from rlinf.scheduler.channel.channel import WeightedItem as WeightedItem
    from rlinf.scheduler.channel.channel_worker import ChannelWorker as ChannelWorker
    from rlinf.scheduler.cluster import Cluster as Cluster
    from rlinf.scheduler.cluster_config import ClusterConfig as ClusterConfig
    from rlinf.scheduler.compat.batches import get_batch_size as get_batch_size
    from rlinf.scheduler.compat.batches import infer_batch_size as infer_batch_size
    from rlinf.scheduler.compat.batches import merge_batches as merge_batches
    from rlinf.scheduler.compat.batches import split_batch as split_batch
    from rlinf.scheduler.compat.routing import CommMapper as CommMapper
    from rlinf.scheduler.compat.routing import build_recv_plan as build_recv_plan
    from rlinf.scheduler.compat.routing import build_route_channel_key as build_route_channel_key
    from rlinf.scheduler.compat.routing import build_send_key as build_send_key
    from rlinf.scheduler.compat.routing import build_send_plan as build_send_plan
    from rlinf.scheduler.compat.routing import (
        decoupled_build_recv_plan as decoupled_build_recv_plan,
    )
    from rlinf.scheduler.compat.routing import get_group_world_size as get_group_world_size
    from rlinf.scheduler.compat.routing import split_channel_message as split_channel_message
    from rlinf.scheduler.component_placement import ComponentPlacement as ComponentPlacement
    from rlinf.scheduler.hardware import FrankaHWInfo as FrankaHWInfo
    from rlinf.scheduler.hardware import HardwareInfo as HardwareInfo
    from rlinf.scheduler.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from rlinf.scheduler.placement import NodePlacementStrategy as NodePlacementStrategy
    from rlinf.scheduler.placement import PackedPlacementStrategy as PackedPlacementStrategy
    from rlinf.scheduler.placement import PlacementStrategy as PlacementStrategy
    from rlinf.scheduler.services.tracer import Tracer as Tracer
    from rlinf.scheduler.worker import Worker as Worker
    from rlinf.scheduler.worker_group import WorkerGroup as WorkerGroup
    from rlinf.scheduler.worker_group import WorkerGroupFuncResult as WorkerGroupFuncResult

_HOMES = {
    "accelerators": "AcceleratorType AcceleratorUtil CollectiveGroupOptions",
    "address": "WorkerAddress WorkerInfo",
    "channel.channel": "Channel WeightedItem",
    "channel.channel_worker": "ChannelWorker",
    "cluster": "Cluster",
    "cluster_config": "ClusterConfig",
    "compat.batches": "get_batch_size infer_batch_size merge_batches split_batch",
    "compat.routing": (
        "CommMapper build_recv_plan build_route_channel_key build_send_key build_send_plan "
        "decoupled_build_recv_plan get_group_world_size split_channel_message"
    ),
    "component_placement": "ComponentPlacement",
    "hardware": "FrankaHWInfo HardwareInfo",
    "placement": (
        "FlexiblePlacementStrategy NodePlacementStrategy PackedPlacementStrategy PlacementStrategy"
    ),
    "services.tracer": "Tracer",
    "worker": "Worker",
    "worker_group": "WorkerGroup WorkerGroupFuncResult",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
