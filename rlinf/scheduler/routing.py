"""Which rank sends which part of a batch to which rank, between two worker groups.

A batch of B samples lies in equal contiguous slices on S senders and shall lie in equal contiguous
slices on D receivers. A sender's slice is cut where receiver slices begin; a receiver takes its
parts in the order of the senders. Both sides compute their plan alone, from the same numbers.

In decoupled mode nobody is paired: the group of fewer workers serves any shard that waits under a
shared key and returns the result to the rank that the shard's label names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Protocol

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.batches import (
    get_batch_size,
    infer_batch_size,
    merge_batches,
    split_batch,
    validate_batch_size,
)
from rlinf.scheduler.comm_mapper import CommMapper
from rlinf.scheduler.errors import RoutingError, SchedulerValueError

__all__ = [
    "CommMapper",
    "DecoupledRouteEntry",
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

ROUTING_KEY_PREFIX = "scheduler_route"
ROUTING_DEFAULT_TAG = "default"

RouteChannelKey = tuple[str, str, str, str, str, int | None, int | None]
"""Prefix, source group, destination group, tag, route key, source rank, destination rank."""


@dataclass(order=True)
class WeightedItem:
    """An item of a channel with its weight for ``get_batch``."""

    weight: int
    """What the item counts towards a batch."""

    item: Any = field(compare=False)
    """The item."""


@dataclass(frozen=True)
class RouteEntry:
    """One shard on its way between two ranks."""

    peer_rank: int
    """Rank on the other side."""

    batch_size: int | None
    """Samples in the shard, None if the total was not given."""

    key: RouteChannelKey
    """Channel key under which it travels."""


@dataclass(frozen=True)
class DecoupledRouteEntry:
    """One shard that any rank may take."""

    batch_size: int
    """Samples in the shard."""

    key: RouteChannelKey
    """Channel key under which it travels."""

    batch_index: str | None
    """Label that leads the result back, see `build_channel_message`; None when receiving."""


@dataclass(frozen=True)
class RoutePlan:
    """All shards of one rank, in the order of the batch."""

    src_group_name: str
    """Sending group."""

    dst_group_name: str
    """Receiving group."""

    src_rank: int | None
    """Rank of the sender whose plan this is."""

    dst_rank: int | None
    """Rank of the receiver whose plan this is."""

    src_world_size: int
    """Number of senders; in decoupled mode the workers of the group whose plan this is."""

    dst_world_size: int
    """Number of receivers; in decoupled mode the workers of the other group."""

    tag: str
    """Kind of message."""

    route_key: Any
    """Stream of messages of that kind."""

    entries: list[Any]
    """`RouteEntry` or, in decoupled mode, `DecoupledRouteEntry` per shard."""


def build_route_channel_key(  # noqa: PLR0917 - the published signature
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    dst_rank: int | None,
    tag: str | None,
    route_key: Any = None,
) -> RouteChannelKey:
    """Channel key of one route; None as a rank stands for any."""
    key = "" if route_key is None else route_key if isinstance(route_key, str) else repr(route_key)
    name = tag or ROUTING_DEFAULT_TAG
    return ROUTING_KEY_PREFIX, src_group_name, dst_group_name, name, key, src_rank, dst_rank


def build_send_key(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int,
    dst_rank: int,
    tag: str | None = None,
    route_key: Any = None,
) -> RouteChannelKey:
    """Channel key under which a rank sends a shard to another rank."""
    return build_route_channel_key(
        src_group_name, dst_group_name, src_rank, dst_rank, tag, route_key
    )


def build_send_plan(  # noqa: PLR0917 - the published signature
    src_group_name: str,
    dst_group_name: str,
    src_rank: int,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None = None,
    route_key: Any = None,
    batch_size: int | None = None,
) -> RoutePlan:
    """Shards that one sender sends.

    A batch of 12 from 2 senders to 3 receivers: rank 0 sends 4 samples to 0 and 2 to 1, rank 1
    sends 2 samples to 1 and 4 to 2.

    Args:
        src_group_name: Sending group.
        dst_group_name: Receiving group.
        src_rank: The sender.
        src_world_size: Number of senders.
        dst_world_size: Number of receivers.
        tag: Kind of message.
        route_key: Stream of messages of that kind.
        batch_size: Samples of all senders together; None leaves the sizes of shards open.

    Raises:
        RoutingError: The batch is not divisible by both world sizes, or there is no such rank.
    """
    total = lcm(src_world_size, dst_world_size) if batch_size is None else batch_size
    entries = [
        RouteEntry(
            peer,
            None if batch_size is None else size,
            build_route_channel_key(src_group_name, dst_group_name, src_rank, peer, tag, route_key),
        )
        for peer, size in CommMapper.get_dst_ranks(total, src_world_size, dst_world_size, src_rank)
    ]
    return RoutePlan(
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        src_rank=src_rank,
        dst_rank=None,
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=tag or ROUTING_DEFAULT_TAG,
        route_key=route_key,
        entries=entries,
    )


def build_recv_plan(  # noqa: PLR0917 - the published signature
    src_group_name: str,
    dst_group_name: str,
    dst_rank: int,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None = None,
    route_key: Any = None,
    batch_size: int | None = None,
) -> RoutePlan:
    """Shards that one receiver takes, in the order in which it concatenates them.

    The arguments are those of `build_send_plan`, with ``dst_rank`` the receiver.

    Raises:
        RoutingError: The batch is not divisible by both world sizes, or there is no such rank.
    """
    total = lcm(src_world_size, dst_world_size) if batch_size is None else batch_size
    entries = [
        RouteEntry(
            peer,
            None if batch_size is None else size,
            build_route_channel_key(src_group_name, dst_group_name, peer, dst_rank, tag, route_key),
        )
        for peer, size in CommMapper.get_src_ranks(total, src_world_size, dst_world_size, dst_rank)
    ]
    return RoutePlan(
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        src_rank=None,
        dst_rank=dst_rank,
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=tag or ROUTING_DEFAULT_TAG,
        route_key=route_key,
        entries=entries,
    )


def decoupled_build_send_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None = None,
    route_key: Any = None,
    batch_size: int,
    mode: str | None = None,
    tag_batch_router: Sequence[str] | None = None,
    send_queue_size: int = 0,
) -> RoutePlan:
    """Shards that one rank sends in decoupled mode.

    Args:
        src_group_name: The caller's group.
        dst_group_name: The other group.
        src_rank: The caller; labels its own shards. Not needed to answer.
        src_world_size: Workers in the caller's group.
        dst_world_size: Workers in the other group.
        tag: Kind of message.
        route_key: Stream of messages of that kind.
        batch_size: Samples of all ranks together.
        mode: Phase that the label carries, such as ``train``.
        tag_batch_router: Labels of the shards that this call answers, in the order in which they
            were taken; each answer goes to the rank in its label. None sends new shards.
        send_queue_size: Shards at once, see `CommMapper.decoupled_get_batch_size`.

    Raises:
        RoutingError: The batch cannot be cut into whole shards, or the labels do not match them.
    """
    sizes = CommMapper.decoupled_get_batch_size(
        batch_size, src_world_size, dst_world_size, send_queue_size
    )
    if tag_batch_router is None:
        _check_covers(sizes, batch_size, src_world_size, send_queue_size)
        name = tag or ROUTING_DEFAULT_TAG
        labels = [
            build_channel_message(src_rank or 0, index, mode or "", name)
            for index in range(len(sizes))
        ]
        targets: list[tuple[int | None, str]] = [(None, name)] * len(sizes)
    else:
        labels = list(tag_batch_router)
        if len(labels) != len(sizes):
            raise RoutingError(
                f"There are {len(labels)} labels {labels} to answer but {len(sizes)} shards. Every "
                "shard that was taken is answered once."
            )
        targets = [(rank, kind) for rank, _, _, kind in map(split_channel_message, labels)]
    entries = [
        DecoupledRouteEntry(
            size,
            build_route_channel_key(src_group_name, dst_group_name, None, rank, kind, route_key),
            label,
        )
        for size, label, (rank, kind) in zip(sizes, labels, targets, strict=True)
    ]
    return RoutePlan(
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        src_rank=None,
        dst_rank=targets[-1][0],
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=targets[-1][1],
        route_key=route_key,
        entries=entries,
    )


def decoupled_build_recv_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    recv_rank: int | None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None = None,
    route_key: Any = None,
    batch_size: int,
    recv_queue_size: int = 0,
) -> RoutePlan:
    """Shards that one rank takes in decoupled mode.

    Args:
        src_group_name: The other group, which sends.
        dst_group_name: The caller's group.
        recv_rank: The caller when it takes answers to its own shards; None takes any shard.
        src_world_size: Workers in the caller's group.
        dst_world_size: Workers in the other group.
        tag: Kind of message.
        route_key: Stream of messages of that kind.
        batch_size: Samples of all ranks together.
        recv_queue_size: Shards at once, see `CommMapper.decoupled_get_batch_size`.

    Raises:
        RoutingError: The batch cannot be cut into whole shards.
    """
    key = build_route_channel_key(src_group_name, dst_group_name, None, recv_rank, tag, route_key)
    sizes = CommMapper.decoupled_get_batch_size(
        batch_size, src_world_size, dst_world_size, recv_queue_size
    )
    return RoutePlan(
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        src_rank=None,
        dst_rank=None,
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=tag or ROUTING_DEFAULT_TAG,
        route_key=route_key,
        entries=[DecoupledRouteEntry(size, key, None) for size in sizes],
    )


def build_channel_message(send_rank: int, batch_idx: int, mode: str, tag: str) -> str:
    """Label of a shard in decoupled mode: ``{send_rank}_{batch_idx}_{mode}_{tag}``."""
    return f"{send_rank}_{batch_idx}_{mode}_{tag}"


def split_channel_message(channel_message: str) -> tuple[int, int, str, str]:
    """Read a shard's label: sending rank, index of the shard, mode and tag.

    Raises:
        SchedulerValueError: The text is no such label.
    """
    parts = channel_message.split("_", 3)
    if len(parts) < 4 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        raise SchedulerValueError(
            f"'{channel_message}' is not a shard label: expected 'rank_index_mode_tag', for "
            "example '0_1_train_obs'."
        )
    return int(parts[0]), int(parts[1]), parts[2], parts[3]


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


def _check_covers(sizes: Sequence[int], batch_size: int, world_size: int, queue_size: int) -> None:
    if queue_size == 0 and sum(sizes) * world_size != batch_size:
        raise RoutingError(
            f"A batch of {batch_size} over {world_size} ranks cannot be sent as shards of "
            f"{sizes[0]}: a rank would send {sum(sizes)} samples but holds "
            f"{batch_size / world_size:g}. Make one group a multiple of the other in size."
        )
