"""What a simulation found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlinf.flow.plan import Plan
from rlinf.monitor.timeline import Event
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.simulation.node_run import Floats


@dataclass(frozen=True)
class NodeStep:
    """A node in one step; times from the start of the simulation [s].

    Args:
        leased: When it got its devices.
        begin: When its state was loaded.
        end: When it had processed everything.
        released: When its state was offloaded and its devices were given back.
        busy: Time that each component worked, without waiting.
    """

    leased: float
    begin: float
    end: float
    released: float
    busy: Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """One step; times from the start of the simulation [s]."""

    number: int
    begin: float
    end: float
    nodes: Mapping[str, NodeStep]
    tokens: int = 0


@dataclass(frozen=True)
class Simulation:
    """All steps of a simulation. Every figure is simulated, none measured.

    Args:
        steps: The steps, in order.
        devices: Devices of each component.
        cluster_devices: Devices of the cluster.
        staleness: The bound that was simulated.
        events: Events for :class:`~rlinf.monitor.timeline.TimelineFile`.
    """

    steps: tuple[Step, ...]
    devices: Mapping[str, int]
    cluster_devices: int
    staleness: int
    events: list[Event]

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
        busy = sum(
            seconds * self.devices[name]
            for step in self.steps
            for node in step.nodes.values()
            for name, seconds in node.busy.items()
        )
        return 1 - busy / (self.cluster_devices * self.steps[-1].end)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that have the same components.

    Args:
        devices: The devices, ascending.
        components: What runs on them; empty where nothing does.
        idle: Part of the simulated time in which none of the components worked.
    """

    devices: tuple[int, ...]
    components: tuple[str, ...]
    idle: float


def idle_shares(simulation: Simulation, plan: Plan, cluster: ClusterShape) -> list[DeviceGroup]:
    """What a simulation found of the devices of a cluster, group by group.

    The work of a component counts as evenly divided over its devices. Components of one loop may
    work on the same devices at the same time; a device is then not idle.

    Args:
        simulation: Of the plan.
        plan: Where components run.
        cluster: All devices.
    """
    placed: dict[int, list[str]] = {device: [] for device in range(cluster.devices)}
    for name, part in plan.components.items():
        for device in part.devices:
            placed[device].append(name)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for device, names in placed.items():
        groups[tuple(names)].append(device)
    busy: dict[str, float] = defaultdict(float)
    for step in simulation.steps:
        for node in step.nodes.values():
            for name, seconds in node.busy.items():
                busy[name] += seconds
    whole = simulation.steps[-1].end
    return [
        DeviceGroup(tuple(devices), names, max(0.0, 1 - sum(busy[n] for n in names) / whole))
        for names, devices in groups.items()
    ]
