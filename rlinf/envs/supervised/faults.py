"""What env processes report besides the shared block, and how many faults are too many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.envs.results import EnvFault
from rlinf.errors import RunFailure


@dataclass
class EnvReport:
    """What env processes report besides the block."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    """``row`` (-1: none), ``reason``, ``detail``, ``episode``, and ``never_began``: whether it was
    in a reset of a task that never went well."""
    unplayed: list[dict[str, Any]] = field(default_factory=list)
    """``row``, ``episode_id``, ``seed``, ``task`` of listed episodes that never began."""
    remarks: list[str] = field(default_factory=list)
    """What the user is to know, in words: of tasks that are played no longer, and of simulators."""

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.faults or self.unplayed or self.remarks)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Take what an answer holds of it."""
        for name, found in vars(self).items():
            found.extend(answer.get(name, ()))


class FaultWatch:
    """The part of faulty episodes among the last ones.

    The run stops when more than ``max_rate * window`` of the last ``window`` episodes were faulty,
    so that a single early fault does not count as a rate of one.
    """

    def __init__(self, max_rate: float, window: int) -> None:
        self._max_rate = max_rate
        self._outcomes: deque[bool] = deque(maxlen=window)
        self._first: EnvFault | None = None
        self._counts: Counter[str] = Counter()

    def note_fault(self, fault: EnvFault) -> None:
        """Count a fault."""
        self._first = self._first or fault
        self._counts[fault.reason.value] += 1
        self._outcomes.append(True)

    def note_sound(self, episodes: int) -> None:
        """Count episodes that ended as they should."""
        self._outcomes.extend([False] * episodes)

    def check(self) -> None:
        """Stop the run when the rate is passed.

        Raises:
            RunFailure: It is; the message holds the first fault.
        """
        if self._first is None:  # nearly always
            return
        window, found = self._outcomes.maxlen or 1, sum(self._outcomes)
        if found <= self._max_rate * window:
            return
        env = self._first.env
        where = f"in env {env}" if env >= 0 else "while no env was at work"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()))
        raise RunFailure(
            f"{found} of the last {len(self._outcomes)} episodes were faulty, more than "
            f"env.train.max_fault_rate={self._max_rate:g} of {window} allows ({counts}). "
            f"The first fault, {self._first.reason.value} {where}:\n"
            f"{self._first.detail}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The outcomes that count and the totals by reason."""
        return {"outcomes": np.array(self._outcomes, bool), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self._outcomes.clear()
        self._outcomes.extend(bool(outcome) for outcome in state["outcomes"])
        self._counts = Counter({name: int(count) for name, count in state["counts"].items()})
