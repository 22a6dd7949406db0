"""Streams: how a stage sees its inputs and names its outputs, and the channels that carry them.

A stage method is a generator. It iterates over :class:`InputStream` objects and yields
:class:`Emit`; whether the items come from the same thread, another process or another machine is
not visible to it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlinf.errors import RLinfError
from rlinf.flow.graph import Edge, Flow, Route, Stage
from rlinf.flow.plan import Plan
from rlinf.monitor.timeline import Timeline
from rlinf.scheduler import Channel
from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.worker_group import WorkerGroup

_ANSWER_SECONDS = 0.0005
"""In which a channel of another process gives an item that it has. Who asks for one and does not
wait so long sees one item at a time, however many there are. One of this process gives it at once,
and to wait for one that it has not would cost as much at every exchange."""


class NextItem:
    """Looks whether a channel has an item, without waiting for one, and without losing it.

    The channel is for this reader alone; without a ``queue`` it is that of messages that name none.
    """

    def __init__(self, channel: Channel, queue: int | None = None) -> None:
        self._channel = channel
        self._queue: dict[str, Any] = {} if queue is None else {"key": queue}
        self._asked: Any = None

    def arrived(self, within: float = 0.0) -> bool:
        """Whether :meth:`take` will not block, after so many seconds at most."""
        if self._asked is None:
            self._asked = self._channel.get(**self._queue, async_op=True)
            if not self._channel.is_here(**self._queue):
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
    """One item that a stage yields to an edge; it carries what a channel can.

    ``source`` is the number of the sub-batch that the item belongs to; items of one source keep
    their order and always reach the same worker.
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


def _checked(item: Item, edge: str) -> Item:
    if item.aborted is not None:
        raise StepAborted(f"edge '{edge}' was closed: {item.aborted}")
    return item


def _owner(source: int, sources: int, consumers: int) -> int:
    """The consumer of an edge to which the items of a source go."""
    return source * consumers // sources


@dataclass(frozen=True)
class InputPort:
    """Where one worker reads an edge: its own channel, a queue per step, so many to close it."""

    edge: str
    channel: Channel
    producers: int
    queue: int = 0

    def pending(self) -> list[Item]:
        """All items of a stream whose producers have ended, left where they are."""
        items: list[Item] = []
        still_open = self.producers
        while still_open:
            items.append(_checked(self.channel.get(self.queue), self.edge))
            still_open -= items[-1].end
        for item in items:
            self.channel.post(item, key=self.queue)
        return [item for item in items if not item.end]

    def refill(self, items: list[Item], step: int) -> None:
        """Put back what :meth:`pending` gave, and close the stream."""
        for item in [*items, *[Item(step, source=-1, end=True)] * self.producers]:
            self.channel.post(item, key=self.queue)


@dataclass(frozen=True)
class OutputPort:
    """Where a worker writes an edge: one channel per worker of the consuming stage.

    ``shard`` sends an item to the consumer that owns its source, of so many ``sources``,
    ``replicate`` to all.
    """

    edge: str
    channels: tuple[Channel, ...]
    route: Route
    sources: int
    queue: int = 0

    def put(self, item: Item) -> None:
        """Hand an item over."""
        targets = self.channels
        if not item.end and self.route == "shard":
            targets = (targets[_owner(item.source, self.sources, len(targets))],)
        for channel in targets:
            # The end of the stream, or its abort, tells the reader whatever an answer could.
            channel.post(item, key=self.queue)


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
        item = None
        date, begin = time.time_ns(), time.perf_counter_ns()
        while item is None and self._open:
            item = self._take()
        # One reading for both, so that the timeline explains the metrics, and of the clock that
        # nobody sets: it is taken off the time of the stage, which is measured by the same.
        waited = time.perf_counter_ns() - begin
        self._timeline.record(f"wait {self._port.edge}", date, date + waited, category="wait")
        self.seconds_waiting += waited / 1e9
        if item is None:
            raise StopIteration
        self.items += 1
        return item

    def ready(self, within: float = 0.0) -> bool:
        """Whether the next item has arrived, so that taking it will not block.

        ``within`` are the seconds to wait for it.
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
        edge = self._port.edge
        item = _checked(self._next.take(), edge)
        if item.step != self._step:
            raise RuntimeError(
                f"edge '{edge}' delivered an item of step {item.step} in step {self._step}"
            )
        self._open -= item.end
        return None if item.end else item


class Ports:
    """The channels of a flow: one per edge and consuming worker, who hosts it.

    An item thus travels once, and taking it is no message. Steps that are under way together, at
    most ``depth``, have a queue each in every channel, so that items of one are never taken for
    those of another. ``sources`` is how many sub-batches the items are numbered by.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        groups: Mapping[str, WorkerGroup],
        *,
        sources: int,
        depth: int,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._sources = sources
        self._depth = depth
        self._edges = {edge.name: edge for edge in flow.edges()}
        run = uuid.uuid4().hex[:8]
        self._channels = {
            name: tuple(
                Channel.create(
                    f"{flow.name}-{run}/{name}/{rank}",
                    host=f"{groups[edge.consumer.component].worker_group_name}:{rank}",
                )
                for rank in range(self._processes(edge.consumer))
            )
            for name, edge in self._edges.items()
        }

    def _processes(self, stage: Stage) -> int:
        return self._plan.components[stage.component].processes

    def abort(self, reason: str) -> None:
        """Put an item into every queue that makes its reader stop; waits for no reader."""
        for channels in self._channels.values():
            for channel in channels:
                for queue in range(self._depth):
                    with suppress(SchedulerError):  # a reader that is gone waits for nothing
                        # One that is stopped gives no answer, and the others are to hear now.
                        channel.post(Item(-1, source=-1, aborted=reason), key=queue)

    def inputs(self, stage: Stage, rank: int, step: int) -> tuple[InputPort, ...]:
        """Where a worker reads in a step."""
        return tuple(self._input(self._edges[name], rank, step) for name in stage.inputs)

    def _input(self, edge: Edge, rank: int, step: int) -> InputPort:
        channel, producers = self._channels[edge.name][rank], self._processes(edge.producer)
        return InputPort(edge.name, channel, producers, queue=step % self._depth)

    def outputs(self, stage: Stage, step: int) -> tuple[OutputPort, ...]:
        """Where the workers of a stage write in a step."""
        queue, sources = step % self._depth, self._sources
        return tuple(
            OutputPort(name, self._channels[name], self._edges[name].route, sources, queue)
            for name in stage.outputs
        )

    def pending(self, step: int, begun: Collection[str]) -> dict[str, list[Item]]:
        """Items that the ``begun`` stages, which have ended, left for the others; they stay."""
        found = {}
        for edge, group, ports in self._crossing(step, begun):
            by_rank = group.pending_items(ports).wait()
            kept = by_rank[:1] if edge.route == "replicate" else by_rank
            found[edge.name] = [item for items in kept for item in items]
        return found

    def refill(self, step: int, begun: Collection[str], items: Mapping[str, list[Item]]) -> None:
        """Put back what :meth:`pending` gave."""
        for edge, group, ports in self._crossing(step, begun):
            shares: list[list[Item]] = [[] for _ in ports]
            for item in items[edge.name]:
                owner = _owner(item.source, self._sources, len(ports))
                for share in shares if edge.route == "replicate" else [shares[owner]]:
                    share.append(item)
            group.refill(ports, shares, step).wait()

    def _crossing(
        self, step: int, begun: Collection[str]
    ) -> Iterator[tuple[Edge, WorkerGroup, list[InputPort]]]:
        """Edges from stages that have begun to others, with who reads them, and where."""
        for edge in self._edges.values():
            if edge.producer.label in begun and edge.consumer.label not in begun:
                ranks = range(self._processes(edge.consumer))
                ports = [self._input(edge, rank, step) for rank in ranks]
                yield edge, self._groups[edge.consumer.component], ports
