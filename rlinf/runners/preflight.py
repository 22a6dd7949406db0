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
from rlinf.monitor.memory import ProcessMemory, TreeWatch
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.placed_config import PlacedConfig
from rlinf.runners.planning_traits import Knob
from rlinf.runners.profiling import changed


class WorstCaseRunner(Protocol):
    """A runner, as far as the preflight is concerned."""

    def run_worst_case(self) -> None:
        """One training step at its largest, with evaluation and checkpoint."""


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
class MemoryReport:
    """What the worst step of a run held.

    Args:
        processes: Every process, the largest first.
        total: The most of all processes at a time [bytes].
        limit: What there is for them [bytes].
    """

    processes: tuple[ProcessPeak, ...]
    total: int
    limit: int

    @property
    def fits(self) -> bool:
        """Whether it is not more than there is."""
        return self.total <= self.limit


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


def preflight(config: PlacedConfig, runner: RunnerClass, limit: int | None = None) -> MemoryReport:
    """Run the worst step of a recipe and report what it held.

    Args:
        config: The recipe.
        runner: Builds the runner of its task.
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
            runner(worst, directory, threading.Event()).run_worst_case()
    peaks = [ProcessPeak(_role(process), process.peak) for process in watch.processes]
    peaks.sort(key=lambda process: -process.peak)
    return MemoryReport(tuple(peaks), watch.together, there_is)


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
    report: MemoryReport,
    say: Callable[[str], None] = print,
) -> Fitting | None:
    """The first key, of those that cost least, with a value that fits; None: there is none.

    The smallest value of a key is measured first. If it fits, the largest value that should, by the
    line through both measurements, is measured, and then smaller ones until one fits.

    Args:
        config: The recipe, which does not fit.
        runner: Builds the runner of its task.
        report: What it held.
        say: Called with a line per measurement.
    """
    for knob in config.planning.memory_knobs:
        found = _largest_fitting(config, runner, report, knob, say)
        if found is not None:
            return found
    return None


def _largest_fitting(
    config: PlacedConfig,
    runner: RunnerClass,
    report: MemoryReport,
    knob: Knob,
    say: Callable[[str], None],
) -> Fitting | None:
    values = list(_legal(config, knob))
    if not values:
        return None

    def measured(value: int) -> int:
        changed = _changed(config, (f"{knob.key}={value}",))
        total = preflight(changed, runner, report.limit).total
        say(f"{knob.key}={value}: {total / 2**20:,.0f} MiB of {report.limit / 2**20:,.0f} MiB")
        return total

    least = measured(values[-1])
    if least > report.limit:
        return None
    slope = (report.total - least) / (knob.now - values[-1])
    candidates = [v for v in values[:-1] if least + slope * (v - values[-1]) <= report.limit]
    for value in candidates[:3]:
        total = measured(value)
        if total <= report.limit:
            return Fitting(f"{knob.key}={value}", total)
    return Fitting(f"{knob.key}={values[-1]}", least)


def _legal(config: PlacedConfig, knob: Knob) -> Iterator[int]:
    for value in knob.smaller():
        try:
            _changed(config, (f"{knob.key}={value}",))
        except ConfigError:
            continue
        yield value
