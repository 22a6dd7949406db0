"""Streams: how a stage sees its inputs and names its outputs.

A stage method is a generator. It iterates over :class:`InputStream` objects and yields
:class:`Emit`; whether the items come from the same thread, another process or another machine is
not visible to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlinf.errors import RLinfError
from rlinf.flow.graph import Route
from rlinf.monitor.timeline import Timeline
from rlinf.scheduler import Channel

_ANSWER_SECONDS = 0.0005
"""In which a channel of this process gives an item that it has. Who asks for one and does not wait
so long sees one item at a time, however many there are."""


class NextItem:
    """Looks whether a channel has an item, without waiting for one, and without losing it.

    Args:
        channel: Where items arrive, for this reader alone.
        queue: Of the channel; None: the one of messages that name none.
    """

    def __init__(self, channel: Channel, queue: int | None = None) -> None:
        self._channel = channel
        self._queue: dict[str, Any] = {} if queue is None else {"key": queue}
        self._asked: Any = None

    def arrived(self, within: float = 0.0) -> bool:
        """Whether :meth:`take` will not block.

        Args:
            within: Seconds to wait for the item.
        """
        if self._asked is None:
            self._asked = self._channel.get(**self._queue, async_op=True)
            within = max(within, _ANSWER_SECONDS)
        return bool(self._asked.done_within(within))

    def take(self) -> Any:
        """The item, waited for."""
        if self._asked is None:
            return self._channel.get(**self._queue)
        item, self._asked = self._asked.wait(), None
        return item

    def take_all(self) -> list[Any]:
        """All items that have arrived."""
        found = []
        while self.arrived():
            found.append(self.take())
        return found


@dataclass(frozen=True)
class Emit:
    """One item that a stage yields.

    Args:
        edge: Output edge of the stage.
        source: Number of the sub-batch that the item belongs to; items of one source keep their
            order and always reach the same worker.
        payload: Anything that a channel carries.
    """

    edge: str
    source: int
    payload: Any


@dataclass(frozen=True)
class Item:
    """One item as it travels.

    ``end`` closes the stream of one producer; ``aborted`` tells why the step cannot go on.
    """

    step: int
    source: int
    payload: Any = None
    end: bool = False
    aborted: str | None = None


class StepAborted(RLinfError):  # noqa: N818 - the consequence of a failure elsewhere, not the failure
    """Another worker failed, so the items that this stage waits for will not come."""


@dataclass(frozen=True)
class InputPort:
    """Where one worker reads an edge.

    Args:
        edge: Name of the edge.
        channel: The worker's own channel.
        producers: How many close it.
        queue: Which queue of the channel belongs to the step.
    """

    edge: str
    channel: Channel
    producers: int
    queue: int = 0

    def pending(self) -> list[Item]:
        """All items of a stream whose producers have ended, left where they are."""
        items: list[Item] = []
        still_open = self.producers
        while still_open:
            item: Item = self.channel.get(self.queue)
            if item.aborted is not None:
                raise StepAborted(f"edge '{self.edge}' was closed: {item.aborted}")
            still_open -= item.end
            items.append(item)
        for item in items:
            self.channel.post(item, key=self.queue)
        return [item for item in items if not item.end]

    def refill(self, items: list[Item], step: int) -> None:
        """Put back what :meth:`pending` gave, and close the stream."""
        for item in [*items, *[Item(step, source=-1, end=True)] * self.producers]:
            self.channel.post(item, key=self.queue)


@dataclass(frozen=True)
class OutputPort:
    """Where a worker writes an edge: one channel per consumer.

    Args:
        edge: Name of the edge.
        channels: One per worker of the consuming stage.
        route: ``shard`` sends an item to the consumer that owns its source, ``replicate`` to all.
        sources: How many sources there are, for ``shard``.
        queue: Which queue of the channels belongs to the step.
    """

    edge: str
    channels: tuple[Channel, ...]
    route: Route
    sources: int
    queue: int = 0

    def put(self, item: Item) -> None:
        """Hand an item over."""
        for channel in self._targets(item):
            # The end of the stream, or its abort, tells the reader whatever an answer could.
            channel.post(item, key=self.queue)

    def _targets(self, item: Item) -> tuple[Channel, ...]:
        if item.end or self.route == "replicate":
            return self.channels
        return (self.channels[item.source * len(self.channels) // self.sources],)


class InputStream:
    """The items of one edge, for one worker and one step.

    Iterating blocks until an item arrives and stops when every producer has closed the edge.
    """

    def __init__(self, port: InputPort, step: int, timeline: Timeline | None = None) -> None:
        self._port = port
        self._step = step
        self._timeline = timeline or Timeline(enabled=False)
        self._open = port.producers
        self._next = NextItem(port.channel, port.queue)
        self._arrived: list[Item] = []
        self.seconds_waiting = 0.0
        self.items = 0

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._arrived:
            return self._arrived.pop()
        begin = time.perf_counter()
        with self._timeline.span(f"wait {self._port.edge}", category="wait"):
            item = self._take_next()
        self.seconds_waiting += time.perf_counter() - begin
        if item is None:
            raise StopIteration
        self.items += 1
        return item

    def _take_next(self) -> Item | None:
        """The next item, or None where every producer has closed the edge."""
        while self._open:
            item = self._take()
            if item is not None:
                return item
        return None

    def ready(self, within: float = 0.0) -> bool:
        """Whether the next item has arrived, so that taking it will not block.

        Args:
            within: Seconds to wait for it.
        """
        while not self._arrived and self._open:
            if not self._next.arrived(within):
                return False
            item = self._take()
            if item is not None:
                self.items += 1
                self._arrived.append(item)
        return bool(self._arrived)

    def drain(self) -> None:
        """Read to the end, so that nothing is left for the next step."""
        self._arrived.clear()
        for _ in self:
            pass

    def _take(self) -> Item | None:
        """The next item, or None where a producer closed its side."""
        item: Item = self._next.take()
        if item.aborted is not None:
            raise StepAborted(f"edge '{self._port.edge}' was closed: {item.aborted}")
        if item.step != self._step:
            raise RuntimeError(
                f"edge '{self._port.edge}' delivered an item of step {item.step} in step "
                f"{self._step}"
            )
        if item.end:
            self._open -= 1
            return None
        return item
