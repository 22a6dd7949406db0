"""The worker side of a flow: run one stage method over streams and report what it took."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlinf.config.nearest import did_you_mean
from rlinf.errors import RunFailure
from rlinf.flow.stream import Emit, InputPort, InputStream, Item, OutputPort
from rlinf.monitor.memory import Held, MemoryWatch, accelerator_memory
from rlinf.monitor.timeline import Event, Timeline
from rlinf.processes.allocator import keep_freed_memory
from rlinf.scheduler import Worker
from rlinf.scheduler.process import own_device, require_process


@dataclass(frozen=True)
class StageCall:
    """Everything one worker needs to run its part of a stage in one step."""

    node: str
    method: str
    step: int
    inputs: tuple[InputPort, ...]
    outputs: tuple[OutputPort, ...]
    offload: bool
    timeline: bool
    watch_memory: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCost:
    """What a stage cost beside the time of its work.

    Memory is watched where :attr:`StageCall.watch_memory` asks for it; see
    :class:`~rlinf.monitor.memory.MemoryWatch` for what is counted.
    """

    onload_seconds: float = 0.0  # bringing its state to the device
    offload_seconds: float = 0.0  # taking it off again
    transfer_seconds: float = 0.0  # handing over what it yielded
    peak_bytes: int = 0  # most memory that it held
    resident_bytes: int = 0  # what it held when it had ended, before it was offloaded
    closing_seconds: float = 0.0
    """Part of its work that led to the last item of each source: in a loop, what its last pass
    takes, which can be more than the passes before it."""
    handed_over: tuple[float, ...] = ()
    """When the last item of each source was handed over, from the beginning of the stage, in the
    order of the sources."""
    switched: bool = False
    """Whether it was loaded and offloaded at all; if not, these times say nothing."""


@dataclass(frozen=True)
class StageReport:
    """What a stage did on one worker."""

    result: Any  # return value of the stage's generator
    seconds: float  # wall time of the stage
    seconds_waiting: float  # part of it spent waiting for input
    items_in: int
    items_out: int
    events: list[Event]  # where a timeline was asked for
    cost: StageCost = StageCost()

    @property
    def seconds_working(self) -> float:
        """Wall time without waiting for input, loading and offloading."""
        cost = self.cost
        return self.seconds - self.seconds_waiting - cost.onload_seconds - cost.offload_seconds


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker, ``component:rank``, is; its process may be shared with others.

    ``memory`` is that of its devices that have memory of their own [bytes].
    """

    name: str
    pid: int
    devices: tuple[int, ...]
    memory: dict[int, int]


@dataclass
class _Pumped:
    """What a stage yielded."""

    items: int = 0  # how many
    handing_over: float = 0.0  # time to hand them over [s]
    last: dict[int, float] = field(default_factory=dict)
    """Work that led to the last item of each source [s]."""
    when: dict[int, float] = field(default_factory=dict)  # when that item was handed over [s]


class StageWorker(Worker):
    """A worker whose public generator methods can be stages of a flow.

    A run makes it with the run's config and a context, and calls, where the class has them:
    ``start``, which builds what the stages need; ``state`` and ``load_state``, for checkpoints;
    ``close``, at the end.
    """

    records: ClassVar[tuple[type, ...]] = ()
    """Classes of what its stages hand on and report; what is under way is kept in checkpoints."""
    divides_state: ClassVar[bool] = False
    """Whether each rank has a state of its own, so that ``load_state`` takes the list of all;
    otherwise the ranks are equal, and it takes that of rank 0."""
    state_is_optional: ClassVar[bool] = False
    """Whether a checkpoint that holds nothing of it is read; ``load_state`` takes an empty state
    then."""

    def __init__(self) -> None:
        super().__init__()
        keep_freed_memory()

    def place(self) -> WorkerPlace:
        """The process and the devices of this worker."""
        devices = tuple(self.global_accelerator_ids or [self._cluster_node_rank])
        # Workers that are threads of one process see the devices of all.
        shared = require_process().runtime == "local"
        numbers = self.global_accelerator_ids if shared else None
        found = accelerator_memory(self.torch_platform, numbers)
        memory = dict(zip(devices, found, strict=False))
        return WorkerPlace(self._worker_name, os.getpid(), devices, memory)

    @property
    def compute_device(self) -> str:
        """Device string of torch for what this worker computes."""
        return own_device()

    def onload(self) -> None:
        """Bring state to the device; called before a stage of an offloaded component."""

    def offload(self) -> None:
        """Free the device; called after a stage of an offloaded component."""

    def run_stage(self, calls: list[StageCall]) -> StageReport:
        """Run this worker's part of a stage of a step; there is one call per rank of the group."""
        call = calls[self._rank]
        timeline = Timeline(enabled=call.timeline, thread=self._worker_name)
        begin = time.perf_counter()
        if call.offload:
            with timeline.span("onload", category="residency"):
                self.onload()
        loaded = time.perf_counter()
        streams = [InputStream(port, call.step, timeline) for port in call.inputs]
        span = timeline.span(
            f"{call.node}.{call.method}",
            category="stage",
            step=call.step,
            component=self._group_name,
            devices=self.global_accelerator_ids or [self._cluster_node_rank],
        )
        with span, self._memory_watch(call) as memory:
            result, pumped = self._pump(call, streams, timeline)
            held = memory.held() if memory else Held()
        worked = time.perf_counter()
        if call.offload:
            with timeline.span("offload", category="residency"):
                self.offload()
        ended = time.perf_counter()
        return StageReport(
            result=result,
            seconds=ended - begin,
            seconds_waiting=sum(stream.seconds_waiting for stream in streams),
            items_in=sum(stream.items for stream in streams),
            items_out=pumped.items,
            events=timeline.drain(),
            cost=StageCost(
                onload_seconds=loaded - begin,
                offload_seconds=ended - worked,
                transfer_seconds=pumped.handing_over,
                peak_bytes=held.peak,
                resident_bytes=held.resident,
                closing_seconds=sum(pumped.last.values()),
                handed_over=tuple(pumped.when[source] - loaded for source in sorted(pumped.when)),
                switched=call.offload,
            ),
        )

    def _memory_watch(self, call: StageCall) -> AbstractContextManager[MemoryWatch | None]:
        if not call.watch_memory:
            return nullcontext()
        own = require_process().runtime != "local"
        number = self.compute_device.partition(":")[2]
        device = int(number) if number else None
        return MemoryWatch(own_process=own, platform=self.torch_platform, number=device)

    def pending_items(self, ports: list[InputPort]) -> list[Item]:
        """Items that wait for a stage which has not begun; they stay where they are.

        There is one port per rank of the group; their producers have ended.
        """
        return ports[self._rank].pending()

    def refill(self, ports: list[InputPort], items: list[list[Item]], step: int) -> None:
        """Put back what :meth:`pending_items` gave, for each rank."""
        ports[self._rank].refill(items[self._rank], step)

    def _pump(
        self, call: StageCall, streams: list[InputStream], timeline: Timeline
    ) -> tuple[Any, _Pumped]:
        """Drive the stage's generator; returns its result, and what it yielded."""
        ports = {port.edge: port for port in call.outputs}
        stage = f"{type(self).__name__}.{call.method}"
        method = getattr(self, call.method)
        try:
            inspect.signature(method).bind(*streams, **call.arguments)
        except TypeError as error:
            given = [
                *(port.edge for port in call.inputs),
                *(f"{each}=…" for each in call.arguments),
            ]
            called = f"{call.method}({', '.join(given)})"
            raise RunFailure(f"{stage} cannot be called as {called}: {error}") from error
        generator: Any = method(*streams, **call.arguments)
        if not isinstance(generator, Iterator):
            kind = type(generator).__name__
            raise RunFailure(
                f"{stage} returns {kind}, and a stage is a generator: it yields "
                "what it hands over as Emit(edge, source, payload), and returns its report"
            )
        pumped = _Pumped()
        resumed, waited = time.perf_counter(), 0.0
        while True:
            try:
                emitted = next(generator)
            except StopIteration as stop:
                result = stop.value
                break
            if not isinstance(emitted, Emit):
                raise RunFailure(
                    f"{stage} yields {type(emitted).__name__} and no Emit(edge, source, payload)"
                )
            if emitted.edge not in ports:
                known = did_you_mean(emitted.edge, ports)
                raise RunFailure(f"{stage} emits `{emitted.edge}`, no output of its stage; {known}")
            port, source = ports[emitted.edge], emitted.source
            shards = port.route == "shard"  # by the number of the sub-batch
            if shards and not (hasattr(source, "__index__") and 0 <= source < port.sources):
                raise RunFailure(
                    f"{stage} emits an item of sub-batch {source!r}, and they are numbered from 0 "
                    f"to {port.sources - 1}"
                )
            begin, before = time.perf_counter(), waited
            waited = sum(stream.seconds_waiting for stream in streams)
            pumped.last[source] = begin - resumed - (waited - before)
            with timeline.span(f"put {emitted.edge}", category="transfer"):
                port.put(Item(call.step, source, emitted.payload))
            pumped.when[source] = resumed = time.perf_counter()
            pumped.handing_over += resumed - begin
            pumped.items += 1
        for port in ports.values():
            port.put(Item(call.step, source=-1, end=True))
        for stream in streams:
            stream.drain()
        return result, pumped
