"""Runs a module in processes that work together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from subprocess import PIPE, Popen
from typing import Any

from tests.warm import Warm


def results_of(
    module: str, arguments: Callable[[int], Sequence[object]], *, seconds: float, count: int = 2
) -> list[Any]:
    """What ``module``, as a program, pickles to its output in each of the processes.

    Two are forks of a process with torch; more, which only slow tests ask for, are interpreters of
    their own, with hash seeds of their own.

    Args:
        module: Its name.
        arguments: Those of a rank.
        seconds: How long a process may take.
        count: Of the processes.
    """
    processes = []
    for rank in range(count):
        words = ["-m", module, *map(str, arguments(rank))]
        process: Any = Warm(words) if count <= 2 else None
        processes.append(process or Popen([sys.executable, *words], stdout=PIPE, stderr=PIPE))
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=seconds)
        assert process.returncode == 0, errors.decode()[-3000:]
        results.append(pickle.loads(output))
    return results
