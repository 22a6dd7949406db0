"""The queues of channels, hosted at one endpoint."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, claim, try_fail, try_resolve
from rlinf.scheduler.transport.payload import Payload

_MOST_KEYS = 1024


class Ticket(NamedTuple):
    """One request that may wait: whose it is, the number of its process in the headers of blocks,
    and a number of that process's own."""

    worker: str
    process: int
    number: int


@dataclass
class _Entry:
    payload: Payload
    weight: int


@dataclass
class _Getter:
    """Someone who waits for one item (``target`` None) or for a batch."""

    ticket: Ticket
    target: int | None
    future: Future[Reply] = field(default_factory=Future)
    taken: list[_Entry] = field(default_factory=list)
    weight: int = 0  # of what is taken

    def fill(self, items: deque[_Entry]) -> bool:
        """Take what it may; whether it has what it waits for.

        A batch ends when its weight reaches the target, when the next item would exceed it, or when
        the queue is empty and all that was taken weighs nothing: waiting for weight that may never
        come would be a hang.
        """
        if self.target is None:
            if items:
                self.taken.append(items.popleft())
            return bool(self.taken)
        while items:
            weight = self.weight + items[0].weight
            if weight > self.target:
                return True
            self.weight = weight
            self.taken.append(items.popleft())
            if 0 < self.target <= weight:
                return True
        return bool(self.taken) and self.weight == 0


_Give = Callable[[Sequence[_Entry], Ticket], Reply]


@dataclass
class _Putter:
    ticket: Ticket | None
    entry: _Entry
    future: Future[Reply] = field(default_factory=Future)


@dataclass
class _Queue:
    """One key of a channel: items, and who waits to take or to add."""

    maxsize: int
    give: _Give
    items: deque[_Entry] = field(default_factory=deque)
    getters: deque[_Getter] = field(default_factory=deque)
    putters: deque[_Putter] = field(default_factory=deque)

    @property
    def used(self) -> bool:
        return bool(self.items or self.getters or self.putters)

    @property
    def full(self) -> bool:
        return 0 < self.maxsize <= len(self.items)

    def settle(self) -> None:
        """Serve those who wait, first come first served, until nothing moves."""
        moved = True
        while moved:
            moved = bool(self.getters) and self._serve(self.getters[0])
            while self.putters and not self.full:
                putter = self.putters.popleft()
                if try_resolve(putter.future, Reply()):
                    self.items.append(putter.entry)
                    moved = True

    def _serve(self, getter: _Getter) -> bool:
        """Give the first getter what it may take; whether anything changed."""
        before = len(getter.taken)
        cancelled = getter.future.cancelled()
        if not cancelled and not getter.fill(self.items):
            return len(getter.taken) > before
        self.getters.popleft()
        if cancelled or not claim(getter.future):
            self.items.extendleft(reversed(getter.taken))
        else:
            getter.future.set_result(self.give(getter.taken, getter.ticket))
        return True

    def withdraw(self, getter: _Getter) -> None:
        """Forget one who waits, whose answer is empty then, and give what it has taken to the
        others."""
        self.getters.remove(getter)
        try_resolve(getter.future, Reply())
        self.items.extendleft(reversed(getter.taken))
        self.settle()

    def take(self, ticket: Ticket) -> Reply:
        """The oldest item, where there is one and nobody waits for it."""
        entry = self.items.popleft()
        if self.putters:
            self.settle()
        return self.give([entry], ticket)


def _reply(entries: Sequence[_Entry]) -> Reply:
    return Reply([entry.weight for entry in entries], [entry.payload for entry in entries])


@dataclass
class _Channel:
    maxsize: int
    give: _Give
    queues: dict[Hashable, _Queue] = field(default_factory=dict)
    closed: Callable[[], SchedulerError] | None = None
    most_keys: int = _MOST_KEYS
    """At so many, those that nothing is in are forgotten."""

    def queue(self, key: Hashable) -> _Queue:
        if self.closed is not None:
            raise self.closed()
        if key not in self.queues:
            if len(self.queues) >= self.most_keys:
                used = {name: queue for name, queue in self.queues.items() if queue.used}
                self.queues, self.most_keys = used, max(_MOST_KEYS, 2 * len(used))
            self.queues[key] = _Queue(self.maxsize, self.give)
        return self.queues[key]


class ChannelService:
    """Hosts channels at an endpoint; ``check_alive`` raises for a worker that died."""

    def __init__(self, endpoint: Endpoint, check_alive: Callable[[str], None]) -> None:
        self._check_alive = check_alive
        self.discard: Callable[[Payload], object] = lambda payload: None
        self.hand_over: Callable[[Payload, int | None], object] = lambda payload, number: None
        self._channels: dict[str, _Channel] = {}
        for name in (
            "open", "put", "put_nowait", "get", "get_nowait", "withdraw", "restore", "size",
            "items", "close",
        ):  # fmt: skip
            endpoint.register(f"channel.{name}", getattr(self, f"_{name}"))

    def remove_getters(self, worker: str, error: Exception) -> None:
        """Give a worker that died no more items: what it took of a batch goes back.

        What it wanted to put still comes.
        """
        for channel in self._channels.values():
            for queue in channel.queues.values():
                for getter in [g for g in queue.getters if g.ticket.worker == worker]:
                    try_fail(getter.future, error)
                    queue.withdraw(getter)

    def _find(self, name: str) -> _Channel:
        channel = self._channels.get(name)
        if channel is None:
            raise SchedulerError(f"channel '{name}' is not hosted here; was its cluster restarted?")
        return channel

    def _open(self, name: str, maxsize: int) -> None:
        channel = self._channels.get(name)
        if channel is None or channel.closed is not None:
            self._channels[name] = _Channel(maxsize, self._give)

    def _give(self, entries: Sequence[_Entry], ticket: Ticket) -> Reply:
        """Items for a request, in whose process they are from now on, looked at or not."""
        for entry in entries:
            self.hand_over(entry.payload, ticket.process)
        return _reply(entries)

    def _put(
        self, name: str, key: Hashable, weight: int, ticket: Ticket | None,
        *, payloads: Sequence[Payload],
    ) -> Future[Reply] | None:  # fmt: skip
        queue = self._find(name).queue(key)
        entry = _Entry(payloads[0], weight)
        if not queue.full and not queue.putters:
            queue.items.append(entry)
            if queue.getters:
                queue.settle()
            return None
        putter = _Putter(ticket, entry)
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
        self, name: str, key: Hashable, target: int | None, ticket: Ticket
    ) -> Future[Reply] | Reply:
        # What a worker sent may arrive after the news of its end, and would take an item with it.
        self._check_alive(ticket.worker)
        queue = self._find(name).queue(key)
        if target is None and queue.items and not queue.getters:
            return queue.take(ticket)
        getter = _Getter(ticket, target)
        queue.getters.append(getter)
        queue.settle()
        return getter.future

    def _get_nowait(self, name: str, key: Hashable, ticket: Ticket) -> Reply:
        self._check_alive(ticket.worker)
        queue = self._find(name).queue(key)
        if not queue.items:
            raise asyncio.QueueEmpty(f"channel '{name}' has no item under key {key!r}")
        return queue.take(ticket)

    def _withdraw(self, name: str, key: Hashable, ticket: Ticket) -> bool:
        """Forget a request that waits, and answer it; False if it was answered already."""
        queue = self._find(name).queue(key)
        for getter in queue.getters:
            if getter.ticket == ticket:
                queue.withdraw(getter)
                return True
        withdrawn = [putter for putter in queue.putters if putter.ticket == ticket]
        queue.putters = deque(putter for putter in queue.putters if putter.ticket != ticket)
        for putter in withdrawn:
            try_resolve(putter.future, Reply())
            self.discard(putter.entry.payload)
        return bool(withdrawn)

    def _restore(
        self, name: str, key: Hashable, weights: Sequence[int], *, payloads: Sequence[Payload]
    ) -> None:
        """Put items back, before all others, that were given to a request of nobody.

        They were here before: the maximal size does not count. Of a channel that was closed they
        go the way of its other items.
        """
        entries = [
            _Entry(payload, weight) for payload, weight in zip(payloads, weights, strict=True)
        ]
        try:
            queue = self._find(name).queue(key)
        except SchedulerError:
            for entry in entries:
                self.discard(entry.payload)
            raise
        for payload in payloads:
            self.hand_over(payload, None)
        queue.items.extendleft(reversed(entries))
        queue.settle()

    def _size(self, name: str, key: Hashable) -> tuple[int, int]:
        channel = self._find(name)
        queue = channel.queues.get(key)
        return (len(queue.items) if queue else 0), channel.maxsize

    def _items(self, name: str, key: Hashable) -> Reply:
        queue = self._find(name).queues.get(key)
        return _reply(queue.items if queue else ())

    def _close(
        self, name: str, reason: str | None, kind: type[SchedulerError] = SchedulerError
    ) -> None:
        channel = self._find(name)
        channel.closed = partial(kind, reason or f"channel '{name}' was closed")
        for queue in channel.queues.values():
            waiting = [getter.future for getter in queue.getters]
            for future in waiting + [putter.future for putter in queue.putters]:
                try_fail(future, channel.closed())
            entries = [*queue.items, *(putter.entry for putter in queue.putters)]
            for entry in entries + [entry for getter in queue.getters for entry in getter.taken]:
                self.discard(entry.payload)
        channel.queues.clear()
