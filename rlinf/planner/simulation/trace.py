"""Events of a simulation, in the format of a real run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlinf.flow.graph import Node
from rlinf.flow.plan import Plan
from rlinf.monitor.timeline import Event, Timeline
from rlinf.planner.simulation.node_run import NodeOutcome, stage_of
from rlinf.planner.simulation.results import NodeStep

NANOSECONDS = 1e9


@dataclass(frozen=True)
class _Span:
    """What happened from one time to another [s]."""

    name: str
    begin: float
    end: float
    category: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Trace:
    """Collects what a run would have recorded: leases, residency, stages, transfers.

    The tracks are named ``simulated …``, so that nobody takes the trace for a measured one.

    Args:
        plan: Where components run.
        enabled: False records nothing.
    """

    def __init__(self, plan: Plan, *, enabled: bool) -> None:
        self._plan = plan
        self._enabled = enabled
        self._tracks: dict[tuple[str, str], Timeline] = {}

    def synchronisation(self, step: int, begin: float, end: float) -> None:
        """Record the synchronisation of weights before a step."""
        if end > begin:
            span = _Span("sync weights", begin, end, "sync", {"step": step})
            self._record("driver", "steps", span)

    def node(
        self, node: Node, step: int, reserved: float, run: NodeStep, outcome: NodeOutcome
    ) -> None:
        """Record what a node did in a step."""
        if not self._enabled:
            return
        lease = _Span(f"lease {node.name}", reserved, run.leased, "lease")
        self._record("driver", node.name, lease)
        for name in node.components:
            self._component(node, name, step, run, outcome)

    def _component(
        self, node: Node, name: str, step: int, run: NodeStep, outcome: NodeOutcome
    ) -> None:
        plan = self._plan.components[name]
        devices = plan.devices
        track = f"devices {devices[0]}-{devices[-1]}"
        if run.begin > run.leased:
            self._record(name, track, _Span("onload", run.leased, run.begin, "residency"))
        stage = stage_of(node, name)
        label, engines = f"{node.name}.{stage.method}", outcome.engines.get(name)
        if engines is None:
            span = _Span(label, run.begin, run.end, "stage", _worker(step, name, devices))
            self._record(name, track, span)
        else:
            for rank, end in enumerate(engines.tolist()):
                worker = _worker(step, name, plan.of_process(rank))
                self._record(name, f"rank {rank}", _Span(label, run.begin, end, "stage", worker))
        for edge in stage.outputs:
            for unit, ready in enumerate(outcome.ready.tolist()):
                span = _Span(f"put {edge}", ready, ready, "transfer", {"unit": unit})
                self._record(name, f"{track} out", span)
        if run.released > run.end:
            self._record(name, track, _Span("offload", run.end, run.released, "residency"))

    def _record(self, component: str, track: str, span: _Span) -> None:
        if not self._enabled:
            return
        key = (component, track)
        if key not in self._tracks:
            self._tracks[key] = Timeline(process=f"simulated {component}", thread=track)
        begin, end = round(span.begin * NANOSECONDS), round(span.end * NANOSECONDS)
        self._tracks[key].record(span.name, begin, end, category=span.category, **span.arguments)

    def events(self) -> list[Event]:
        """All events, by time."""
        found = [event for timeline in self._tracks.values() for event in timeline.drain()]
        return sorted(found, key=lambda event: event["begin_ns"])


def _worker(step: int, component: str, devices: tuple[int, ...]) -> dict[str, Any]:
    """What a worker says about itself with each stage."""
    return {"step": step, "component": component, "devices": list(devices)}
