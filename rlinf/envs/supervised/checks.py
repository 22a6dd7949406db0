"""What an env may hand over; anything else is a fault of that env."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from rlinf.envs.base import VECTORS
from rlinf.envs.observation_names import present
from rlinf.envs.results import FaultReason, fault_in_a_line
from rlinf.errors import UserError, shortened

T = TypeVar("T")
_STACK_CHARACTERS = 4000


class EnvSideFault(Exception):  # noqa: N818 - it is a verdict, handled by the host
    """The present episode of an env cannot be used."""

    def __init__(self, reason: FaultReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    @property
    def summary(self) -> str:
        """See :func:`~rlinf.envs.results.fault_in_a_line`."""
        return fault_in_a_line(self.reason, self.detail)


def guarded(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call simulator code; whatever it raises becomes an EnvSideFault.

    Not a UserError: a mistake in the options would be made in every episode. An adapter may raise
    one that says more itself.
    """
    try:
        return call(*arguments, **named)
    except (UserError, EnvSideFault):
        raise
    except Exception as error:
        raise fault_of(error) from error


def fault_of(error: Exception) -> EnvSideFault:
    """What simulator code that raises becomes; its stack is the detail."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    stack = shortened("".join(lines), _STACK_CHARACTERS)
    return EnvSideFault(FaultReason.EXCEPTION, stack)


def answered(form: tuple[str, ...], call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The same, for code that returns so many values; an EnvSideFault where it returns others."""
    try:  # not by `guarded`: a call less, of each step
        found = call(*arguments, **named)
    except (UserError, EnvSideFault):
        raise
    except Exception as error:
        raise fault_of(error) from error
    if type(found) is tuple and len(found) == len(form):  # nearly always
        return found
    if not isinstance(found, (tuple, list)) or len(found) != len(form):
        several = isinstance(found, (tuple, list))
        what = f"{len(found)} values" if several else f"one {type(found).__name__}"
        name = getattr(call, "__name__", "the simulator")
        raise EnvSideFault(FaultReason.MALFORMED, f"{name} returns {what}, not {', '.join(form)}")
    return found


def checked_reward(reward: Any) -> float:
    """The reward as a float; an EnvSideFault where it is no real number, or not finite."""
    kind = type(reward)
    if (kind is float or kind is np.float64) and math.isfinite(reward):  # nearly always
        return float(reward)
    try:
        if isinstance(reward, (str, bytes)):
            raise TypeError(f"it is the text {reward!r:.50}")
        if not isinstance(reward, float) and np.ndim(reward):
            raise TypeError(f"it is an array of shape {np.shape(reward)}")
        value = float(reward)
    except (TypeError, ValueError) as error:
        raise EnvSideFault(FaultReason.MALFORMED, f"the reward is not a number: {error}") from error
    if not math.isfinite(value):
        raise EnvSideFault(FaultReason.NOT_FINITE, f"the reward is {value}")
    return value


def checked_flag(name: str, info: Mapping[str, Any]) -> bool:
    """An entry of the info that is true or false, false where there is none; an EnvSideFault where
    it is something else: a text, NaN and a fraction of success would count as true."""
    value = info.get(name, False)
    if value is False or value is None:  # nearly always
        return False
    if value is True or type(value) is np.bool_:
        return bool(value)
    try:
        found = np.asarray(value)
        fits = found.size == 1 and found.dtype.kind in "bifu" and bool(np.isin(found, (0, 1)).all())
    except Exception:  # noqa: BLE001 - an object of any kind
        fits = False
    if not fits:
        raise EnvSideFault(
            FaultReason.MALFORMED, f"info['{name}'] is {value!r:.100}, not true or false"
        )
    return bool(found.reshape(-1)[0])


def require_array(name: str, value: Any, shape: tuple[int, ...], dtype: Any = None) -> None:
    """Refuse what is no array of this shape and type.

    Raises:
        EnvSideFault: It is none.
    """
    fits = isinstance(value, np.ndarray) and value.shape == shape
    if not fits or (dtype is not None and value.dtype != dtype):
        kind = f"{getattr(value, 'dtype', type(value))}{getattr(value, 'shape', '')}"
        wanted = "an array " if dtype is None else dtype
        raise EnvSideFault(FaultReason.MALFORMED, f"{name} is {kind} instead of {wanted}{shape}")


def _refuse_black(key: str, picture: np.ndarray) -> None:
    # A few pixels, and only where they are black the others.
    if not (picture[::16, ::16].any() or picture.any()):
        raise EnvSideFault(FaultReason.BLACK, f"'{key}' is black: the renderer is lost")


class ObservationRows:
    """The shared arrays of observations, by key [N, ...], and what fits into a row of them."""

    def __init__(self, arrays: Mapping[str, np.ndarray], never_black: Collection[str] = ()) -> None:
        self._keys = arrays.keys()
        self._never_black = never_black
        self._parts = [
            (key, array, array.shape[1:], array.dtype, array.dtype.kind == "f")
            for key, array in arrays.items()
        ]

    def check(self, observation: Any) -> None:
        """Refuse an observation that does not fit.

        Raises:
            EnvSideFault: Other keys, shape or type than declared, a value that is not finite, or a
                black picture of a camera that always sees something.
        """
        if not isinstance(observation, dict) or observation.keys() != self._keys:
            found = sorted(observation) if isinstance(observation, dict) else type(observation)
            raise EnvSideFault(
                FaultReason.MALFORMED, f"observation keys {found} instead of {sorted(self._keys)}"
            )
        for key, _, shape, dtype, is_float in self._parts:
            value = observation[key]
            alike = type(value) is np.ndarray and value.dtype is dtype and value.shape == shape
            if not alike:  # most have the very object that is the type
                require_array(f"'{key}'", value, shape, dtype)
            # A sum of squares is finite only if every term is; it is quick to compute for a vector.
            quick = is_float and len(shape) == 1 and math.isfinite(value.dot(value))
            if is_float and not quick and not np.isfinite(value).all():
                raise EnvSideFault(FaultReason.NOT_FINITE, f"'{key}' holds a NaN or an infinity")
            if self._never_black and key in self._never_black:
                _refuse_black(key, value)

    def check_batch(self, observations: Any, count: int) -> None:
        """Refuse a batch [count, ...] of observations of which not every row could be written.

        Raises:
            EnvSideFault: Other keys, shapes or types than declared.
        """
        if not isinstance(observations, dict) or observations.keys() != self._keys:
            found = sorted(observations) if isinstance(observations, dict) else type(observations)
            raise EnvSideFault(
                FaultReason.MALFORMED, f"observation keys {found} instead of {sorted(self._keys)}"
            )
        for key, _, shape, dtype, _ in self._parts:
            require_array(f"'{key}'", observations[key], (count, *shape), dtype)

    def write(self, observation: Any, row: int) -> None:
        """Copy an observation into ``row``, if :meth:`check` lets it."""
        self.check(observation)
        for key, array, *_ in self._parts:
            array[row] = observation[key]

    def write_sound(self, observations: Any, positions: np.ndarray, rows: np.ndarray) -> None:
        """Copy what is at ``positions`` of a batch that :meth:`check_batch` let, and whose numbers
        are finite there, into ``rows``.

        Raises:
            EnvSideFault: A black picture of a camera that always sees something.
        """
        for key, array, *_ in self._parts:
            value = observations[key][positions]
            if key in self._never_black:
                for picture in value:
                    _refuse_black(key, picture)
            array[rows] = value

    def copy_row(self, source: ObservationRows, row: int) -> None:
        """Copy ``row`` of other arrays of the same kind."""
        for index, (_, target, *_) in enumerate(self._parts):
            target[row] = source._parts[index][1][row]

    def shows(self, observation: Any, row: int) -> bool:
        """Whether ``row`` holds these states; what cameras see may differ by renderer."""
        return all(
            np.array_equal(observation[key], array[row])
            for key, array, *_ in self._parts
            if present(key) in VECTORS
        )
