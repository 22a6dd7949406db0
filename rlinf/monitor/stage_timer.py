"""Wall time per stage of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimer:
    """Adds up the seconds of named stages until they are collected.

    Example::

        timer = StageTimer()
        with timer.measure("sync_weights"):
            ...
        metrics.update(timer.collect())      # {"time/sync_weights": 0.12}
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of a ``with`` block to a stage, also when it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - begin

    def add(self, stage: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds[stage] += seconds

    def collect(self, prefix: str = "time/") -> dict[str, float]:
        """Return the seconds of every stage, as metrics, and begin anew."""
        collected = {prefix + stage: seconds for stage, seconds in self._seconds.items()}
        self._seconds.clear()
        return collected
