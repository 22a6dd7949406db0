"""Routes where nobody is paired.

The group of fewer workers serves any shard that waits under a shared key and returns the result to
the rank that the shard's label names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf.scheduler.compat.routing import (
    ROUTING_DEFAULT_TAG,
    CommMapper,
    DecoupledRouteEntry,
    RoutePlan,
    build_route_channel_key,
)
from rlinf.scheduler.errors import RoutingError, SchedulerValueError


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


def _check_covers(sizes: Sequence[int], batch_size: int, world_size: int, queue_size: int) -> None:
    if queue_size == 0 and sum(sizes) * world_size != batch_size:
        raise RoutingError(
            f"A batch of {batch_size} over {world_size} ranks cannot be sent as shards of "
            f"{sizes[0]}: a rank would send {sum(sizes)} samples but holds "
            f"{batch_size / world_size:g}. Make one group a multiple of the other in size."
        )
