"""Profiles that are kept for later runs, and what makes them valid."""

from __future__ import annotations

import os
from pathlib import Path

from rlinf.config.dump import to_data
from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig
from rlinf.planner.fingerprint import Fingerprints, hardware_fingerprint, hashed
from rlinf.planner.measure import renewed
from rlinf.planner.overhead import joined
from rlinf.planner.profile import Profile

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
