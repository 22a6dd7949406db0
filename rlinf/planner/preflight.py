"""Memory of a run before it runs: its worst step is run, and what every process held is reported.

The recipe itself is run for one training step, in a directory that is thrown away, and in a process
of its own, so that it may run out of memory: every component on its placement, all environments,
the longest prompts of the data, completions that never end early, an evaluation and a checkpoint.
Nothing is estimated but what does not fit.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import psutil

from rlinf.errors import ConfigError, RunFailure, UserError
from rlinf.flow.executor import StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.planning_traits import Knob
from rlinf.flow.stage_worker import WorkerPlace
from rlinf.monitor.memory import ProcessMemory, TreeWatch, tells_of_full_memory
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner.cluster_shape import free_memory
from rlinf.planner.planned import quiet

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class ProcessPeak:
    """Most memory of one process [bytes], shared pages divided among those that share them."""

    role: str
    peak: int


@dataclass(frozen=True)
class DevicePeak:
    """What the workers of one device held together at most, and what it has [bytes]."""

    device: int
    peak: int
    limit: int


@dataclass(frozen=True)
class MemoryReport:
    """What the worst step of a run held."""

    processes: tuple[ProcessPeak, ...]  # every process, the largest first
    total: int  # the most of all processes at a time [bytes]
    limit: int  # what there is for them [bytes]
    devices: tuple[DevicePeak, ...] = ()
    """Every device, where its workers have memory or processes of their own."""
    ended: str | None = None
    """Why the step could not be finished; then it would have held more. None: it was."""

    @property
    def fits(self) -> bool:
        """Whether it is not more than there is."""
        return self.excess <= 1

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


def preflight(
    config: PlacedConfig,
    runner: WorstStepRunners,
    flow: Callable[[Any], Flow],
    limit: int | None = None,
) -> MemoryReport:
    """Run the worst step of a recipe and report what it held.

    ``runner`` builds the runner of its task, ``flow`` gives the flow of a config, and ``limit`` is
    the memory that there is; None: what the machine has free.
    """
    free = free_memory()
    there_is = free if limit is None else limit
    worst = quiet(config, config.planning.worst_case)
    found = measure_worst_step(worst, runner, flow, most=max(free, there_is))
    processes = Processes(found.processes, found.places, driver=found.driver)
    devices = found.devices or processes.slots(there_is)
    return MemoryReport(processes.peaks(), found.together, there_is, devices, found.ended)


# -- what would fit -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitting:
    """A setting that fits: what to write, and what its worst step held [bytes]."""

    change: str
    total: int


def nearest_fitting(
    config: PlacedConfig,
    runner: WorstStepRunners,
    flow: Callable[[Any], Flow],
    report: MemoryReport,
    *,
    say: Callable[[str], None] = print,
) -> Fitting | None:
    """The first key, of those that cost least, with a value that fits; None: there is none.

    The smallest value of a key is measured first. If it fits, the largest value that should, by the
    line through both measurements, is measured, and then smaller ones until one fits. ``report`` is
    what the recipe held, and ``say`` is called with a line per measurement.
    """
    for knob in config.planning.memory_knobs:

        def measured(value: int, knob: Knob = knob) -> MemoryReport:
            smaller = quiet(config, (f"{knob.key}={value}",))
            found = preflight(smaller, runner, flow, report.limit)
            say(f"{knob.key}={value}: {found.share} of what there is")
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
        with suppress(ConfigError):
            quiet(config, (f"{knob.key}={value}",))
            yield value


# -- whose memory it is -------------------------------------------------------------------------


class Processes:
    """Which of all ``processes`` that were seen is whose, by the ``places`` of the workers."""

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


def device_peaks(
    config: PlacedConfig, flow: Flow, reports: Sequence[StepReport], places: Sequence[WorkerPlace]
) -> tuple[DevicePeak, ...]:
    """What the workers of each device held: those of one node at work, the others at rest."""
    limits = {device: size for place in places for device, size in place.memory.items()}
    return tuple(
        DevicePeak(device, max(_held(config, flow, report, device) for report in reports), limit)
        for device, limit in sorted(limits.items())
    )


def _held(config: PlacedConfig, flow: Flow, report: StepReport, device: int) -> int:
    """What was held of a device in a step [bytes]."""
    at_work: dict[str, int] = {}
    at_rest: dict[str, int] = {}
    for name, plan in config.plan.components.items():
        if device in plan.devices:
            labels = [stage.label for _, stage in flow.stages() if stage.component == name]
            costs = [stage.cost for label in labels for stage in report.stages[label]]
            count = plan.processes_by_device()[device]
            resting = 0 if plan.residency == "offload" else count
            at_work[name] = count * max(cost.peak_bytes for cost in costs)
            at_rest[name] = resting * max(cost.resident_bytes for cost in costs)
    return max(
        sum(held if name in node.components else at_rest[name] for name, held in at_work.items())
        for node in flow.nodes
    )


# -- the worst step -----------------------------------------------------------------------------


class _Found(Protocol):
    """What the worst step of a run was like: reports of its steps, places of its workers."""

    @property
    def reports(self) -> list[StepReport]: ...

    @property
    def places(self) -> list[WorkerPlace]: ...


class WorstStepRunner(Protocol):
    """A runner, as far as the preflight is concerned."""

    def run_worst_case(self) -> _Found:
        """One training step at its largest, with evaluation and checkpoint."""


WorstStepRunners = Callable[[Any, RunDirectory, threading.Event], WorstStepRunner]


@dataclass(frozen=True)
class WorstStep:
    """What the worst step held: every process, all at a time, and each accelerator [bytes].

    ``driver`` is the process that ran it. Where it was ``ended``, as the memory was not enough,
    nothing is known of places and devices.
    """

    processes: list[ProcessMemory]
    together: int
    driver: int
    places: list[WorkerPlace]
    devices: tuple[DevicePeak, ...]
    ended: str | None = None


def measure_worst_step(
    config: PlacedConfig, runner: WorstStepRunners, flow: Callable[[Any], Flow], most: int
) -> WorstStep:
    """Run the worst step of a recipe in a child process, and watch what it takes.

    The child is ended once it and all that it started hold more than ``most`` bytes of the host, so
    that the rest of the machine goes on; should the kernel be quicker, it ends the child.

    Raises:
        UserError: What the run raised, where its user can correct it.
        RunFailure: The run failed otherwise than for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    answer: tuple[str, Any] | None = None
    # It is this process that makes the directory, as a child that is killed would leave it behind.
    with tempfile.TemporaryDirectory(prefix="rlinf-preflight-") as scratch:
        arguments = (config, runner, flow, there, scratch)
        child = context.Process(target=_run, args=arguments, name="worst step")
        child.start()
        there.close()
        assert child.pid is not None
        with TreeWatch(child.pid) as watch:
            while answer is None and watch.together <= most:
                if here.poll(_LOOK_SECONDS):
                    try:
                        answer = here.recv()
                    except EOFError:
                        answer = ("lost", None)
            too_much = answer is None
            if too_much:
                _end_tree(child.pid)
            child.join()
    kind: str = answer[0] if answer else "lost"
    content: Any = answer[1] if answer else None
    if kind == "refused":
        raise content
    if kind == "failed" and not tells_of_full_memory(content):
        raise RunFailure(f"the worst step of the recipe failed; the trace ends in\n{content}")
    if kind == "lost" and not too_much and child.exitcode != -signal.SIGKILL:
        raise RunFailure(f"the process of the worst step ended with status {child.exitcode}")
    places, devices = content if kind == "found" else ([], ())
    why = {
        "lost": "the memory of the host was full",
        "failed": "memory was full",
    }
    return WorstStep(watch.processes, watch.together, child.pid, places, devices, why.get(kind))


def _end_tree(pid: int) -> None:
    """Kill a process and everything that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _end_with(parent: Any, scratch: str) -> None:
    """End this process, and remove its directory, once its parent is gone, which may be killed."""
    wait([parent])
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)  # what it has started ends with it


def _run(
    config: PlacedConfig,
    runner: WorstStepRunners,
    flow: Callable[[Any], Flow],
    there: Connection,
    scratch: str,
) -> None:
    """What the child does; sends what was found, what the user can correct, or the failure."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel, scratch), daemon=True).start()
    with suppress(OSError):
        # Should the machine run out of memory, this process is to end, and no other.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        path = Path(scratch) / "run"
        with (
            RunDirectory.create(scratch, "preflight", path=path) as directory,
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
        ):
            found = runner(config, directory, threading.Event()).run_worst_case()
        devices = device_peaks(config, flow(config), found.reports, found.places)
        there.send(("found", (found.places, devices)))
    except UserError as error:
        there.send(("refused", error))
    except Exception:  # noqa: BLE001 - told by the parent, which knows what to make of it
        there.send(("failed", "".join(traceback.format_exc().splitlines(keepends=True)[-30:])))
