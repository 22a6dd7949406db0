"""Counts faults and stops the run when they are too many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlinf.envs.results import EnvFault, EpisodeRecord
from rlinf.errors import RunFailure


class FaultWatch:
    """The part of faulty episodes among the last ones.

    Args:
        max_rate: Legal part of faulty episodes.
        window: Episodes over which it is taken. The run stops when more than
            ``max_rate * window`` of the last ``window`` episodes were faulty, so that a single
            early fault does not count as a rate of one.
    """

    def __init__(self, max_rate: float, window: int) -> None:
        self._max_rate = max_rate
        self._outcomes: deque[bool] = deque(maxlen=window)
        self._first: EnvFault | None = None
        self.counts: Counter[str] = Counter()

    def note_fault(self, fault: EnvFault) -> None:
        """Count a fault."""
        self._first = self._first or fault
        self.counts[fault.reason.value] += 1
        self._outcomes.append(True)

    def note_episodes(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Count the episodes that ended as they should."""
        self._outcomes.extend(False for episode in episodes if episode.valid)

    def check(self) -> None:
        """Stop the run when the rate is passed.

        Raises:
            RunFailure: It is; the message holds the first fault.
        """
        window, found = self._outcomes.maxlen or 1, sum(self._outcomes)
        if found <= self._max_rate * window or self._first is None:
            return
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        raise RunFailure(
            f"{found} of the last {len(self._outcomes)} episodes were faulty, more than "
            f"env.max_fault_rate={self._max_rate:g} of {window} allows ({counts}). "
            f"The first fault, {self._first.reason.value} in env {self._first.env}:\n"
            f"{self._first.detail}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the outcomes that count and the totals by reason."""
        return {"outcomes": np.array(self._outcomes, bool), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self._outcomes.clear()
        self._outcomes.extend(bool(outcome) for outcome in state["outcomes"])
        self.counts = Counter({name: int(count) for name, count in state["counts"].items()})
