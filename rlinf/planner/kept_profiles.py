"""Profiles that are kept for later runs, and what makes them valid."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rlinf.config.dump import to_data
from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig
from rlinf.planner.measure import renewed
from rlinf.planner.overhead import Overhead, joined
from rlinf.planner.profile import ComponentProfile, Profile


@dataclass(frozen=True)
class Fingerprints:
    """What a profile is valid for, as text that is compared whole and can be read."""

    hardware: str
    model: str
    config: str

    def profile(
        self, components: Mapping[str, ComponentProfile], overhead: Overhead | None = None
    ) -> Profile:
        """A profile of these components, and of what steps take beside their work."""
        beside = overhead or Overhead()
        return Profile(
            hardware=self.hardware,
            model=self.model,
            config=self.config,
            **{name: getattr(beside, name) for name in Overhead.model_fields},
            components=components,
        )

    def differences(self, profile: Profile) -> tuple[str, ...]:
        """Say what a profile was measured on that is different here; empty where nothing is."""
        return profile.differences(hardware=self.hardware, model=self.model, config=self.config)


def hardware_fingerprint(devices: int, packages: Iterable[str]) -> str:
    """The machine: processor, cores, memory, devices, and versions of what computes on it.

    Args:
        devices: Devices that a plan divides: CPU slots or accelerators.
        packages: Distributions whose version matters, beside torch; one that is not installed is
            left out.
    """
    memory = round(psutil.virtual_memory().total / 2**30)
    cores = len(psutil.Process().cpu_affinity())
    parts = [
        _processor(),
        f"{cores} cores",
        f"{memory} GiB",
        f"{devices} devices",
        *_accelerators(),
    ]
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
    found: dict[str, int] = {}
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                name = line.partition(":")[2].strip()
                found[name] = found.get(name, 0) + 1
    return [f"{count}x {name}" for name, count in found.items()]


def hashed(data: Any) -> str:
    """Twelve hex digits for plain data: equal data, equal digits."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_RECORDING = 3
"""How the figures of a profile come about; another number keeps those of before from being used."""


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
    )


def kept_profiles() -> Path:
    """Where profiles are kept for this user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlinf" / "profiles"


def _kept(task: str, here: Fingerprints) -> Path:
    return kept_profiles() / f"{task}-{hashed([here.hardware, here.model, here.config])}.json"


def keep_profile(profile: Profile, task: str) -> Path:
    """Keep a profile for later runs of a task; earlier measurements of other sizes stay.

    Returns:
        The file.
    """
    path = _kept(task, Fingerprints(profile.hardware, profile.model, profile.config))
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _readable(path)
    if known is not None:
        together = {
            "components": renewed(known.components, profile.components),
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
