"""Pictures of gymnasium's environments as policies read them: [H, W, 3] or [n, H, W, 3]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlinf.envs.results import FaultReason
from rlinf.envs.supervised.checks import EnvSideFault
from rlinf.errors import ConfigError

_SIDE = 16
"""Pixels of a side from which on bytes in rows and columns are a picture."""
_COLOURS = 3
_TURN_OR_FLATTEN = (
    "gymnasium.wrappers.TransformObservation, or let gymnasium.wrappers.FlattenObservation make "
    "states of it"
)


@dataclass(frozen=True)
class PictureSpace:
    """How an environment shows a picture, or several that follow each other."""

    name: str
    """Of the observation in the environment, for messages."""
    shown: tuple[int, ...]
    """Its shape there."""
    shape: tuple[int, ...]
    """[H, W, 3] or [n, H, W, 3]."""
    turned: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def of(cls, name: str, space: gymnasium.Space[Any]) -> PictureSpace | None:
        """What bytes are as pictures; None where they are none, as a table of bytes is.

        With sides of at least 16 pixels, H and W, these are pictures, in colours or of grey, n of
        them one after the other: [H, W], [H, W, 1], [1, H, W], [H, W, 3], [3, H, W], [n, H, W],
        [H, W, n], [n, H, W, 1], [n, 1, H, W], [n, H, W, 3] and [n, 3, H, W], with n below 16.
        [H, W, 3] are pictures of any size.

        Raises:
            ConfigError: Bytes in rows and columns that are in none of these forms; or pictures, and
                depths in rows and columns, that are no bytes, whose values would become states.
        """
        shape = space.shape or ()
        if not isinstance(space, spaces.Box) or len(shape) < 2:
            return None
        turned = _turned(shape)
        if space.dtype != np.uint8:
            if turned is not None and sorted(shape)[-2] >= _SIDE and _is_like_pictures(space):
                raise ConfigError(
                    f"{name} is {space.dtype} {list(shape)} from {space.low.min():g} to "
                    f"{space.high.max():g}, as a picture or depths; pictures are uint8, from 0 to "
                    "255: leave it out with gymnasium.wrappers.FilterObservation, turn it with "
                    f"{_TURN_OR_FLATTEN}",
                    key="options.id",
                )
            return None
        if turned is not None:
            return cls(name, shape, turned(np.zeros(shape, np.uint8)).shape, turned)
        if sorted(shape)[-2] < _SIDE:
            return None
        raise ConfigError(
            f"{name} is uint8 {list(shape)}; pictures are uint8 [H, W, 3], [H, W], [n, H, W] or "
            f"[n, H, W, 3], channels last or first: turn it with {_TURN_OR_FLATTEN}",
            key="options.id",
        )

    @property
    def space(self) -> spaces.Box:
        """Of what policies read."""
        return spaces.Box(0, 255, self.shape, np.uint8)

    def read(self, value: Any) -> np.ndarray:
        """What policies read of what the environment shows; an EnvSideFault where that is of
        another shape or type."""
        array = np.asarray(value)
        if array.shape != self.shown or array.dtype != np.uint8:
            raise EnvSideFault(
                FaultReason.MALFORMED,
                f"{self.name} is {array.dtype}{list(array.shape)}, not uint8{list(self.shown)}",
            )
        return self.turned(array)


def _is_like_pictures(space: spaces.Box) -> bool:
    """Whether values go from 0 to 255 or, of floats, from 0 to 1; or there is one in each place of
    rows and columns, as of a camera for depths, in whichever unit."""
    if math.prod(space.shape) == math.prod(sorted(space.shape)[-2:]):
        return True
    most = (255, 1) if space.dtype.kind == "f" else (255,)
    return not space.low.any() and any(bool((space.high == each).all()) for each in most)


def _turned(shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes [H, W, 3] or [n, H, W, 3] of pictures of a shape; None of what is no picture."""
    if len(shape) == 3 and shape[2] == _COLOURS:
        return np.asarray
    for form, turned in _FORMS.items():
        if len(form) == len(shape) and all(map(_fits, form, shape)):
            return turned
    return None


def _fits(letter: str, size: int) -> bool:
    if letter in "HW":
        return size >= _SIDE
    return size < _SIDE if letter == "n" else size == int(letter)


def _coloured(grey: np.ndarray) -> np.ndarray:
    """[..., H, W] as [..., H, W, 3]."""
    return np.repeat(grey[..., None], _COLOURS, axis=-1)


_FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "HW": _coloured,
    "HW1": lambda array: _coloured(array[..., 0]),
    "1HW": lambda array: _coloured(array[0]),
    "3HW": lambda array: np.moveaxis(array, 0, -1),
    "nHW": _coloured,
    "HWn": lambda array: _coloured(np.moveaxis(array, -1, 0)),
    "nHW3": np.asarray,
    "nHW1": lambda array: _coloured(array[..., 0]),
    "n3HW": lambda array: np.moveaxis(array, 1, -1),
    "n1HW": lambda array: _coloured(array[:, 0]),
}
"""By what each axis is, the first that fits: rows, columns, so many, or n below a side."""
