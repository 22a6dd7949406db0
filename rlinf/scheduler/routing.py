"""Which rank sends which part of a batch to which rank, between two worker groups.

Shards and keys are in `rlinf.scheduler.routes`, the plans of paired ranks in
`rlinf.scheduler.paired_routes`, those of ranks that are not paired in
`rlinf.scheduler.decoupled_routes`; this module offers all of them.
"""

from __future__ import annotations

from typing import Protocol

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.batches import (
    get_batch_size,
    infer_batch_size,
    merge_batches,
    split_batch,
    validate_batch_size,
)
from rlinf.scheduler.comm_mapper import CommMapper
from rlinf.scheduler.decoupled_routes import (
    build_channel_message,
    decoupled_build_recv_plan,
    decoupled_build_send_plan,
    split_channel_message,
)
from rlinf.scheduler.errors import SchedulerValueError
from rlinf.scheduler.paired_routes import build_recv_plan, build_send_plan
from rlinf.scheduler.routes import (
    ROUTING_DEFAULT_TAG,
    ROUTING_KEY_PREFIX,
    DecoupledRouteEntry,
    RouteChannelKey,
    RouteEntry,
    RoutePlan,
    WeightedItem,
    build_route_channel_key,
    build_send_key,
)

__all__ = [
    "ROUTING_DEFAULT_TAG",
    "ROUTING_KEY_PREFIX",
    "CommMapper",
    "DecoupledRouteEntry",
    "RouteChannelKey",
    "RouteEntry",
    "RoutePlan",
    "WeightedItem",
    "build_channel_message",
    "build_recv_plan",
    "build_route_channel_key",
    "build_send_key",
    "build_send_plan",
    "decoupled_build_recv_plan",
    "decoupled_build_send_plan",
    "get_batch_size",
    "get_group_world_size",
    "infer_batch_size",
    "merge_batches",
    "split_batch",
    "split_channel_message",
    "validate_batch_size",
]


class WorkerRegistry(Protocol):
    """Where the workers of a cluster are registered."""

    def get_worker_info(self, worker_address: WorkerAddress) -> WorkerInfo | None:
        """Information of a worker, None if there is no such worker."""


def get_group_world_size(manager_proxy: WorkerRegistry, group_name: str) -> int:
    """Number of workers in a group.

    Raises:
        SchedulerValueError: No group of that name is registered.
    """
    info = manager_proxy.get_worker_info(WorkerAddress(group_name, 0))
    if info is None:
        raise SchedulerValueError(
            f"Worker group '{group_name}' is not registered. Launch it before others route to it, "
            "and use the name it was launched with."
        )
    return info.group_world_size
