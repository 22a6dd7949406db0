"""What ``rlinf check demonstrations`` looks at in a LeRobot set, whose rows were compared when it
was opened."""

from __future__ import annotations

import numpy as np

from rlinf.checkpoint.manifest import record_file
from rlinf.conformance import CheckResult, outcome, require
from rlinf.data.lerobot.layout import ACTION, INDICES, SUCCESS, VIDEO_HASHES
from rlinf.data.lerobot.pictures import VideoPictures
from rlinf.data.lerobot.reader import LeRobotSet
from rlinf.errors import ConfigError


def check_lerobot_set(found: LeRobotSet) -> list[CheckResult]:
    """Run every check on a set."""
    checks = (
        _check_episodes,
        _check_numbers,
        _check_actions,
        _check_pictures,
        _check_tasks,
        _check_success,
    )
    return [outcome(f.__name__.removeprefix("_check_"), f, found, (ConfigError,)) for f in checks]


def _check_episodes(found: LeRobotSet) -> str:
    lengths = [each.length for each in found.episodes]
    return f"{len(lengths)} of {min(lengths)} to {max(lengths)} steps, {found.fps:g} a second"


def _vectors(found: LeRobotSet) -> list[str]:
    return [
        name
        for name, each in found.features.items()
        if not each.pictured and each.dtype != "string" and name not in INDICES
    ]


def _check_numbers(found: LeRobotSet) -> str:
    for name in (names := _vectors(found)):
        good = np.isfinite(found.vectors(name)).all(axis=1)
        for number, each in enumerate(found.episodes):
            own = good[each.first :][: each.length]
            require(
                own.all(),
                f"`{name}` holds a NaN or an infinity, first in step {int(np.argmin(own))} of "
                f"episode {number}",
            )
    return f"{', '.join(names)}: all finite" if names else "none"


def _check_actions(found: LeRobotSet) -> str:
    if ACTION in found.features:
        return f"`{ACTION}` of {found.vectors(ACTION).shape[1]} dimensions"
    others = [n for n in _vectors(found) if not n.startswith(("next.", "observation."))]
    require(others, f"it has no feature `{ACTION}`, nor another that could hold actions")
    return f"none called `{ACTION}`; data.actions may name {', '.join(others)}"


def _check_pictures(found: LeRobotSet) -> str:
    cameras = [name for name, each in found.features.items() if each.pictured]
    ends = [row for each in found.episodes for row in (each.first, each.first + each.length - 1)]
    for name in cameras:
        pictures = found.pictures(name)
        if isinstance(pictures, VideoPictures):
            pictures.check()
        seen = pictures[np.unique(ends)]
        require(seen.any(), f"`{name}` is black in the first and last frame of every episode")
    for file, written in (found.source.get(VIDEO_HASHES) or {}).items():
        same = record_file(found.directory / file).sha256 == written
        require(same, f"{file} is not what was written: its SHA-256 is another; copy it again")
    if not cameras:
        return "none"
    return f"{', '.join(cameras)}: the first and last frame of every episode can be read"


def _check_tasks(found: LeRobotSet) -> str:
    if not any(text.strip() for text in found.texts):  # as of an environment that words none
        return "none in words: taken for the environment's only one, or for what data.tasks says"
    told = np.array([bool(text.strip()) for text in found.texts])[found.text_numbers]
    for number, each in enumerate(found.episodes):
        own = told[each.first :][: each.length]
        require(own.all(), f"step {int(np.argmin(own))} of episode {number} is of no task")
    return f"{len({found.texts[number] for number in found.text_numbers.tolist()})} in words"


def _check_success(found: LeRobotSet) -> str:
    if SUCCESS not in found.features:
        return "not recorded"
    good = sum(found.success)
    require(good, "no episode succeeded")
    return f"{good} of {len(found.episodes)} episodes succeeded"
