"""Routes of batches between two groups: each side computes its plan alone, from the same numbers.

Paired: B samples lie in equal contiguous slices on S senders and shall lie so on D receivers. A
sender's slice is cut where receiver slices begin; a receiver takes its parts in the senders' order.

Decoupled: nobody is paired. The group of fewer workers serves any shard that waits under a shared
key and returns the result to the rank that the shard's label names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, lcm
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.address import WorkerAddress
from rlinf.scheduler.errors import RoutingError, SchedulerValueError

if TYPE_CHECKING:
    from rlinf.scheduler.compat.worker_members import WorkerDirectory

ROUTING_KEY_PREFIX = "scheduler_route"
ROUTING_DEFAULT_TAG = "default"

RouteChannelKey = tuple[str, str, str, str, str, int | None, int | None]
"""Prefix, source group, destination group, tag, route key, source rank, destination rank."""


@dataclass(frozen=True)
class RouteEntry:
    """One shard on its way between two ranks."""

    peer_rank: int
    batch_size: int | None  # None if the total was not given
    key: RouteChannelKey


@dataclass(frozen=True)
class DecoupledRouteEntry:
    """One shard that any rank may take."""

    batch_size: int
    key: RouteChannelKey
    batch_index: str | None  # label, see `build_channel_message`; None when receiving


@dataclass(frozen=True)
class RoutePlan:
    """All shards of one rank, in the order of the batch.

    In decoupled mode ``src_world_size`` counts the workers of the group whose plan this is,
    ``dst_world_size`` those of the other group, and entries are `DecoupledRouteEntry`.
    """

    src_group_name: str
    dst_group_name: str
    src_rank: int | None
    dst_rank: int | None
    src_world_size: int
    dst_world_size: int
    tag: str
    route_key: Any
    entries: list[Any] = field(default_factory=list)


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

    ``src`` sends and ``dst`` receives; ``tag`` is the kind of message and ``route_key`` the stream
    of such messages. ``batch_size`` counts the samples of all senders; None leaves sizes open.

    Raises:
        RoutingError: The batch is not divisible by both world sizes, or there is no such rank.
    """
    total = lcm(src_world_size, dst_world_size) if batch_size is None else batch_size
    peers = CommMapper.get_dst_ranks(total, src_world_size, dst_world_size, src_rank)
    plan = RoutePlan(
        src_group_name, dst_group_name, src_rank, None, src_world_size, dst_world_size,
        tag or ROUTING_DEFAULT_TAG, route_key,
    )  # fmt: skip
    return _paired(plan, peers, batch_size)


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
    """Shards that receiver ``dst_rank`` takes, in order; all else is as in `build_send_plan`."""
    total = lcm(src_world_size, dst_world_size) if batch_size is None else batch_size
    peers = CommMapper.get_src_ranks(total, src_world_size, dst_world_size, dst_rank)
    plan = RoutePlan(
        src_group_name, dst_group_name, None, dst_rank, src_world_size, dst_world_size,
        tag or ROUTING_DEFAULT_TAG, route_key,
    )  # fmt: skip
    return _paired(plan, peers, batch_size)


def _paired(plan: RoutePlan, peers: Sequence[tuple[int, int]], batch_size: int | None) -> RoutePlan:
    """The plan with an entry for each (peer, samples) of the other side."""
    entries = []
    for peer, size in peers:
        source = peer if plan.src_rank is None else plan.src_rank
        target = peer if plan.dst_rank is None else plan.dst_rank
        groups = plan.src_group_name, plan.dst_group_name
        key = build_route_channel_key(*groups, source, target, plan.tag, plan.route_key)
        entries.append(RouteEntry(peer, None if batch_size is None else size, key))
    return replace(plan, entries=entries)


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

    ``src_…`` is the caller's group and ``dst_…`` the other, even where the caller answers.
    ``src_rank`` labels the caller's own shards with it and with the phase ``mode``, such as
    ``train``. ``tag_batch_router`` are the labels of the shards that this call answers, in the
    order in which they were taken; each answer goes to the rank in its label. ``send_queue_size``
    are the shards at once, see `CommMapper.decoupled_get_batch_size`.
    """
    sizes = CommMapper.decoupled_get_batch_size(
        batch_size, src_world_size, dst_world_size, send_queue_size
    )
    targets: list[tuple[int | None, str]]
    if tag_batch_router is None:
        if send_queue_size == 0 and sum(sizes) * src_world_size != batch_size:
            raise RoutingError(
                f"A batch of {batch_size} over {src_world_size} ranks cannot be sent as shards of "
                f"{sizes[0]}: a rank would send {sum(sizes)} samples but holds "
                f"{batch_size / src_world_size:g}. Make one group a multiple of the other in size."
            )
        name = tag or ROUTING_DEFAULT_TAG
        indices = range(len(sizes))
        labels = [build_channel_message(src_rank or 0, i, mode or "", name) for i in indices]
        targets = [(None, name) for _ in sizes]
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
    last_rank, last_tag = targets[-1]
    return RoutePlan(
        src_group_name, dst_group_name, None, last_rank, src_world_size, dst_world_size,
        last_tag, route_key, entries,
    )  # fmt: skip


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
    """Shards that one rank takes in decoupled mode; see `decoupled_build_send_plan`.

    ``src_group_name`` is the other group, which sends, but ``src_world_size`` counts the caller's.
    ``recv_rank`` is the caller when it takes answers to its own shards; None takes any shard.
    """
    key = build_route_channel_key(src_group_name, dst_group_name, None, recv_rank, tag, route_key)
    sizes = CommMapper.decoupled_get_batch_size(
        batch_size, src_world_size, dst_world_size, recv_queue_size
    )
    entries = [DecoupledRouteEntry(size, key, None) for size in sizes]
    return RoutePlan(
        src_group_name, dst_group_name, None, None, src_world_size, dst_world_size,
        tag or ROUTING_DEFAULT_TAG, route_key, entries,
    )  # fmt: skip


def get_group_world_size(manager_proxy: WorkerDirectory, group_name: str) -> int:
    """Number of workers in a group."""
    info = manager_proxy.get_worker_info(WorkerAddress(group_name, 0))
    if info is None:
        raise SchedulerValueError(
            f"Worker group '{group_name}' is not registered. Launch it before others route to it, "
            "and use the name it was launched with."
        )
    return info.group_world_size


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
    """`build_route_channel_key` of a shard that a rank sends to another rank."""
    return build_route_channel_key(
        src_group_name, dst_group_name, src_rank, dst_rank, tag, route_key
    )


def build_channel_message(send_rank: int, batch_idx: int, mode: str, tag: str) -> str:
    """Label of a shard in decoupled mode: ``{send_rank}_{batch_idx}_{mode}_{tag}``."""
    return f"{send_rank}_{batch_idx}_{mode}_{tag}"


def split_channel_message(channel_message: str) -> tuple[int, int, str, str]:
    """Read a shard's label: sending rank, index of the shard, mode and tag."""
    parts = channel_message.split("_", 3)
    if len(parts) < 4 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        raise SchedulerValueError(
            f"'{channel_message}' is not a shard label: expected 'rank_index_mode_tag', for "
            "example '0_1_train_obs'."
        )
    return int(parts[0]), int(parts[1]), parts[2], parts[3]


class CommMapper:
    """The arithmetic of batch routing."""

    @staticmethod
    def get_dst_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int
    ) -> list[tuple[int, int]]:
        """Receivers of one sender: ``(destination rank, number of samples)`` in batch order."""
        _check_divisible(batch_size, src_world_size, dst_world_size)
        return _overlaps(batch_size, "src_rank", src_rank, src_world_size, dst_world_size)

    @staticmethod
    def get_src_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int
    ) -> list[tuple[int, int]]:
        """Senders of one receiver, as `get_dst_ranks`: ``(source rank, number of samples)``."""
        _check_divisible(batch_size, src_world_size, dst_world_size)
        return _overlaps(batch_size, "dst_rank", dst_rank, dst_world_size, src_world_size)

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
        larger group handles one, a rank of the smaller group as many as there are peers per rank,
        or ``queue_size`` at once. ``src_world_size`` is the caller's own group.
        """
        larger = max(src_world_size, dst_world_size)
        if batch_size < 1 or batch_size % larger:
            raise RoutingError(
                f"batch_size ({batch_size}) must be divisible by the larger group ({larger} "
                f"workers). Nearest legal: {_nearest_multiple(batch_size, larger)}."
            )
        share = ceil(dst_world_size / src_world_size)
        serves = src_world_size < dst_world_size
        if serves and queue_size > share:
            raise RoutingError(
                f"queue_size {queue_size} is more than a rank's share of {share} shards "
                f"({dst_world_size} peers over {src_world_size} ranks). Nearest legal: {share}."
            )
        return [batch_size // larger] * (queue_size if serves and queue_size > 0 else share)


def _overlaps(
    batch_size: int, name: str, rank: int, world_size: int, peers: int
) -> list[tuple[int, int]]:
    """Peers whose slices overlap that of ``rank``, with the number of common samples."""
    if not 0 <= rank < world_size:
        nearest = min(max(rank, 0), world_size - 1)
        raise RoutingError(
            f"{name} ({rank}) must be in [0, {world_size}). Nearest legal: {nearest}."
        )
    own, other = batch_size // world_size, batch_size // peers
    begin, end = rank * own, (rank + 1) * own
    return [
        (peer, min(end, (peer + 1) * other) - max(begin, peer * other))
        for peer in range(begin // other, (end - 1) // other + 1)
    ]


def _check_divisible(batch_size: int, src_world_size: int, dst_world_size: int) -> None:
    if src_world_size < 1 or dst_world_size < 1:
        raise RoutingError(
            f"World sizes must be 1 or more, got {src_world_size} and {dst_world_size}."
        )
    for name, size in (("src_world_size", src_world_size), ("dst_world_size", dst_world_size)):
        if batch_size < 1 or batch_size % size:
            nearest = _nearest_multiple(batch_size, lcm(src_world_size, dst_world_size))
            raise RoutingError(
                f"batch_size ({batch_size}) must be positive and divisible by {name} ({size}), so "
                f"that every rank has an equal slice. Nearest legal: {nearest}."
            )


def _nearest_multiple(value: int, step: int) -> int:
    return max(1, round(value / step)) * step
