"""Workers whose process does not answer: stopped, swapped out, or stuck in a call of a driver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from rlinf.scheduler.errors import WaitTimeout
from rlinf.scheduler.services.diagnosis import Row, render

log = logging.getLogger(__name__)

_MOST_SECONDS_BETWEEN = 30.0
_LONGEST_GAP_SECONDS = 60.0


class SilentWorkers:
    """Since when workers have not answered, as far as they were asked."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._told: set[str] = set()
        self._rows: list[Row] = []
        self._asked = time.monotonic()
        self._lock = threading.Lock()

    def check(
        self, workers: Iterable[str], ask: Callable[[], list[Row]], deadline_seconds: float
    ) -> None:
        """Of workers that somebody waits for, warn of one that is silent.

        Args:
            workers: Their names.
            ask: Asks every worker of the cluster what it does.
            deadline_seconds: How long one may be silent.

        Raises:
            WaitTimeout: One was for longer.
        """
        pause = min(_MOST_SECONDS_BETWEEN, deadline_seconds / 4)
        with self._lock:
            unasked = time.monotonic() - self._asked
            if unasked >= pause:
                self._rows = ask()
                now = self._asked = time.monotonic()
                silent = [row.worker for row in self._rows if row.silent]
                # Of the time in which nobody asked, it may have answered in all but two moments.
                known = self._since if unasked <= _LONGEST_GAP_SECONDS else {}
                self._since = {worker: known.get(worker, now) for worker in silent}
                self._told &= self._since.keys()
            waited_for = self._since.keys() & set(workers)
            for worker in sorted(waited_for):
                seconds = self._asked - self._since[worker]
                if seconds > deadline_seconds:
                    raise WaitTimeout(
                        f"worker '{worker}' has not answered for {seconds / 60:.1f} minutes: its "
                        "process is stopped, or stuck in a call that nothing else of it gets past."
                        f"\n{render(self._rows)}"
                    )
                if seconds >= pause and worker not in self._told:
                    self._told.add(worker)
                    log.warning(
                        "worker %s has not answered for %.0f s; after %g minutes the run ends",
                        worker, seconds, deadline_seconds / 60,
                    )  # fmt: skip
