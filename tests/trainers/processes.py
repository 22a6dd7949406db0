"""Runs a module in processes that work together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from subprocess import PIPE, Popen
from typing import Any


def results_of(
    module: str, arguments: Callable[[int], Sequence[object]], *, seconds: float, count: int = 2
) -> list[Any]:
    """What ``module``, as a program, pickles to its output in each of the processes.

    Args:
        module: Its name.
        arguments: Those of a rank.
        seconds: How long a process may take.
        count: Of the processes.
    """
    processes = [
        Popen([sys.executable, "-m", module, *map(str, arguments(rank))], stdout=PIPE, stderr=PIPE)
        for rank in range(count)
    ]
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=seconds)
        assert process.returncode == 0, errors.decode()[-3000:]
        results.append(pickle.loads(output))
    return results
