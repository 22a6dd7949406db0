"""Batches that are cut and merged between groups of different sizes.

The batch functions import torch, so they are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.compat.routing import (
    DecoupledRouteEntry,
    build_recv_plan,
    build_send_plan,
    decoupled_build_recv_plan,
    decoupled_build_send_plan,
    get_group_world_size,
    split_channel_message,
)
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.process import AsyncWork, finished_work

if TYPE_CHECKING:
    from rlinf.scheduler.channel import Channel

_Merge = Callable[[list[Any]], Any]


class RoutedMessaging:
    """Batch-sharded routing between the workers of two groups.

    Both directions take the other group's name; a ``channel`` that carries the shards, unless
    ``enable_p2p`` sends them directly; ``tag``, the kind of message, and ``route_key``, the stream
    of such messages where several run at once; and ``async_op`` to return a handle at once.
    In ``decoupled_mode`` any worker of the other group takes a shard, ``queue_size`` at once.
    """

    _group_name: str
    _rank: int
    _world_size: int
    manager_proxy: Any
    send: Any
    recv: Any

    def send_to(  # noqa: PLR0917 - the published signature
        self,
        group_name: str,
        channel: Channel | None = None,
        data: Any = None,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        decoupled_mode: bool = False,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        batch_router: list[str] | None = None,
        queue_size: int = 0,
    ) -> AsyncWork | None:
        """Send this worker's slice of a batch to the workers of another group that need it.

        ``data`` is nested tensors, arrays, lists and dicts, or what ``split_fn`` can cut into
        shards of given sizes and ``infer_batch_size_fn`` can count. ``batch_size`` counts the
        samples of all senders. Decoupled, ``mode`` is the phase in a shard's label, such as
        ``train``, and ``batch_router`` are the labels, from `recv_from`, that ``data`` answers.

        Raises:
            RoutingError: The batch is not divisible by both group sizes.
        """
        from rlinf.scheduler.compat.batches import get_batch_size, split_batch

        if batch_size is None:
            batch_size = get_batch_size(data, infer_batch_size_fn) * self._world_size
        peers = get_group_world_size(self.manager_proxy, group_name)
        if decoupled_mode:
            plan = decoupled_build_send_plan(
                src_group_name=self._group_name,
                dst_group_name=group_name,
                src_rank=self._rank,
                src_world_size=self._world_size,
                dst_world_size=peers,
                tag=tag,
                route_key=route_key,
                batch_size=batch_size,
                mode=mode,
                tag_batch_router=batch_router,
                send_queue_size=queue_size,
            )
        else:
            plan = build_send_plan(
                self._group_name, group_name, self._rank, self._world_size, peers,
                tag, route_key, batch_size,
            )  # fmt: skip
        shards = (split_fn or split_batch)(data, [entry.batch_size for entry in plan.entries])
        works = [
            self.__send_shard(group_name, channel, entry, shard, enable_p2p)
            for entry, shard in zip(plan.entries, shards, strict=True)
        ]
        sent: AsyncWork | None = _together(works, lambda _: None, async_op)
        return sent

    def recv_from(  # noqa: PLR0917 - the published signature
        self,
        group_name: str,
        channel: Channel | None = None,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: _Merge | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        decoupled_mode: bool = False,
        own_shards: bool = False,
        queue_size: int = 0,
    ) -> Any:
        """Receive this worker's slice of a batch from the workers of another group.

        ``batch_size`` counts the samples of all senders; None checks no sizes. ``mode`` is not
        used: the label of a decoupled shard carries it. Decoupled, ``own_shards`` takes the answers
        to the shards that this worker sent, put back in order, instead of shards of anyone.

        Returns:
            The merged batch. In decoupled mode ``(batch, labels)``; hand the labels to `send_to`
            with the answer. With ``own_shards`` the batch alone.
        """
        from rlinf.scheduler.compat.batches import merge_batches, validate_batch_size

        peers = get_group_world_size(self.manager_proxy, group_name)
        if decoupled_mode:
            if batch_size is None:
                raise SchedulerUsageError("recv_from in decoupled mode needs batch_size")
            plan = decoupled_build_recv_plan(
                src_group_name=group_name,
                dst_group_name=self._group_name,
                recv_rank=self._rank if own_shards else None,
                src_world_size=self._world_size,
                dst_world_size=peers,
                tag=tag,
                route_key=route_key,
                batch_size=batch_size,
                recv_queue_size=queue_size,
            )
        else:
            plan = build_recv_plan(
                group_name, self._group_name, self._rank, peers, self._world_size,
                tag, route_key, batch_size,
            )  # fmt: skip
        works = [self.__receive_shard(group_name, channel, e, enable_p2p) for e in plan.entries]
        merge = merge_fn or merge_batches

        def finish(received: list[Any]) -> Any:
            if decoupled_mode:
                return _merge_labelled(received, merge, own_shards)
            for entry, shard in zip(plan.entries, received, strict=True):
                validate_batch_size(shard, entry.batch_size, infer_batch_size_fn)
            return merge(received)

        return _together(works, finish, async_op)

    def __send_shard(
        self, group_name: str, channel: Channel | None, entry: Any, shard: Any, direct: bool
    ) -> AsyncWork:
        labelled = isinstance(entry, DecoupledRouteEntry)
        if direct:
            if labelled:
                raise SchedulerUsageError("decoupled shards have no fixed peer: use a channel")
            work: AsyncWork = self.send(shard, group_name, entry.peer_rank, async_op=True)
            return work
        item = (entry.batch_index, shard) if labelled else shard
        return _required(channel).put(item, key=entry.key, async_op=True)  # type: ignore[return-value]

    def __receive_shard(
        self, group_name: str, channel: Channel | None, entry: Any, direct: bool
    ) -> AsyncWork:
        work: AsyncWork
        if direct:
            work = self.recv(group_name, entry.peer_rank, async_op=True)
        else:
            work = _required(channel).get(key=entry.key, async_op=True)
        return work


def _required(channel: Channel | None) -> Channel:
    if channel is None:
        raise SchedulerUsageError("give a channel, or enable_p2p=True to send directly")
    return channel


def _together(works: list[AsyncWork], finish: Callable[[list[Any]], Any], async_op: bool) -> Any:
    if not async_op:
        return finish([work.wait() for work in works])
    if not works:
        return finished_work(finish([]), "nothing")
    # The last shard's handle goes first; the others are usually there by then.
    return works[-1].then(lambda: finish([work.wait() for work in works]))


def _merge_labelled(received: list[Any], merge: _Merge, own_shards: bool) -> Any:
    if own_shards:
        received = sorted(received, key=lambda pair: split_channel_message(pair[0])[1])
    batch = merge([shard for _, shard in received])
    return batch if own_shards else (batch, [label for label, _ in received])
