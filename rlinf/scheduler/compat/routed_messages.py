"""Batches that are cut and merged between groups of different sizes.

The batch functions import torch, so they are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.compat.routing import (
    DecoupledRouteEntry,
    RoutePlan,
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
    from rlinf.scheduler.accelerators import CollectiveGroupOptions
    from rlinf.scheduler.channel import Channel

_Merge = Callable[[list[Any]], Any]
_Direct = tuple[bool, "CollectiveGroupOptions | None"]
_LABEL, _SHARD = "batch_index", "batch"


class RoutedMessaging:
    """Batch-sharded routing between the workers of two groups.

    Both directions take the other group's name; a ``channel`` that carries the shards, unless
    ``enable_p2p`` sends them directly; ``tag``, the kind of message, and ``route_key``, the stream
    of such messages where several run at once; and ``async_op`` to return a handle at once.
    Of accelerator tensors that are sent directly ``options`` say how the pair sets itself up.

    In ``decoupled_mode`` any worker of the other group takes a shard, of which a queue size says
    how many at once. Then a worker must have ``batch_router``, a dictionary with an empty list for
    each tag whose shards it answers: what it takes is noted there, and the next batch that it sends
    with that tag goes back to where those came from. Of other tags it sends shards, and takes the
    answers.
    """

    batch_router: MutableMapping[Any, list[str]]
    _group_name: str
    _rank: int
    _world_size: int
    manager_proxy: Any
    send: Any
    recv: Any

    def send_to(
        self,
        group_name: str,
        channel: Channel | None = None,
        data: Any = None,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: CollectiveGroupOptions | None = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> AsyncWork | None:
        """Send this worker's slice of a batch to the workers of another group that need it.

        ``data`` is nested tensors, arrays, lists and dicts, or what ``split_fn`` can cut into
        shards of given sizes and ``infer_batch_size_fn`` can count. ``batch_size`` counts the
        samples of all senders. ``mode`` is the phase, such as ``train``: the receiver names the tag
        ``{mode}_{tag}``; decoupled, it is in the label of a shard.

        Raises:
            RoutingError: The batch is not divisible by both group sizes.
        """
        from rlinf.scheduler.compat.batches import get_batch_size, split_batch

        if batch_size is None:
            batch_size = get_batch_size(data, infer_batch_size_fn) * self._world_size
        peers = get_group_world_size(self.manager_proxy, group_name)
        if decoupled_mode:
            plan = self.__decoupled_plan(
                group_name, peers, tag, batch_size,
                route_key=route_key, mode=mode, send_queue_size=send_queue_size,
            )  # fmt: skip
        else:
            plan = build_send_plan(
                self._group_name, group_name, self._rank, self._world_size, peers,
                tag if mode is None else f"{mode}_{tag}", route_key, batch_size,
            )  # fmt: skip
        shards = (split_fn or split_batch)(data, [entry.batch_size for entry in plan.entries])
        works = [
            self.__send_shard(group_name, channel, entry, shard, (enable_p2p, options))
            for entry, shard in zip(plan.entries, shards, strict=True)
        ]
        sent: AsyncWork | None = _together(works, lambda _: None, async_op)
        return sent

    def recv_from(
        self,
        group_name: str,
        channel: Channel | None = None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: _Merge | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: CollectiveGroupOptions | None = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any:
        """Receive this worker's slice of a batch from the workers of another group.

        ``batch_size`` counts the samples of all senders; None checks no sizes. Decoupled, answers
        to the shards that this worker sent are put back in order.

        Returns:
            The merged batch.
        """
        from rlinf.scheduler.compat.batches import merge_batches, validate_batch_size

        peers = get_group_world_size(self.manager_proxy, group_name)
        if decoupled_mode:
            if batch_size is None:
                raise SchedulerUsageError("recv_from in decoupled mode needs batch_size")
            plan = decoupled_build_recv_plan(
                src_group_name=group_name,
                dst_group_name=self._group_name,
                recv_rank=None if tag in self.__router() else self._rank,
                src_world_size=self._world_size,
                dst_world_size=peers,
                tag=tag,
                route_key=route_key,
                batch_size=batch_size,
                recv_queue_size=recv_queue_size,
            )
        else:
            plan = build_recv_plan(
                group_name, self._group_name, self._rank, peers, self._world_size,
                tag, route_key, batch_size,
            )  # fmt: skip
        direct = (enable_p2p, options)
        works = [self.__receive_shard(group_name, channel, e, direct) for e in plan.entries]
        merge = merge_fn or merge_batches

        def finish(received: list[Any]) -> Any:
            shards = self.__unlabelled(received) if decoupled_mode else received
            for entry, shard in zip(plan.entries, shards, strict=True):
                validate_batch_size(shard, entry.batch_size, infer_batch_size_fn)
            return merge(shards)

        return _together(works, finish, async_op)

    def __decoupled_plan(
        self, group_name: str, peers: int, tag: str | None, batch_size: int, **shards: Any
    ) -> RoutePlan:
        """Answers to the shards that were taken with a tag, which are noted no longer; of a tag
        that this worker does not answer, shards of its own."""
        router = self.__router()
        labels = router.get(tag)
        plan = decoupled_build_send_plan(
            src_group_name=self._group_name,
            dst_group_name=group_name,
            src_rank=self._rank,
            src_world_size=self._world_size,
            dst_world_size=peers,
            tag=tag,
            batch_size=batch_size,
            tag_batch_router=labels,
            **shards,
        )
        if labels is not None:
            router[tag] = []
        return plan

    def __router(self) -> MutableMapping[Any, list[str]]:
        router: MutableMapping[Any, list[str]] | None = getattr(self, "batch_router", None)
        if router is None:
            raise SchedulerUsageError(
                "decoupled mode needs `self.batch_router`: a dictionary, with an empty list for "
                "each tag that this worker answers"
            )
        return router

    def __unlabelled(self, received: list[Any]) -> list[Any]:
        """The shards: noted in the router in the order they came, or, answers, in order."""
        router, labels = self.__router(), [item[_LABEL] for item in received]
        tag = split_channel_message(labels[0])[3]
        if tag in router:
            router[tag].extend(labels)
        else:
            received = sorted(received, key=lambda item: split_channel_message(item[_LABEL])[1])
        return [item[_SHARD] for item in received]

    def __send_shard(
        self, group_name: str, channel: Channel | None, entry: Any, shard: Any, direct: _Direct
    ) -> AsyncWork:
        labelled = isinstance(entry, DecoupledRouteEntry)
        enabled, options = direct
        if enabled:
            if labelled:
                raise SchedulerUsageError("decoupled shards have no fixed peer: use a channel")
            work: AsyncWork = self.send(
                shard, group_name, entry.peer_rank, async_op=True, options=options
            )
            return work
        item = {_LABEL: entry.batch_index, _SHARD: shard} if labelled else shard
        return _required(channel).put(item, key=entry.key, async_op=True)  # type: ignore[return-value]

    def __receive_shard(
        self, group_name: str, channel: Channel | None, entry: Any, direct: _Direct
    ) -> AsyncWork:
        work: AsyncWork
        enabled, options = direct
        if enabled:
            work = self.recv(group_name, entry.peer_rank, async_op=True, options=options)
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
