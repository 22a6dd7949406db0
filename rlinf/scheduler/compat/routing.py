"""Routes between ranks that are paired: each side computes its plan alone, from the same numbers.

A batch of B samples lies in equal contiguous slices on S senders and shall lie in equal contiguous
slices on D receivers. A sender's slice is cut where receiver slices begin; a receiver takes its
parts in the order of the senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any, Protocol

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import RoutingError, SchedulerValueError


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


ROUTING_KEY_PREFIX = "scheduler_route"
ROUTING_DEFAULT_TAG = "default"

RouteChannelKey = tuple[str, str, str, str, str, int | None, int | None]
"""Prefix, source group, destination group, tag, route key, source rank, destination rank."""


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


class CommMapper:
    """The arithmetic of batch routing."""

    @staticmethod
    def get_dst_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int
    ) -> list[tuple[int, int]]:
        """Receivers of one sender: ``(destination rank, number of samples)`` in batch order.

        Raises:
            RoutingError: The batch is not divisible by both world sizes, or there is no such rank.
        """
        _check_divisible(batch_size, src_world_size, dst_world_size)
        _check_rank("src_rank", src_rank, src_world_size)
        return _overlaps(batch_size // src_world_size, src_rank, batch_size // dst_world_size)

    @staticmethod
    def get_src_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int
    ) -> list[tuple[int, int]]:
        """Senders of one receiver: ``(source rank, number of samples)`` in batch order.

        Raises:
            RoutingError: The batch is not divisible by both world sizes, or there is no such rank.
        """
        _check_divisible(batch_size, src_world_size, dst_world_size)
        _check_rank("dst_rank", dst_rank, dst_world_size)
        return _overlaps(batch_size // dst_world_size, dst_rank, batch_size // src_world_size)

    @staticmethod
    def build_channel_key(src_rank: int, dst_rank: int, extra: str) -> str:
        """Short text key of one pair of ranks."""
        return f"{src_rank}_{dst_rank}_{extra}"

    @staticmethod
    def decoupled_get_batch_size(
        batch_size: int, src_world_size: int, dst_world_size: int, queue_size: int = 0
    ) -> list[int]:
        """Sizes of the shards that one rank sends or takes in decoupled mode.

        A shard has ``batch_size / max(src_world_size, dst_world_size)`` samples. A rank of the
        larger group handles one, a rank of the smaller group as many as there are peers per rank.

        Args:
            batch_size: Samples of all ranks together.
            src_world_size: Workers in the caller's own group.
            dst_world_size: Workers in the other group.
            queue_size: Shards that a rank of the smaller group handles at once; 0 is all of its
                share.

        Raises:
            RoutingError: The batch is not divisible by the larger group, or the queue is larger
                than the share.
        """
        larger = max(src_world_size, dst_world_size)
        if batch_size < 1 or batch_size % larger:
            raise RoutingError(
                f"batch_size ({batch_size}) must be divisible by the larger group ({larger} "
                f"workers). Nearest legal: {_nearest_multiple(batch_size, larger)}."
            )
        share = ceil(dst_world_size / src_world_size)
        if src_world_size < dst_world_size and queue_size > share:
            raise RoutingError(
                f"queue_size {queue_size} is more than a rank's share of {share} shards "
                f"({dst_world_size} peers over {src_world_size} ranks). Nearest legal: {share}."
            )
        limited = src_world_size < dst_world_size and queue_size > 0
        return [batch_size // larger] * (queue_size if limited else share)


def _overlaps(own_slice: int, own_rank: int, peer_slice: int) -> list[tuple[int, int]]:
    """Peers whose slices overlap the own one, with the number of common samples."""
    begin, end = own_rank * own_slice, (own_rank + 1) * own_slice
    peers = range(begin // peer_slice, (end - 1) // peer_slice + 1)
    return [
        (peer, min(end, (peer + 1) * peer_slice) - max(begin, peer * peer_slice)) for peer in peers
    ]


def _check_divisible(batch_size: int, src_world_size: int, dst_world_size: int) -> None:
    if src_world_size < 1 or dst_world_size < 1:
        raise RoutingError(
            f"World sizes must be 1 or more, got {src_world_size} and {dst_world_size}."
        )
    for name, size in (("src_world_size", src_world_size), ("dst_world_size", dst_world_size)):
        if batch_size < 1 or batch_size % size:
            step = lcm(src_world_size, dst_world_size)
            raise RoutingError(
                f"batch_size ({batch_size}) must be positive and divisible by {name} ({size}), so "
                f"that every rank has an equal slice. Nearest legal: "
                f"{_nearest_multiple(batch_size, step)}."
            )


def _check_rank(name: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        nearest = min(max(rank, 0), world_size - 1)
        raise RoutingError(
            f"{name} ({rank}) must be in [0, {world_size}). Nearest legal: {nearest}."
        )


def _nearest_multiple(value: int, step: int) -> int:
    return max(1, round(value / step)) * step
