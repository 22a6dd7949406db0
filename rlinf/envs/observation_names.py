"""Names of observations, of the present step and of those before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_EARLIER = "@"
_DEPTH = "depth."
_CAMERAS = {"main_images": "main", "wrist_images": "wrist"}


def depth_of(picture: str) -> str:
    """Return the name of the depth of what a picture shows: ``depth.main`` of ``main_images``,
    ``depth.NAME`` of ``images.NAME``."""
    return _DEPTH + _CAMERAS.get(picture, picture.rpartition(".")[2])


def is_depth(key: str) -> bool:
    """Whether an observation of this name is the depth of what a camera sees."""
    return key.startswith(_DEPTH)


def earlier(key: str, steps: int) -> str:
    """Return the name of what ``key`` showed some steps ago, ``main_images@1``."""
    return f"{key}{_EARLIER}{steps}" if steps else key


def present(key: str) -> str:
    """Return the name of the observation that this is an earlier one of, itself if it is none."""
    return key.partition(_EARLIER)[0]


def age(key: str) -> int:
    """Return how many steps ago an observation of this name was made; 0: it is the present one."""
    return int(key.partition(_EARLIER)[2] or 0)


def steps_shown(keys: Iterable[str]) -> int:
    """Return of how many successive steps there are observations among these names."""
    return 1 + max(map(age, keys), default=0)


def without_earlier(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs to the present observations, of a mapping by name."""
    return {key: value for key, value in shown.items() if not age(key)}
