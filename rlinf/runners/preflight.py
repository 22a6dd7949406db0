"""Memory of a run before it runs: its worst step is run, and what every process held is reported.

The recipe itself is run for one training step, in a directory that is thrown away: every component
on its placement, all environments, the longest prompts of the data, completions that never end
early, an evaluation and a checkpoint. Nothing is estimated but what does not fit.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.running_step import StepReport
from rlinf.monitor.memory import ProcessMemory, TreeWatch
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.placed_config import PlacedConfig
from rlinf.runners.planning_traits import Knob
from rlinf.runners.profiling import changed


class WorstCaseRunner(Protocol):
    """A runner, as far as the preflight is concerned."""

    def run_worst_case(self) -> WorstCase:
        """One training step at its largest, with evaluation and checkpoint."""


class WorstCase(Protocol):
    """What the worst step of a run was like, as far as the preflight is concerned."""

    @property
    def reports(self) -> list[StepReport]:
        """Of its steps."""

    @property
    def devices(self) -> dict[int, int]:
        """Memory of each device that has memory of its own [bytes]."""


RunnerClass = Callable[[Any, RunDirectory, threading.Event], WorstCaseRunner]


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
        devices: Every device that has memory of its own.
    """

    processes: tuple[ProcessPeak, ...]
    total: int
    limit: int
    devices: tuple[DevicePeak, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it is not more than there is."""
        return self.total <= self.limit and all(d.peak <= d.limit for d in self.devices)

    @property
    def excess(self) -> float:
        """The largest share of what there is, over host and devices; above 1 it does not fit."""
        shares = [self.total / self.limit, *(d.peak / d.limit for d in self.devices)]
        return max(shares)


@dataclass(frozen=True)
class Fitting:
    """A setting that fits.

    Args:
        change: What to write, such as ``env.num_envs=8``.
        total: What its worst step held [bytes].
    """

    change: str
    total: int


def memory_limit() -> int:
    """What new processes can have: the free memory of the machine, or of its control group."""
    free = psutil.virtual_memory().available
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                limit = int((root / most).read_text("ascii"))
                free = min(free, limit - int((root / used).read_text("ascii")))
            except (OSError, ValueError):
                continue  # no such group, or no limit
    return free


def preflight(
    config: PlacedConfig,
    runner: RunnerClass,
    flow: Callable[[Any], Flow],
    limit: int | None = None,
) -> MemoryReport:
    """Run the worst step of a recipe and report what it held.

    Args:
        config: The recipe.
        runner: Builds the runner of its task.
        flow: The flow of a config.
        limit: Memory that there is; None: what the machine has free.
    """
    there_is = memory_limit() if limit is None else limit
    worst = _changed(config, config.planning.worst_case)
    with tempfile.TemporaryDirectory(prefix="rlinf-preflight-") as scratch:
        path = Path(scratch) / "run"
        with (
            RunDirectory.create(scratch, "preflight", path=path) as directory,
            TreeWatch() as watch,
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
        ):
            found = runner(worst, directory, threading.Event()).run_worst_case()
    peaks = [ProcessPeak(_role(process), process.peak) for process in watch.processes]
    peaks.sort(key=lambda process: -process.peak)
    devices = _device_peaks(worst, flow(worst), found)
    return MemoryReport(tuple(peaks), watch.together, there_is, devices)


def _device_peaks(config: PlacedConfig, flow: Flow, found: WorstCase) -> tuple[DevicePeak, ...]:
    """What the workers of each device held: those of one node at work, the others at rest."""
    return tuple(
        DevicePeak(
            device,
            max(_device_peak(config, flow, report, device) for report in found.reports),
            limit,
        )
        for device, limit in sorted(found.devices.items())
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


def _role(process: ProcessMemory) -> str:
    """What a process is, in a few words."""
    if process.pid == os.getpid():
        return "driver"
    words = process.command or ("process",)
    if words[0].startswith("ray::"):
        return f"worker {words[0].removeprefix('ray::').partition('.')[0]}"
    # Processes of this project are started with the name of their module as the last word.
    known = [part for word in words[1:] for part in re.findall(r"\brlinf(?:\.\w+)+", word)]
    return f"{known[-1] if known else os.path.basename(words[0])}, process {process.pid}"


def _changed(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    quiet = ("logger.backends=[]", "runner.timeline=false", "runner.plan=manual")
    return changed(config, [*quiet, *overrides])


# -- what would fit -----------------------------------------------------------------------------


def nearest_fitting(
    config: PlacedConfig,
    runner: RunnerClass,
    flow: Callable[[Any], Flow],
    report: MemoryReport,
    *,
    say: Callable[[str], None] = print,
) -> Fitting | None:
    """The first key, of those that cost least, with a value that fits; None: there is none.

    The smallest value of a key is measured first. If it fits, the largest value that should, by the
    line through both measurements, is measured, and then smaller ones until one fits.

    Args:
        config: The recipe, which does not fit.
        runner: Builds the runner of its task.
        flow: The flow of a config.
        report: What it held.
        say: Called with a line per measurement.
    """
    for knob in config.planning.memory_knobs:

        def measured(value: int, knob: Knob = knob) -> MemoryReport:
            smaller = changed(config, (f"{knob.key}={value}",))
            found = preflight(smaller, runner, flow, report.limit)
            say(f"{knob.key}={value}: {100 * found.excess:.0f} % of what there is")
            return found

        found = _largest_fitting(list(_legal(config, knob)), knob, report, measured)
        if found is not None:
            return found
    return None


def _largest_fitting(
    values: Sequence[int],
    knob: Knob,
    report: MemoryReport,
    measured: Callable[[int], MemoryReport],
) -> Fitting | None:
    """The largest of some values, descending, that fits."""
    if not values:
        return None
    least = measured(values[-1])
    if not least.fits:
        return None
    slope = (report.excess - least.excess) / (knob.now - values[-1])
    candidates = [v for v in values[:-1] if least.excess + slope * (v - values[-1]) <= 1]
    for value in candidates[:3]:
        found = measured(value)
        if found.fits:
            return Fitting(f"{knob.key}={value}", found.total)
    return Fitting(f"{knob.key}={values[-1]}", least.total)


def _legal(config: PlacedConfig, knob: Knob) -> Iterator[int]:
    for value in knob.smaller():
        try:
            _changed(config, (f"{knob.key}={value}",))
        except ConfigError:
            continue
        yield value
