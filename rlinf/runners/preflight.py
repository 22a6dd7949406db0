"""Memory of a run before it runs: its worst step is run, and what every process held is reported.

The recipe itself is run for one training step, in a directory that is thrown away: every component
on its placement, all environments, the longest prompts of the data, completions that never end
early, an evaluation and a checkpoint. Nothing is estimated but what does not fit.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.monitor.memory import TreeWatch
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.device_memory import free_memory
from rlinf.runners.memory_report import (
    MemoryReport,
    Processes,
    WorstCase,
    device_peaks,
)
from rlinf.runners.placed_config import PlacedConfig
from rlinf.runners.planning_traits import Knob
from rlinf.runners.variants import quiet


class WorstCaseRunner(Protocol):
    """A runner, as far as the preflight is concerned."""

    def run_worst_case(self) -> WorstCase:
        """One training step at its largest, with evaluation and checkpoint."""


RunnerClass = Callable[[Any, RunDirectory, threading.Event], WorstCaseRunner]


@dataclass(frozen=True)
class Fitting:
    """A setting that fits.

    Args:
        change: What to write, such as ``env.num_envs=8``.
        total: What its worst step held [bytes].
    """

    change: str
    total: int


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
    there_is = free_memory() if limit is None else limit
    worst = quiet(config, config.planning.worst_case)
    with tempfile.TemporaryDirectory(prefix="rlinf-preflight-") as scratch:
        path = Path(scratch) / "run"
        with (
            RunDirectory.create(scratch, "preflight", path=path) as directory,
            TreeWatch() as watch,
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
        ):
            found = runner(worst, directory, threading.Event()).run_worst_case()
    processes = Processes(watch.processes, found.places)
    devices = device_peaks(worst, flow(worst), found) or processes.slots(there_is)
    return MemoryReport(processes.peaks(), watch.together, there_is, devices)


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
            smaller = quiet(config, (f"{knob.key}={value}",))
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
            quiet(config, (f"{knob.key}={value}",))
        except ConfigError:
            continue
        yield value
