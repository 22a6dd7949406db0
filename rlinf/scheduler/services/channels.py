"""The queues of channels, hosted at one endpoint."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, try_fail, try_resolve
from rlinf.scheduler.transport.payload import Payload


@dataclass
class _Entry:
    payload: Payload
    weight: int


@dataclass
class _Getter:
    """Someone who waits for one item (``target`` None) or for a batch."""

    ticket: Hashable
    future: Future[Reply]
    target: int | None
    taken: list[_Entry] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(entry.weight for entry in self.taken)


@dataclass
class _Putter:
    ticket: Hashable
    future: Future[Reply]
    entry: _Entry


@dataclass
class _Queue:
    """One key of a channel: items, and who waits to take or to add."""

    maxsize: int
    items: deque[_Entry] = field(default_factory=deque)
    getters: deque[_Getter] = field(default_factory=deque)
    putters: deque[_Putter] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        return 0 < self.maxsize <= len(self.items)

    def settle(self) -> None:
        """Serve those who wait, first come first served, until nothing moves."""
        moved = True
        while moved:
            moved = self._serve_getter()
            while self.putters and not self.full:
                putter = self.putters.popleft()
                if try_resolve(putter.future, Reply()):
                    self.items.append(putter.entry)
                    moved = True

    def _serve_getter(self) -> bool:
        if not self.getters:
            return False
        getter = self.getters[0]
        if getter.future.cancelled():
            self.getters.popleft()
            self.items.extendleft(reversed(getter.taken))
            return True
        taken = len(getter.taken)
        if _fill(getter, self.items):
            self.getters.popleft()
            weights = [entry.weight for entry in getter.taken]
            reply = Reply(weights, [entry.payload for entry in getter.taken])
            if not try_resolve(getter.future, reply):
                self.items.extendleft(reversed(getter.taken))
            return True
        return len(getter.taken) > taken


def _fill(getter: _Getter, items: deque[_Entry]) -> bool:
    """Move what a getter may take; whether it has what it waits for.

    A batch ends when its weight reaches the target, when the next item would exceed it, or when the
    queue is empty and all that was taken weighs nothing: waiting for weight that may never come
    would be a hang.
    """
    if getter.target is None:
        if items:
            getter.taken.append(items.popleft())
        return bool(getter.taken)
    while items:
        if getter.total + items[0].weight > getter.target:
            return True
        getter.taken.append(items.popleft())
        if 0 < getter.target <= getter.total:
            return True
    return bool(getter.taken) and getter.total == 0


@dataclass
class _Channel:
    maxsize: int
    queues: dict[Hashable, _Queue] = field(default_factory=dict)
    closed: str | None = None

    def queue(self, key: Hashable) -> _Queue:
        if self.closed is not None:
            raise SchedulerError(self.closed)
        if key not in self.queues:
            self.queues[key] = _Queue(self.maxsize)
        return self.queues[key]


class ChannelService:
    """Hosts channels at an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._channels: dict[str, _Channel] = {}
        for name in (
            "open", "put", "put_nowait", "get", "get_nowait", "withdraw", "size", "items", "close"
        ):  # fmt: skip
            endpoint.register(f"channel.{name}", getattr(self, f"_{name}"))

    def _find(self, name: str) -> _Channel:
        channel = self._channels.get(name)
        if channel is None:
            raise SchedulerError(f"channel '{name}' is not hosted here; was its cluster restarted?")
        return channel

    def _open(self, name: str, maxsize: int) -> None:
        channel = self._channels.get(name)
        if channel is None or channel.closed is not None:
            self._channels[name] = _Channel(maxsize)

    def _put(
        self, name: str, key: Hashable, weight: int, ticket: Hashable,
        *, payloads: Sequence[Payload],
    ) -> Future[Reply] | None:  # fmt: skip
        queue = self._find(name).queue(key)
        entry = _Entry(payloads[0], weight)
        if not queue.full and not queue.putters:
            queue.items.append(entry)
            if queue.getters:
                queue.settle()
            return None
        putter = _Putter(ticket, Future(), entry)
        queue.putters.append(putter)
        queue.settle()
        return putter.future

    def _put_nowait(
        self, name: str, key: Hashable, weight: int, *, payloads: Sequence[Payload]
    ) -> None:
        queue = self._find(name).queue(key)
        if queue.full:
            raise asyncio.QueueFull(f"channel '{name}' holds its maximum of {queue.maxsize} items")
        queue.items.append(_Entry(payloads[0], weight))
        queue.settle()

    def _get(
        self, name: str, key: Hashable, target: int | None, ticket: Hashable
    ) -> Future[Reply] | Reply:
        queue = self._find(name).queue(key)
        if target is None and queue.items and not queue.getters:
            return self._take(queue)
        getter = _Getter(ticket, Future(), target)
        queue.getters.append(getter)
        queue.settle()
        return getter.future

    def _get_nowait(self, name: str, key: Hashable) -> Reply:
        queue = self._find(name).queue(key)
        if not queue.items:
            raise asyncio.QueueEmpty(f"channel '{name}' has no item under key {key!r}")
        return self._take(queue)

    @staticmethod
    def _take(queue: _Queue) -> Reply:
        """The oldest item of a queue that has one and where nobody waits for it."""
        entry = queue.items.popleft()
        if queue.putters:
            queue.settle()
        return Reply([entry.weight], [entry.payload])

    def _withdraw(self, name: str, key: Hashable, ticket: Hashable) -> bool:
        """Forget a request that waits; False if it was answered already."""
        queue = self._find(name).queue(key)
        for getter in queue.getters:
            if getter.ticket == ticket:
                queue.getters.remove(getter)
                queue.items.extendleft(reversed(getter.taken))
                queue.settle()
                return True
        for putter in queue.putters:
            if putter.ticket == ticket:
                queue.putters.remove(putter)
                return True
        return False

    def _size(self, name: str, key: Hashable) -> tuple[int, int]:
        channel = self._find(name)
        queue = channel.queues.get(key)
        return (len(queue.items) if queue else 0), channel.maxsize

    def _items(self, name: str, key: Hashable) -> Reply:
        queue = self._find(name).queues.get(key)
        entries = list(queue.items) if queue else []
        return Reply([entry.weight for entry in entries], [entry.payload for entry in entries])

    def _close(self, name: str, reason: str | None) -> None:
        channel = self._find(name)
        channel.closed = reason or f"channel '{name}' was closed"
        for queue in channel.queues.values():
            futures = [g.future for g in queue.getters] + [p.future for p in queue.putters]
            for future in futures:
                try_fail(future, SchedulerError(channel.closed))
        channel.queues.clear()
