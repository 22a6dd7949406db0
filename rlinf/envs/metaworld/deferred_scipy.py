"""SciPy's rotations for MetaWorld's modules, imported when one is asked for.

MetaWorld imports them with each of its tasks, which takes half of the start of an env process, and
the envs here compute with :class:`~rlinf.envs.metaworld.quick.QuickRotation`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_MODULE = "scipy.spatial.transform"


class _DeferredRotation:
    """What ``scipy.spatial.transform.Rotation`` is, as soon as something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        from scipy.spatial.transform import Rotation

        return getattr(Rotation, name)


@contextmanager
def deferred_rotations() -> Iterator[None]:
    """Modules imported within know the rotations by a name that imports them when it is used."""
    if _MODULE in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(_MODULE)
    stand_in.Rotation = _DeferredRotation()
    sys.modules[_MODULE] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_MODULE) is stand_in:
            del sys.modules[_MODULE]
