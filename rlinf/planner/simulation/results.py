"""What a simulation found, in figures and in the events of a real run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlinf.flow.graph import Node
from rlinf.flow.plan import Plan
from rlinf.monitor.timeline import Event, Timeline
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.search.formulas import Floats
from rlinf.planner.simulation.node_run import NodeWork


@dataclass(frozen=True, kw_only=True)
class NodeStep(NodeWork):
    """A node in one step; times from the start of the simulation [s]."""

    leased: float  # when it got its devices
    begin: float  # when its state was loaded
    released: float  # when its state was offloaded and its devices were given back


@dataclass(frozen=True)
class Step:
    """One step; times from the start of the simulation [s]."""

    number: int
    begin: float
    end: float
    nodes: Mapping[str, NodeStep]

    @property
    def tokens(self) -> int:
        """Tokens that were generated."""
        return sum(node.tokens for node in self.nodes.values())


@dataclass(frozen=True)
class Simulation:
    """All steps of a simulation. Every figure is simulated, none measured."""

    steps: tuple[Step, ...]
    devices: Mapping[str, int]  # of each component
    cluster_devices: int
    staleness: int  # the bound that was simulated
    events: list[Event]  # for :class:`~rlinf.monitor.timeline.TimelineFile`

    @property
    def step_seconds(self) -> Floats:
        """Time from the end of one step to the end of the next [s]."""
        return np.diff([step.end for step in self.steps], prepend=0.0)

    @property
    def steady_seconds(self) -> Floats:
        """The same without the first steps, which asynchronous training starts with at once."""
        return self.step_seconds[min(self.staleness, len(self.steps) - 1) :]

    def quantiles(self, *levels: float) -> tuple[float, ...]:
        """Quantiles of the steady step time [s]."""
        return tuple(float(q) for q in np.quantile(self.steady_seconds, levels))

    @property
    def seconds(self) -> float:
        """Mean steady step time [s]."""
        return float(self.steady_seconds.mean())

    @property
    def idle_fraction(self) -> float:
        """Part of all device time in which no component worked."""
        busy = sum(seconds * self.devices[name] for name, seconds in self.busy())
        return 1 - busy / (self.cluster_devices * self.steps[-1].end)

    def busy(self) -> Iterator[tuple[str, float]]:
        """Every component and the time that it worked, step by step [s]."""
        for step in self.steps:
            for node in step.nodes.values():
                yield from node.busy.items()


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that have the same components, or none.

    ``idle`` is the part of the simulated time in which none of the components worked.
    """

    devices: tuple[int, ...]
    components: tuple[str, ...]
    idle: float


def idle_shares(simulation: Simulation, plan: Plan, cluster: ClusterShape) -> list[DeviceGroup]:
    """What a simulation of a plan found of the devices of a cluster, group by group.

    The work of a component counts as evenly divided over its devices. Components of one loop may
    work on the same devices at the same time; a device is then not idle.
    """
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    homes = {name: set(part.devices) for name, part in plan.components.items()}
    for device in range(cluster.devices):
        groups[tuple(name for name in homes if device in homes[name])].append(device)
    busy: dict[str, float] = defaultdict(float)
    for name, seconds in simulation.busy():
        busy[name] += seconds
    whole = simulation.steps[-1].end
    return [
        DeviceGroup(tuple(devices), names, max(0.0, 1 - sum(busy[n] for n in names) / whole))
        for names, devices in groups.items()
    ]


class SimulatedTimeline:
    """Collects what a run would have recorded: leases, residency, stages, transfers.

    The tracks are named ``simulated …``, so that nobody takes them for measured ones. Without
    ``enabled`` nothing is recorded.
    """

    def __init__(self, plan: Plan, *, enabled: bool) -> None:
        self._plan = plan
        self._enabled = enabled
        self._tracks: dict[tuple[str, str], Timeline] = {}

    def synchronisation(self, step: int, begin: float, end: float) -> None:
        """Record the synchronisation of weights before a step."""
        if end > begin:
            self._record(("driver", "steps"), "sync weights", (begin, end), "sync", step=step)

    def node(self, node: Node, step: int, reserved: float, run: NodeStep) -> None:
        """Record what a node did in a step."""
        span = (reserved, run.leased)
        self._record(("driver", node.name), f"lease {node.name}", span, "lease")
        for name in node.components:
            self._component(node, name, step, run)

    def _component(self, node: Node, name: str, step: int, run: NodeStep) -> None:
        plan = self._plan.components[name]
        track = f"devices {plan.devices[0]}-{plan.devices[-1]}"
        if run.begin > run.leased:
            self._record((name, track), "onload", (run.leased, run.begin), "residency")
        stage = next(stage for stage in node.stages if stage.component == name)
        workers = [(track, plan.devices, run.end)]
        if name in run.engines:
            ends = enumerate(run.engines[name].tolist())
            workers = [(f"rank {rank}", plan.of_process(rank), end) for rank, end in ends]
        for place, devices, end in workers:
            # What a worker says about itself with each stage.
            worker = {"step": step, "component": name, "devices": list(devices)}
            label = f"{node.name}.{stage.method}"
            self._record((name, place), label, (run.begin, end), "stage", **worker)
        for edge in stage.outputs:
            for unit, ready in enumerate(run.ready.tolist()):
                out = (name, f"{track} out")
                self._record(out, f"put {edge}", (ready, ready), "transfer", unit=unit)
        if run.released > run.end:
            self._record((name, track), "offload", (run.end, run.released), "residency")

    def _record(
        self,
        track: tuple[str, str],
        name: str,
        span: tuple[float, float],
        category: str,
        **arguments: object,
    ) -> None:
        """Record what happened on a track of a component from one time to another [s]."""
        if not self._enabled:
            return
        if track not in self._tracks:
            self._tracks[track] = Timeline(process=f"simulated {track[0]}", thread=track[1])
        begin, end = (round(1e9 * seconds) for seconds in span)
        self._tracks[track].record(name, begin, end, category=category, **arguments)

    def events(self) -> list[Event]:
        """All events, by time."""
        found = [event for timeline in self._tracks.values() for event in timeline.drain()]
        return sorted(found, key=lambda event: event["begin_ns"])
