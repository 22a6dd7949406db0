"""Quick versions of what dm_control's tasks call at every step.

A third of a step of a light task goes into looking up elements of the model by name, into reward
functions that take arrays of any kind, and into comparing the counts of MuJoCo's warnings. Each
function here handles the common case and passes everything else on; results are those of the
original to the last bit and of the same type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_control.mujoco import engine, index
from dm_control.utils import rewards

_tolerance = rewards.tolerance
_convert_key = index.FieldIndexer._convert_key
_check_invalid_state = engine.Physics.check_invalid_state
_PLAIN = frozenset((int, float, np.float64))
_FLOATS = frozenset((float, np.float64))
_FROM_ZERO = frozenset(("cosine", "linear", "quadratic"))  # may be 0 at the margin
_LOOKED_UP = "_rlinf_looked_up"


def use_quick_versions() -> None:
    """Let dm_control call the functions of this module; may be called again."""
    rewards.tolerance = tolerance
    index.FieldIndexer._convert_key = convert_key
    engine.Physics.check_invalid_state = check_invalid_state


def tolerance(
    x: Any,
    bounds: tuple[Any, Any] = (0.0, 0.0),
    margin: Any = 0.0,
    sigmoid: str = "gaussian",
    value_at_margin: Any = 0.1,
) -> Any:
    """Return what dm_control's ``tolerance`` returns; quick for one number."""
    lower, upper = bounds
    if (
        type(x) in _FLOATS
        and type(margin) in _PLAIN
        and type(lower) in _PLAIN
        and type(upper) in _PLAIN
        and lower <= upper
        and margin >= 0
        and (0 < value_at_margin < 1 or (value_at_margin == 0 and sigmoid in _FROM_ZERO))
    ):
        if lower <= x <= upper:
            return 1.0
        if margin == 0:
            return 0.0
        distance = np.float64(lower - x if x < lower else x - upper) / margin
        return float(rewards._sigmoids(distance, value_at_margin, sigmoid))
    return _tolerance(x, bounds, margin, sigmoid, value_at_margin)


def convert_key(field: Any, key: Any) -> Any:
    """Return what ``FieldIndexer._convert_key`` returns; names are looked up once per model."""
    axes = field._axes
    try:
        if type(key) is tuple:
            if len(key) == 2 and axes[1] is not None:
                return _place(axes[0], key[0]), _place(axes[1], key[1])
        elif type(key) is str:
            return _place(axes[0], key)
    except KeyError:  # the original has the words for it
        pass
    return _convert_key(field, key)


def _place(axis: Any, item: Any) -> Any:
    """What ``axis.convert_key_item`` returns; kept with the axis, which is the model's."""
    known = vars(axis).setdefault(_LOOKED_UP, {})
    if type(item) is list and all(type(each) is str for each in item):
        name: Any = tuple(item)
    elif type(item) is str:
        name = item
    else:
        return axis.convert_key_item(item)
    if name not in known:
        known[name] = axis.convert_key_item(item)
    return known[name]


def check_invalid_state(physics: Any) -> _Watch:
    """Return what ``Physics.check_invalid_state`` returns."""
    return _Watch(physics)


class _Watch:
    """The context of ``Physics.check_invalid_state``: raises where MuJoCo has warned."""

    __slots__ = ("_before", "_physics")

    def __init__(self, physics: Any) -> None:
        self._physics = physics

    def __enter__(self) -> None:
        self._before = self._physics._warnings.tobytes()

    def __exit__(self, kind: Any, error: Any, stack: Any) -> None:
        warnings = self._physics._warnings
        if kind is None and warnings.tobytes() != self._before:
            original = _check_invalid_state(self._physics)
            original.__enter__()
            np.copyto(self._physics._warnings_before, np.frombuffer(self._before, warnings.dtype))
            original.__exit__(None, None, None)
