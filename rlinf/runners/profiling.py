"""Profiles of recipes: measured by trials at several settings, kept, and used while they are valid.

A trial runs the recipe itself, some steps long, in a directory that is thrown away: the same
workers, flow and executor as training, with another number of items, devices or pipeline stages.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rlinf.config.dump import to_data
from rlinf.config.load import with_overrides
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.flow.cluster_shape import ClusterShape, NodeGroup
from rlinf.flow.fingerprint import Fingerprints, hardware_fingerprint, hashed
from rlinf.flow.graph import Flow
from rlinf.flow.measure import PROFILE_FILE, StepRecorder, merged
from rlinf.flow.overhead import OverheadRecorder, joined, overhead
from rlinf.flow.profile import ComponentProfile, Measurement, Profile
from rlinf.flow.running_step import StepReport
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.placed_config import PlacedConfig

log = logging.getLogger(__name__)

MEASURED_STEPS = 5
FIRST_STEPS = 8
_CREATED_MODEL = "initial_model"


class Rehearsing(Protocol):
    """A runner, as far as trials are concerned."""

    def rehearse(self, steps: int) -> Iterator[StepReport]:
        """Train some steps of which nothing is kept; the first reports speak of memory."""


RunnerClass = Callable[[Any, RunDirectory, threading.Event], Rehearsing]


def fingerprints(config: PlacedConfig) -> Fingerprints:
    """What a profile of a recipe is valid for, on this machine.

    Numbers of items, placements and seeds do not count: they are what a profile is asked about.
    """
    traits = config.planning
    data = to_data(config)["model"]
    path = data.get("path")
    described = Path(path) / "config.json" if path else None
    content = described.read_text("utf-8") if described and described.is_file() else ""
    return Fingerprints(
        hardware=hardware_fingerprint(config.devices, traits.packages),
        model=f"{data.get('type', 'language')} {hashed([data, content])}",
        config=hashed(traits.sections),
    )


def measure(
    config: PlacedConfig,
    runner: RunnerClass,
    flow: Callable[[Any], Flow],
    *,
    steps: int = MEASURED_STEPS,
    say: Callable[[str], None] = print,
) -> Profile:
    """Run every trial of a recipe and merge what was measured.

    Args:
        config: The recipe; its own setting is measured first.
        runner: Builds the runner of its task.
        flow: The flow of a config.
        steps: Steps of each trial that count.
        say: Called with a line per trial.

    Raises:
        ConfigError: No trial is legal.
    """
    together: list[StepRecorder] = []
    apart: list[StepRecorder] = []
    ahead: list[tuple[PlacedConfig, float]] = []
    with tempfile.TemporaryDirectory(prefix="rlinf-measure-") as scratch:
        for number, (label, trial) in enumerate(legal_trials(config)):
            begin = time.perf_counter()
            with _trial_directory(Path(scratch), number) as directory:
                origin = f"{label}, {time.strftime('%Y-%m-%d')}"
                recorder = new_recorder(trial, flow(trial), origin)
                taken = _observe(runner(trial, directory, threading.Event()), recorder, steps)
            if trial.planning.constraints.staleness:
                # Components that work at the same time say nothing of each alone.
                ahead.append((trial, taken))
            else:
                (apart if beside(recorder).divides_a_loop else together).append(recorder)
            say(f"measured {label}: {_summary(recorder)}, {time.perf_counter() - begin:.0f} s")
    if not (together or apart):  # the recipe and all its trials run ahead
        raise ConfigError("no setting without staleness could be measured")
    components = _components(together, apart)
    for recorder in apart:
        beside(recorder).count_work_of(recorder.profiles(), components)
    besides = [beside(recorder) for recorder in (*together, *apart)]
    profile = fingerprints(config).profile(components, overhead(besides))
    factors = [_overlap_factor(trial, flow(trial), profile, taken) for trial, taken in ahead]
    return profile.model_copy(update={"overlap_factor": max([1.0, *factors])})


def _components(
    together: Sequence[StepRecorder], apart: Sequence[StepRecorder]
) -> dict[str, ComponentProfile]:
    """What components take, where the stages of a loop share devices if that was measured."""
    parts = [
        merged([recorder.profiles() for recorder in recorders], equal="pooled")
        for recorders in (apart, together)
    ]
    sizes = {name: {_size(m) for m in part.measurements} for name, part in parts[1].items()}
    for name, part in parts[0].items():
        known = sizes.get(name, set())
        others = tuple(m for m in part.measurements if _size(m) not in known)
        if name in parts[1]:
            whole = parts[1][name]
            both = {"measurements": (*whole.measurements, *others)}
            parts[1][name] = whole.model_copy(update=both)
        else:
            parts[1][name] = part
    return parts[1]


def _size(measurement: Measurement) -> tuple[int, int, int]:
    return measurement.items, measurement.devices, measurement.pipeline_stages


def _overlap_factor(config: PlacedConfig, flow: Flow, profile: Profile, taken: float) -> float:
    """How much longer than predicted without it a step took whose parts overlapped."""
    from rlinf.flow.planning import predict

    nodes = config.cluster.num_nodes
    group = NodeGroup(nodes=nodes, devices_per_node=config.devices // nodes)
    shape, fixed = ClusterShape(groups=(group,)), profile.fixed_seconds
    alone = predict(flow, config.plan, profile, shape, config.planning.constraints)
    return (taken - fixed) / (alone - fixed)


def legal_trials(config: PlacedConfig) -> Iterator[tuple[str, PlacedConfig]]:
    """The recipe as it is, then its trials; those that its rules refuse are left out."""
    known = [_quiet(config, ())]
    yield "the recipe as it is", known[0]
    for trial in config.planning.trials:
        try:
            found = _quiet(config, trial.overrides)
        except ConfigError:
            continue
        if not any(_same_setting(found, other) for other in known):
            known.append(found)
            yield trial.label, found


def _same_setting(one: PlacedConfig, other: PlacedConfig) -> bool:
    traits = (one.planning, other.planning)
    return (
        one.plan == other.plan
        and traits[0].items == traits[1].items
        and traits[0].constraints.staleness == traits[1].constraints.staleness
    )


def legal_placements(config: PlacedConfig) -> Iterator[tuple[str, PlacedConfig]]:
    """The trials with all items of the recipe, without its own placement, as the run goes on."""
    for trial in config.planning.trials:
        try:
            found = changed(config, trial.overrides)
        except ConfigError:
            continue
        one, other = found.planning, config.planning
        same = one.items == other.items
        same = same and one.constraints.staleness == other.constraints.staleness
        if same and found.plan != config.plan:
            yield trial.label, found


def changed(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    """A config with other values; a placement that is given replaces the whole placement.

    Raises:
        ConfigError: They are not legal.
    """
    data = to_data(config)
    for key in ("component_placement", "residency"):
        if any(text.startswith(f"cluster.{key}=") for text in overrides):
            data["cluster"].pop(key, None)
    recipe = with_overrides("a trial", data, overrides)
    return validate(type(config), recipe.data, recipe)


def _quiet(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    """A config with overrides that writes nothing but what its runner must."""
    silent = ("logger.backends=[]", "runner.timeline=false", "runner.plan=manual")
    return changed(config, [*silent, "checkpoint.interval=0", *overrides])


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
    for report in trial.rehearse(recorder.warm_up + steps):
        taken.append(time.perf_counter() - begin)
        recorder.observe(report, taken[-1])
        begin = time.perf_counter()
    return median(taken[recorder.warm_up :])


def new_recorder(config: PlacedConfig, flow: Flow, origin: str) -> StepRecorder:
    """A recorder for the steps of a run."""
    traits = config.planning
    return StepRecorder(
        plan=config.plan,
        owners={stage.label: stage.component for _, stage in flow.stages()},
        items=traits.items,
        origin=origin,
        concurrent=traits.concurrent,
        chunks=traits.items // traits.constraints.handed_over,
        overhead=OverheadRecorder(
            flow, config.plan, traits.constraints.exchanges, traits.constraints.staleness
        ),
    )


def beside(recorder: StepRecorder) -> OverheadRecorder:
    """What a recorder of :func:`new_recorder` saw beside the work of components."""
    assert recorder.overhead is not None
    return recorder.overhead


def _summary(recorder: StepRecorder) -> str:
    parts = (
        f"{name} {profile.measurements[0].seconds:.3g} s ± {profile.measurements[0].spread:.1g}"
        for name, profile in recorder.profiles().items()
    )
    return ", ".join(parts)


class FirstSteps:
    """Measures a run in its first steps, where it is, and leaves its profile behind.

    Args:
        config: The run.
        flow: What happens in a step.
        directory: The run directory.
    """

    def __init__(self, config: PlacedConfig, flow: Flow, directory: Path) -> None:
        self._config = config
        self._path = directory / PROFILE_FILE
        self._recorder = new_recorder(config, flow, f"first steps of run {directory.name}")

    def observe(self, report: StepReport, seconds: float) -> None:
        """Take the next step and its time; the profile is written when there are enough."""
        if self._recorder.count >= FIRST_STEPS:
            return
        self._recorder.observe(report, seconds)
        if self._recorder.count == FIRST_STEPS:
            found = fingerprints(self._config).profile(
                self._recorder.profiles(), overhead([beside(self._recorder)])
            )
            try:
                found.save(self._path)
            except OSError as error:  # a full disk is no reason to stop training
                log.warning("%s was not written: %s", self._path, error.strerror)


# -- kept profiles ------------------------------------------------------------------------------


def kept_profiles() -> Path:
    """Where profiles are kept for this user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlinf" / "profiles"


def _kept(task: str, here: Fingerprints) -> Path:
    return kept_profiles() / f"{task}-{hashed([here.hardware, here.model, here.config])}.json"


def keep_profile(profile: Profile, task: str) -> Path:
    """Keep a profile for later runs of a task; measurements of other sizes stay.

    Returns:
        The file.
    """
    path = _kept(task, Fingerprints(profile.hardware, profile.model, profile.config))
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _readable(path)
    if known is not None:
        together = {
            "components": merged([known.components, profile.components]),
            "exchanges": joined(known.exchanges, profile.exchanges),
            "overlap_factor": max(known.overlap_factor, profile.overlap_factor),
        }
        profile = profile.model_copy(update=together)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    profile.save(temporary)
    temporary.replace(path)
    return path


def _readable(path: Path) -> Profile | None:
    """A kept profile; None where there is none, or one of another release."""
    try:
        return Profile.load(path)
    except ConfigError:
        return None


def usable_profile(config: PlacedConfig) -> tuple[Profile | None, tuple[str, ...]]:
    """The kept profile of a recipe, if there is one that is valid here.

    Returns:
        The profile, or None and what is different with the nearest that is kept; nothing where
        none is kept of the task.
    """
    here = fingerprints(config)
    nearest: tuple[str, ...] = ()
    for path in sorted(kept_profiles().glob(f"{config.task}-*.json")):
        try:
            found = Profile.load(path)
        except ConfigError as error:
            differences: tuple[str, ...] = (str(error),)
        else:
            differences = here.differences(found)
            if not differences:
                return found, ()
        if not nearest or len(differences) < len(nearest):
            nearest = differences
    return None, nearest
