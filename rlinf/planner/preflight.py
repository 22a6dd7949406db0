"""Memory of a run before it runs: its worst step is run, and what every process held is reported.

The recipe itself is run for one training step, in a directory that is thrown away: every component
on its placement, all environments, the longest prompts of the data, completions that never end
early, an evaluation and a checkpoint. Nothing is estimated but what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.planning_traits import Knob
from rlinf.planner.described_cluster import free_memory
from rlinf.planner.planned import quiet
from rlinf.planner.worst_step import MemoryReport, Processes, RunnerClass, measure_worst_step


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
    free = free_memory()
    there_is = free if limit is None else limit
    worst = quiet(config, config.planning.worst_case)
    found = measure_worst_step(worst, runner, flow, most=max(free, there_is))
    processes = Processes(found.processes, found.places, driver=found.driver)
    devices = found.devices or processes.slots(there_is)
    return MemoryReport(processes.peaks(), found.together, there_is, devices, found.ended)


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
        try:
            quiet(config, (f"{knob.key}={value}",))
        except ConfigError:
            continue
        yield value
