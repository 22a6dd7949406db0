"""OpenMP threads of a process in which several threads compute by turns."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft: what the next computation needs comes back by itself


def release_compute_threads() -> None:
    """End the OpenMP threads that the calling thread keeps for its next computation.

    Each thread that computes keeps as many as it computes with. Where those of all threads are more
    than cores, OpenMP no longer lets them wait busily, and to wake them takes longer than a small
    operation does. Nothing happens before torch is imported, or where its OpenMP cannot do it.
    """
    if "torch" in sys.modules:
        pause = _pause()
        if pause is not None:
            pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` (OpenMP 5.0, §3.2.44) of the library that torch computes with."""
    libraries = Path(sys.modules["torch"].__file__ or "").parent / "lib"
    for library in sorted(libraries.glob("lib*omp*")):
        if library.name.startswith(("libgomp", "libomp", "libiomp")):
            with suppress(OSError, AttributeError):
                pause: Callable[[int], int] = ctypes.CDLL(str(library)).omp_pause_resource_all
                return pause
    return None
