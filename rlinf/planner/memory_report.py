"""Whose memory is whose: processes and devices of a run at its fullest."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.running_step import StepReport
from rlinf.flow.stage_worker import WorkerPlace
from rlinf.monitor.memory import ProcessMemory


class WorstCase(Protocol):
    """What the worst step of a run was like, as far as the preflight is concerned."""

    @property
    def reports(self) -> list[StepReport]:
        """Of its steps."""

    @property
    def places(self) -> list[WorkerPlace]:
        """Of its workers."""


@dataclass(frozen=True)
class ProcessPeak:
    """Most memory of one process.

    Args:
        role: What the process is.
        peak: Bytes, shared pages divided among those that share them.
    """

    role: str
    peak: int


@dataclass(frozen=True)
class DevicePeak:
    """Most memory of one device [bytes].

    Args:
        device: The device.
        peak: What its workers held together.
        limit: What it has.
    """

    device: int
    peak: int
    limit: int


@dataclass(frozen=True)
class MemoryReport:
    """What the worst step of a run held.

    Args:
        processes: Every process, the largest first.
        total: The most of all processes at a time [bytes].
        limit: What there is for them [bytes].
        devices: Every device, where its workers have memory or processes of their own.
        ended: Why the step could not be finished; then it would have held more. None: it was.
    """

    processes: tuple[ProcessPeak, ...]
    total: int
    limit: int
    devices: tuple[DevicePeak, ...] = ()
    ended: str | None = None

    @property
    def fits(self) -> bool:
        """Whether it is not more than there is."""
        if self.ended is not None:
            return False
        return self.total <= self.limit and all(d.peak <= d.limit for d in self.devices)

    @property
    def excess(self) -> float:
        """The largest share of what there is, over host and devices; above 1 it does not fit."""
        shares = [self.total / self.limit, *(d.peak / d.limit for d in self.devices)]
        # Of a step that was not finished only the least is known.
        return max(shares) if self.ended is None else max(1.01, *shares)

    @property
    def share(self) -> str:
        """The same in percent."""
        return f"{'' if self.ended is None else 'more than '}{100 * self.excess:.0f} %"


class Processes:
    """Which process is whose.

    Args:
        processes: All that were seen.
        places: Of the workers.
        driver: The process of the run.
    """

    def __init__(
        self, processes: Sequence[ProcessMemory], places: Sequence[WorkerPlace], *, driver: int
    ) -> None:
        self._driver = driver
        self._processes = {process.pid: process for process in processes}
        self._workers: dict[int, list[WorkerPlace]] = {}
        for place in places:
            if place.pid != driver:
                self._workers.setdefault(place.pid, []).append(place)

    def peaks(self) -> tuple[ProcessPeak, ...]:
        """All processes, the largest first."""
        found = [ProcessPeak(self._role(p), p.peak) for p in self._processes.values()]
        return tuple(sorted(found, key=lambda process: -process.peak))

    def slots(self, limit: int) -> tuple[DevicePeak, ...]:
        """What the workers of each CPU slot and their own processes held; they share the host.

        Empty where workers are threads of the driver.
        """
        held: dict[int, int] = {}
        for process in self._processes.values():
            for place in self._owners(process):
                for device in place.devices:
                    held[device] = held.get(device, 0) + process.peak // len(place.devices)
        return tuple(DevicePeak(device, held[device], limit) for device in sorted(held))

    def _owners(self, process: ProcessMemory) -> list[WorkerPlace]:
        """The workers of a process, or of the nearest one above it that has any."""
        above: ProcessMemory | None = process
        while above is not None:
            if above.pid in self._workers:
                return self._workers[above.pid]
            above = self._processes.get(above.parent)
        return []

    def _role(self, process: ProcessMemory) -> str:
        """What a process is, in a few words."""
        if process.pid == self._driver:
            return "driver"
        names = ", ".join(place.name for place in self._owners(process))
        if process.pid in self._workers:
            return names
        words = process.command or ("process",)
        # Processes of this project are started with the name of their module as the last word.
        known = [part for word in words[1:] for part in re.findall(r"\brlinf(?:\.\w+)+", word)]
        name = known[-1] if known else os.path.basename(words[0]).partition(" ")[0]
        return f"{name} of {names}" if names else f"{name}, process {process.pid}"


def device_peaks(config: PlacedConfig, flow: Flow, found: WorstCase) -> tuple[DevicePeak, ...]:
    """What the workers of each device held: those of one node at work, the others at rest."""
    limits = {device: size for place in found.places for device, size in place.memory.items()}
    return tuple(
        DevicePeak(
            device,
            max(_device_peak(config, flow, report, device) for report in found.reports),
            limit,
        )
        for device, limit in sorted(limits.items())
    )


def _device_peak(config: PlacedConfig, flow: Flow, report: StepReport, device: int) -> int:
    held = {
        name: tuple(
            _held(config, flow, report, name, device, resting=resting) for resting in (False, True)
        )
        for name in config.plan.components
    }
    return max(
        sum(
            at_work if name in node.components else at_rest
            for name, (at_work, at_rest) in held.items()
        )
        for node in flow.nodes
    )


def _held(
    config: PlacedConfig,
    flow: Flow,
    report: StepReport,
    component: str,
    device: int,
    *,
    resting: bool,
) -> int:
    """What the workers of a component hold of a device [bytes]."""
    plan = config.plan.components[component]
    if device not in plan.devices or (resting and plan.residency == "offload"):
        return 0
    labels = [stage.label for _, stage in flow.stages() if stage.component == component]
    costs = [stage.cost for label in labels for stage in report.stages[label]]
    each = max((c.resident_bytes if resting else c.peak_bytes) for c in costs)
    return each * max(1, plan.processes // len(plan.devices))
