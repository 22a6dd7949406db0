"""How much of the time devices do nothing, by the components that they have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rlinf.flow.plan import Plan
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.simulation.results import Simulation


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
