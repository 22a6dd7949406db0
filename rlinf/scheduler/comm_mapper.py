"""The arithmetic of batch routing: who holds which slice, and where slices overlap."""

from __future__ import annotations

from math import ceil, lcm

from rlinf.scheduler.errors import RoutingError


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
