"""Profiles of runs: recorded in their steps, kept for later runs, and what makes them valid."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rlinf.config.dump import leaves, to_data
from rlinf.config.home import user_directory
from rlinf.errors import ConfigError
from rlinf.flow.executor import StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.planning_traits import warm_up_steps
from rlinf.planner.cluster_shape import kinds_of_components
from rlinf.planner.measure import (
    PROFILE_FILE,
    OverheadRecorder,
    StepRecorder,
    joined,
    overhead,
    renewed,
)
from rlinf.planner.profile import Fingerprints, PlacedStep, Profile

log = logging.getLogger(__name__)

FIRST_STEPS = 8
_RECORDING = 4
"""How the figures of a profile come about; another number keeps those of before from being used."""


def new_recorder(config: PlacedConfig, flow: Flow, origin: str) -> StepRecorder:
    """A recorder for the steps of a run."""
    traits, plan = config.planning, config.plan
    constraints = traits.constraints
    loops = [node for node in flow.nodes if node.is_loop]
    homes = {n.name: {plan.components[name].devices for name in n.components} for n in loops}
    return StepRecorder(
        plan=plan,
        owners={stage.label: stage.component for _, stage in flow.stages()},
        items=traits.items,
        origin=origin,
        overhead=OverheadRecorder(flow, plan, constraints.exchanges, constraints.staleness),
        concurrent=traits.concurrent,
        chunks=traits.items // constraints.handed_over,
        warm_up=warm_up_steps(config),
        device_kinds=kinds_of_components(config, plan),
        sharing={node.name: node.components for node in loops if len(homes[node.name]) == 1},
    )


def placed_step(config: PlacedConfig, seconds: float, origin: str) -> PlacedStep:
    """That a step of a recipe as it is placed took so long [s]."""
    traits = config.planning
    return PlacedStep(
        items=traits.items,
        staleness=traits.constraints.staleness,
        plan=config.plan.written(),
        seconds=seconds,
        origin=origin,
    )


def measured_step(config: PlacedConfig, profile: Profile) -> float | None:
    """What a step of a recipe took as it is placed, by a profile [s]; None: it was not measured."""
    here = placed_step(config, seconds=1.0, origin="")
    return next((step.seconds for step in profile.steps if here.same_setting(step)), None)


class FirstSteps:
    """Measures a run in its first steps, where it is, and leaves its profile behind."""

    def __init__(self, config: PlacedConfig, flow: Flow, directory: Path) -> None:
        self._config = config
        self._path = directory / PROFILE_FILE
        self._recorder = new_recorder(config, flow, f"first steps of run {directory.name}")

    def after_step(self, step: int, report: StepReport, seconds: float) -> None:
        """Take the next step and its time; the profile is written when there are enough."""
        del step
        recorder = self._recorder
        if recorder.count >= FIRST_STEPS:
            return
        recorder.observe(report, seconds)
        if recorder.count == FIRST_STEPS:
            beside = overhead([recorder.overhead])
            found = fingerprints(self._config).profile(recorder.profiles(), beside)
            try:
                found.save(self._path)
            except OSError as error:  # a full disk is no reason to stop training
                log.warning("%s was not written: %s", self._path, error.strerror)


# -- what a profile is valid for ----------------------------------------------------------------


def fingerprints(config: PlacedConfig) -> Fingerprints:
    """What a profile of a recipe is valid for, on this machine.

    Numbers of items, placements and seeds do not count: they are what a profile is asked about.
    """
    traits = config.planning
    data = to_data(config).get("model", {})
    path = data.get("path")
    described = Path(path) / "config.json" if path else None
    content = described.read_text("utf-8") if described and described.is_file() else ""
    return Fingerprints(
        hardware=hardware_fingerprint(config.devices, traits.packages),
        model=f"{data.get('type', 'language')} {hashed([data, content])}",
        config=hashed([_RECORDING, traits.sections]),
        settings=dict(leaves({"model": data, **traits.sections})),
    )


def hardware_fingerprint(devices: int, packages: Iterable[str]) -> str:
    """The machine: processor, cores, memory, devices, and versions of what computes on it.

    ``devices`` are those that a plan divides, CPU slots or accelerators; of ``packages``, beside
    torch, one that is not installed is left out.
    """
    memory = round(psutil.virtual_memory().total / 2**30)
    cores = len(psutil.Process().cpu_affinity())
    parts = [_processor(), f"{cores} cores", f"{memory} GiB", f"{devices} devices"]
    parts += [f"{count}x {name}" for name, count in Counter(_accelerators()).items()]
    for package in ("torch", *packages):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _accelerators() -> list[str]:
    """Names of the NVIDIA devices by the driver's files; asking torch would take seconds."""
    return [
        line.partition(":")[2].strip()
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model:")
    ]


def hashed(data: Any) -> str:
    """Twelve hex digits for plain data: equal data, equal digits."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# -- kept for later runs ------------------------------------------------------------------------


def kept_profiles() -> Path | None:
    """Where profiles are kept for this user; None where there is no home directory."""
    root = user_directory("XDG_CACHE_HOME", ".cache")
    return None if root is None else root / "rlinf" / "profiles"


def why_not_kept(error: OSError) -> str:
    """Why :func:`keep_profile` failed, in a line, with what helps."""
    where = error.filename or kept_profiles()
    place = "" if where is None else f"{where}: "
    return f"{place}{error.strerror}; XDG_CACHE_HOME names another place"


def keep_profile(profile: Profile, task: str) -> Path:
    """Keep a profile for later runs of a task; earlier measurements of other sizes stay.

    Returns:
        The file.

    Raises:
        OSError: It cannot be written, or there is no home directory.
    """
    digits = hashed([profile.hardware, profile.model, profile.config])
    if (place := kept_profiles()) is None:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory")
    path = place / f"{task}-{digits}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = Profile.load(path)
    except ConfigError:  # there is none, or one of another release
        pass
    else:
        together = {
            "components": renewed(known.components, profile.components),
            "exchanges": joined(known.exchanges, profile.exchanges),
            "steps": (
                *(old for old in known.steps if not any(map(old.same_setting, profile.steps))),
                *profile.steps,
            ),
            "overlap_factor": max(known.overlap_factor, profile.overlap_factor),
        }
        profile = profile.model_copy(update=together)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    profile.save(temporary)
    temporary.replace(path)
    return path


def usable_profile(config: PlacedConfig) -> tuple[Profile | None, tuple[str, ...]]:
    """The kept profile of a recipe, if there is one that is valid here.

    Returns:
        The profile, or None and what is different with the nearest that is kept; nothing where
        none is kept of the task.
    """
    here = fingerprints(config)
    nearest: tuple[str, ...] = ()
    place = kept_profiles()
    for path in [] if place is None else sorted(place.glob(f"{config.task}-*.json")):
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
