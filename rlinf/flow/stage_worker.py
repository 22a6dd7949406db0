"""The worker side of a flow: run one stage method over streams and report what it took."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from rlinf.flow.stream import Emit, InputPort, InputStream, Item, OutputPort
from rlinf.monitor.timeline import Timeline
from rlinf.scheduler import Worker


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
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageReport:
    """What a stage did on one worker.

    Args:
        result: Return value of the stage's generator.
        seconds: Wall time of the stage.
        seconds_waiting: Part of it spent waiting for input.
        items_in: Items consumed.
        items_out: Items yielded.
        events: Timeline events, where a timeline was asked for.
    """

    result: Any
    seconds: float
    seconds_waiting: float
    items_in: int
    items_out: int
    events: list[dict[str, Any]]


class StageWorker(Worker):
    """A worker whose public generator methods can be stages of a flow."""

    def onload(self) -> None:
        """Bring state to the device; called before a stage of an offloaded component."""

    def offload(self) -> None:
        """Free the device; called after a stage of an offloaded component."""

    def run_stage(self, calls: list[StageCall]) -> StageReport:
        """Run one stage of a step.

        Args:
            calls: One call per rank of the group; this worker runs its own.
        """
        call = calls[self._rank]
        timeline = Timeline(enabled=call.timeline)
        begin = time.perf_counter()
        if call.offload:
            with timeline.span("onload", category="residency"):
                self.onload()
        streams = [InputStream(port, call.step) for port in call.inputs]
        with timeline.span(f"{call.node}.{call.method}", category="stage", step=call.step):
            result, items_out = self._pump(call, streams, timeline)
        if call.offload:
            with timeline.span("offload", category="residency"):
                self.offload()
        return StageReport(
            result=result,
            seconds=time.perf_counter() - begin,
            seconds_waiting=sum(stream.seconds_waiting for stream in streams),
            items_in=sum(stream.items for stream in streams),
            items_out=items_out,
            events=timeline.drain(),
        )

    def _pump(
        self, call: StageCall, streams: list[InputStream], timeline: Timeline
    ) -> tuple[Any, int]:
        """Drive the stage's generator and hand over what it yields."""
        ports = {port.edge: port for port in call.outputs}
        generator: Generator[Emit, None, Any] = getattr(self, call.method)(
            *streams, **call.arguments
        )
        count = 0
        while True:
            try:
                emitted = next(generator)
            except StopIteration as stop:
                result = stop.value
                break
            with timeline.span(f"put {emitted.edge}", category="transfer"):
                ports[emitted.edge].put(Item(call.step, emitted.source, emitted.payload))
            count += 1
        for port in ports.values():
            port.put(Item(call.step, source=-1, end=True))
        for stream in streams:
            stream.drain()
        return result, count
