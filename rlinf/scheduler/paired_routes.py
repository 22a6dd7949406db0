"""Routes between ranks that are paired: each side computes its plan alone, from the same numbers.

A batch of B samples lies in equal contiguous slices on S senders and shall lie in equal contiguous
slices on D receivers. A sender's slice is cut where receiver slices begin; a receiver takes its
parts in the order of the senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from rlinf.scheduler.comm_mapper import CommMapper
from rlinf.scheduler.routes import (
    ROUTING_DEFAULT_TAG,
    RouteEntry,
    RoutePlan,
    build_route_channel_key,
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
    return _plan(
        CommMapper.get_dst_ranks(total, src_world_size, dst_world_size, src_rank),
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        src_rank=src_rank,
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=tag,
        route_key=route_key,
        batch_size=batch_size,
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
    return _plan(
        CommMapper.get_src_ranks(total, src_world_size, dst_world_size, dst_rank),
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        dst_rank=dst_rank,
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=tag,
        route_key=route_key,
        batch_size=batch_size,
    )


def _plan(
    parts: Sequence[tuple[int, int]],
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None = None,
    dst_rank: int | None = None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any,
    batch_size: int | None,
) -> RoutePlan:
    """The plan of the one rank that is given, with ``parts``: (peer, samples) of the other side."""
    entries = []
    for peer, size in parts:
        source, target = (peer, dst_rank) if src_rank is None else (src_rank, peer)
        key = build_route_channel_key(
            src_group_name, dst_group_name, source, target, tag, route_key
        )
        entries.append(RouteEntry(peer, None if batch_size is None else size, key))
    return RoutePlan(
        src_group_name=src_group_name,
        dst_group_name=dst_group_name,
        src_rank=src_rank,
        dst_rank=dst_rank,
        src_world_size=src_world_size,
        dst_world_size=dst_world_size,
        tag=tag or ROUTING_DEFAULT_TAG,
        route_key=route_key,
        entries=entries,
    )
