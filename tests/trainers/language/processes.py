"""Runs a module in two processes that work together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from subprocess import PIPE, Popen
from typing import Any


def results_of_two(
    module: str, arguments: Callable[[int], Sequence[object]], *, seconds: float
) -> list[Any]:
    """What ``module``, as a program, pickles to its output in each of two processes.

    Args:
        module: Its name.
        arguments: Those of a rank.
        seconds: How long a process may take.
    """
    processes = [
        Popen([sys.executable, "-m", module, *map(str, arguments(rank))], stdout=PIPE, stderr=PIPE)
        for rank in range(2)
    ]
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=seconds)
        assert process.returncode == 0, errors.decode()[-3000:]
        results.append(pickle.loads(output))
    return results
