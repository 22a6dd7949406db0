"""Quick versions of what MetaWorld's rewards and observations call at every step.

NumPy, SciPy and dm_control's reward functions take arrays of any kind and spend most of a call on
finding out that they were given one number or one vector. Each function here handles that case and
passes everything else on. Results are those of the original to the last bit and of the same type:
a ``float`` in place of a ``numpy.float64`` would change the precision of what is added to it.
"""

from __future__ import annotations

import math
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
from metaworld.sawyer_xyz_env import SawyerMocapBase
from metaworld.utils import reward_utils

_PLAIN = frozenset((int, float, np.float64))
_FLOATS = frozenset((float, np.float64))
_DOUBLE = np.dtype(np.float64)
_VALUE_AT_MARGIN = 0.1
_LONG_TAIL = float(np.sqrt(1 / _VALUE_AT_MARGIN - 1))
_FAR = 1e100


class QuickRotation:
    """What tasks use of ``scipy.spatial.transform.Rotation``, for one matrix that is a rotation.

    scipy spends a quarter of a step on proving that; a matrix from MuJoCo is one. The arithmetic is
    scipy's: F. Landis Markley, "Unit Quaternion from Rotation Matrix", 2008.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix: list[list[float]] = matrix.tolist()

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> QuickRotation:
        """Return the rotation of ``matrix``."""
        return cls(matrix)

    def as_quat(self) -> tuple[float, float, float, float]:
        """Return the unit quaternion (x, y, z, w)."""
        m = self._matrix
        trace = m[0][0] + m[1][1] + m[2][2]
        candidates = (m[0][0], m[1][1], m[2][2], trace)
        i = candidates.index(max(candidates))
        if i == 3:
            q = [m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1 + trace]
        else:
            j, k = (i + 1) % 3, (i + 2) % 3
            q = [0.0, 0.0, 0.0, m[k][j] - m[j][k]]
            q[i] = 1 - trace + 2 * m[i][i]
            q[j], q[k] = m[j][i] + m[i][j], m[k][i] + m[i][k]
        norm = math.sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3])
        return q[0] / norm, q[1] / norm, q[2] / norm, q[3] / norm


def norm(x: Any, ord: int | None = None, **named: Any) -> Any:
    """Return what ``numpy.linalg.norm`` returns; quick for a vector or a number of doubles."""
    if (ord is None or ord == 2) and not named:
        kind = type(x)
        if kind is np.ndarray and x.ndim == 1 and x.dtype is _DOUBLE:
            x = x.ravel("K")
            return np.sqrt(x.dot(x))
        if kind is np.float64 and ord is None:
            return np.sqrt(x * x)
    return np.linalg.norm(x, ord, **named)


def hstack(parts: Any, **named: Any) -> Any:
    """Return what ``numpy.hstack`` returns; quick for vectors only or doubles only."""
    if type(parts) is tuple and not named:
        if all(type(part) is np.float64 for part in parts):
            return np.array(parts)
        if all(type(part) is np.ndarray and part.ndim == 1 for part in parts):
            return np.concatenate(parts)
    return np.hstack(parts, **named)


def tolerance(
    x: Any,
    bounds: tuple[Any, Any] = (0.0, 0.0),
    margin: Any = 0.0,
    sigmoid: Any = "gaussian",
    value_at_margin: Any = _VALUE_AT_MARGIN,
) -> Any:
    """Return what MetaWorld's ``tolerance`` returns; quick for a number and a long tail."""
    lower, upper = bounds
    if (
        sigmoid == "long_tail"
        and value_at_margin == _VALUE_AT_MARGIN
        and type(x) in _FLOATS
        and type(margin) in _FLOATS
        and type(lower) in _PLAIN
        and type(upper) in _PLAIN
        and lower <= upper
        and margin > 0
    ):
        value, width = float(x), float(margin)
        if lower <= value <= upper:
            return 1.0
        distance = float(lower - value if value < lower else value - upper) / width
        if distance < _FAR:
            # `** 2` and not a product: the last bit of the two may differ.
            return 1 / ((distance * _LONG_TAIL) ** 2 + 1)
    return reward_utils.tolerance(x, bounds, margin, sigmoid, value_at_margin)


def hamacher_product(a: Any, b: Any) -> Any:
    """Return what MetaWorld's ``hamacher_product`` returns; quick for doubles in [0, 1]."""
    if type(a) in _FLOATS and type(b) in _FLOATS:
        x, y = float(a), float(b)
        if 0.0 <= x <= 1.0 and 0.0 <= y <= 1.0:
            denominator = x + y - (x * y)
            if not denominator > 0:
                return 0
            product = (x * y) / denominator
            if product <= 1.0:
                return product if type(a) is type(b) is float else np.float64(product)
    return reward_utils.hamacher_product(a, b)


def _variant(module: ModuleType, **members: Any) -> ModuleType:
    """Return a module that is ``module`` but for some members."""
    variant = ModuleType(module.__name__)
    vars(variant).update({**vars(module), **members})
    return variant


# By the names under which the modules of the tasks know the originals.
_SUBSTITUTES: dict[str, Any] = {
    "np": _variant(np, hstack=hstack, linalg=_variant(np.linalg, norm=norm)),
    "reward_utils": _variant(reward_utils, tolerance=tolerance, hamacher_product=hamacher_product),
    "tolerance": tolerance,
    "Rotation": QuickRotation,
}


def quick_class(base: Any) -> Any:
    """Return a subclass of a MetaWorld env class whose methods call the quick versions.

    A method looks names up in the module that it comes from; the copies here look them up in a copy
    of that module's names, so that MetaWorld itself stays as it is.
    """
    members: dict[str, Any] = {"__module__": base.__module__}
    for owner in reversed(base.__mro__):
        if issubclass(owner, SawyerMocapBase):
            for name, member in vars(owner).items():
                if not name.startswith("__"):
                    members.pop(name, None)
                    quick = _quick(member)
                    if quick is not None:
                        members[name] = quick
    return type(base.__name__, (base,), members)


def _quick(member: Any) -> Any:
    """Return the quick version of a method or property, None for any other member."""
    if isinstance(member, staticmethod):
        return staticmethod(_quick(member.__func__))
    if type(member) is property:
        return property(_quick(member.fget))
    if not isinstance(member, FunctionType):
        return None
    cells: tuple[CellType, ...] = member.__closure__ or ()
    enclosed = dict(zip(member.__code__.co_freevars, cells, strict=True))
    if member.__name__ == "inner" and "func" in enclosed:
        # A check around the method: whether a task was set.
        return _quick(enclosed["func"].cell_contents)
    names = {**member.__globals__, **_SUBSTITUTES}
    copy = FunctionType(member.__code__, names, member.__name__, member.__defaults__, cells)
    copy.__kwdefaults__ = member.__kwdefaults__
    return copy
