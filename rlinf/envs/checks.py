"""What an env may hand over; anything else is a fault of that env."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from rlinf.envs.records import FaultReason

T = TypeVar("T")
_STACK_CHARACTERS = 4000


class EnvSideFault(Exception):  # noqa: N818 - it is a verdict, handled by the host
    """The present episode of an env cannot be used."""

    def __init__(self, reason: FaultReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def guarded(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call simulator code; whatever it raises becomes a fault of its env.

    Raises:
        EnvSideFault: The simulator raised.
    """
    try:
        return call(*arguments, **named)
    except Exception as error:
        stack = "".join(traceback.format_exception(error))[-_STACK_CHARACTERS:]
        raise EnvSideFault(FaultReason.EXCEPTION, stack) from error


def checked_reward(reward: Any) -> float:
    """Return the reward as a float.

    Raises:
        EnvSideFault: It is no real number, or not finite.
    """
    if not isinstance(reward, numbers.Real | np.bool_) and np.shape(reward) != ():
        raise EnvSideFault(
            FaultReason.MALFORMED, f"the reward is not a number: {type(reward).__name__}"
        )
    try:
        value = float(reward)
    except (TypeError, ValueError) as error:
        raise EnvSideFault(FaultReason.MALFORMED, f"the reward is not a number: {error}") from error
    if not math.isfinite(value):
        raise EnvSideFault(FaultReason.NOT_FINITE, f"the reward is {value}")
    return value


def check_observation(observation: Any, rows: Mapping[str, np.ndarray]) -> None:
    """Refuse an observation that does not fit a row of the shared arrays.

    Raises:
        EnvSideFault: Other keys, shape or type than declared, or a value that is not finite.
    """
    if not isinstance(observation, Mapping) or observation.keys() != rows.keys():
        found = sorted(observation) if isinstance(observation, Mapping) else type(observation)
        raise EnvSideFault(
            FaultReason.MALFORMED, f"observation keys {found} instead of {sorted(rows)}"
        )
    for key, target in rows.items():
        value = observation[key]
        shape, dtype = target.shape[1:], target.dtype
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            kind = f"{getattr(value, 'dtype', type(value))}{getattr(value, 'shape', '')}"
            raise EnvSideFault(
                FaultReason.MALFORMED, f"'{key}' is {kind} instead of {dtype}{shape}"
            )
        if dtype.kind == "f" and not np.isfinite(value).all():
            raise EnvSideFault(FaultReason.NOT_FINITE, f"'{key}' holds a NaN or an infinity")


def write_observation(observation: Any, rows: Mapping[str, np.ndarray], row: int) -> None:
    """Copy one observation into its row of the shared arrays.

    Raises:
        EnvSideFault: It does not fit.
    """
    check_observation(observation, rows)
    for key, target in rows.items():
        target[row] = observation[key]


def same_observation(observation: Any, rows: Mapping[str, np.ndarray], row: int) -> bool:
    """Return whether a rebuilt env shows the states it had; images may differ by renderer."""
    return all(
        np.array_equal(observation[key], target[row])
        for key, target in rows.items()
        if target.dtype.kind == "f"
    )
