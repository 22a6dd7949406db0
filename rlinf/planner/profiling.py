"""Profiles of recipes, measured by trials at several settings.

A trial runs the recipe itself, some steps long, in a directory that is thrown away: the same
workers, flow and executor as training, with another number of items, devices or pipeline stages.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rlinf.errors import ConfigError
from rlinf.flow.executor import StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner.cluster_shape import cluster_of
from rlinf.planner.kept_profiles import fingerprints, new_recorder, placed_step
from rlinf.planner.measure import StepRecorder, merged, overhead
from rlinf.planner.planned import legal_trials
from rlinf.planner.profile import ComponentProfile, PlacedStep, Profile
from rlinf.planner.search import predict

MEASURED_STEPS = 5
_CREATED_MODEL = "initial_model"
_SCRATCH = "rlinf-trials-"


class Rehearsing(Protocol):
    """A runner, as far as trials are concerned."""

    def rehearse(self, steps: int) -> Iterator[tuple[StepReport, dict[str, float]]]:
        """Train some steps of which nothing is kept; the first reports speak of memory."""


@dataclass(frozen=True)
class MeasuredTrial:
    """A recipe under a setting, what its components took, and the median of its steps [s]."""

    config: PlacedConfig
    recorder: StepRecorder
    seconds: float

    @property
    def step(self) -> PlacedStep:
        """Its whole step, for the profile."""
        return placed_step(self.config, self.seconds, self.recorder.origin)


def measure(
    config: PlacedConfig,
    runner: Callable[[Any, RunDirectory, threading.Event], Rehearsing],
    flow: Callable[[Any], Flow],
    *,
    steps: int = MEASURED_STEPS,
    say: Callable[[str], None] = print,
) -> Profile:
    """Run every trial of a recipe, its own setting first, and merge what was measured.

    So many steps of each trial count; ``say`` is called with a line per trial.

    Raises:
        ConfigError: No trial is legal, or the cluster is none to plan for.
        Exception: The recipe does not run as it is; of another trial, its line says why it failed.
    """
    cluster_of(config)  # a cluster that cannot be planned for is refused before it is measured
    trials: list[MeasuredTrial] = []
    with _scratch_directory() as scratch:
        for number, (label, trial) in enumerate(legal_trials(config)):
            begin = time.perf_counter()
            with _trial_directory(scratch, number) as directory:
                recorder = trial_recorder(label, trial, flow)
                try:
                    taken = _observe(runner(trial, directory, threading.Event()), recorder, steps)
                except Exception as error:
                    if number == 0:  # the recipe as it is: what is wrong is not the placement
                        raise
                    say(f"{label} could not be measured: {type(error).__name__}: {error}")
                    continue
            trials.append(MeasuredTrial(trial, recorder, taken))
            say(f"measured {label}: {_summary(recorder)}, {time.perf_counter() - begin:.0f} s")
    return profile_of(config, flow, trials)


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    """A directory that is thrown away, once those are whose process was killed before it could."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError), _locked(left):  # of a living process it is locked
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH) as made, _locked(Path(made)):
        yield Path(made)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which ends with this process; OSError where another does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def trial_recorder(label: str, trial: PlacedConfig, flow: Callable[[Any], Flow]) -> StepRecorder:
    """A recorder for the steps of a trial."""
    return new_recorder(trial, flow(trial), f"{label}, {time.strftime('%Y-%m-%d')}")


def profile_of(
    config: PlacedConfig, flow: Callable[[Any], Flow], trials: Sequence[MeasuredTrial]
) -> Profile:
    """What the trials of a recipe say together.

    Raises:
        ConfigError: All of them run ahead.
    """
    # Components that work at the same time say nothing of each alone.
    ahead = [trial for trial in trials if trial.config.planning.constraints.staleness]
    alone = [trial.recorder for trial in trials if trial not in ahead]
    if not alone:  # the recipe and all its trials run ahead
        raise ConfigError("no setting without staleness could be measured")
    apart = [recorder for recorder in alone if recorder.overhead.divides_a_loop]
    together = [recorder for recorder in alone if recorder not in apart]
    components = _components(together, apart)
    for recorder in apart:
        recorder.overhead.count_work_of(recorder.profiles(), components)
    beside = overhead([recorder.overhead for recorder in (*together, *apart)])
    profile = fingerprints(config).profile(components, beside)
    factors = [_overlap_factor(t.config, flow(t.config), profile, t.seconds) for t in ahead]
    steps = tuple(trial.step for trial in trials)
    return profile.model_copy(update={"overlap_factor": max([1.0, *factors]), "steps": steps})


def _components(
    together: Sequence[StepRecorder], apart: Sequence[StepRecorder]
) -> dict[str, ComponentProfile]:
    """What components take, where the stages of a loop share devices if that was measured."""
    divided, found = (
        merged([recorder.profiles() for recorder in recorders], equal="pooled")
        for recorders in (apart, together)
    )
    for name, part in divided.items():
        whole = found.setdefault(name, part)
        known = {measurement.size for measurement in whole.measurements}
        others = (m for m in part.measurements if m.size not in known)
        both = {"measurements": (*whole.measurements, *others)}
        found[name] = whole.model_copy(update=both)
    return found


def _overlap_factor(config: PlacedConfig, flow: Flow, profile: Profile, taken: float) -> float:
    """How much longer than predicted without it a step took whose parts overlapped."""
    shape, fixed = cluster_of(config), profile.fixed_seconds
    alone = predict(flow, config.plan, profile, shape, config.planning.constraints)
    return (taken - fixed) / (alone - fixed)


@contextmanager
def _trial_directory(scratch: Path, number: int) -> Iterator[RunDirectory]:
    path = scratch / f"{number}"
    with RunDirectory.create(scratch, "trial", path=path) as directory:
        # A model that the recipe creates is created once for all trials.
        created = scratch / "0" / _CREATED_MODEL
        if created.is_dir():
            (path / _CREATED_MODEL).symlink_to(created)
        yield directory


def _observe(trial: Rehearsing, recorder: StepRecorder, steps: int) -> float:
    """Rehearse; returns the median time of the steps that count."""
    taken: list[float] = []
    begin = time.perf_counter()
    for report, _ in trial.rehearse(recorder.warm_up + steps):
        taken.append(time.perf_counter() - begin)
        recorder.observe(report, taken[-1])
        begin = time.perf_counter()
    return median(taken[recorder.warm_up :])


def _summary(recorder: StepRecorder) -> str:
    profiles = recorder.profiles().items()
    measured = [(name, profile.measurements[0]) for name, profile in profiles]
    return ", ".join(f"{name} {m.seconds:.3g} s ± {m.spread:.1g}" for name, m in measured)
