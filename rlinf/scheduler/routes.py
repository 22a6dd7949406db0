"""Shards of a batch on their way between two worker groups, and the keys they travel under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
