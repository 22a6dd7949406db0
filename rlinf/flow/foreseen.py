"""How what was foreseen came out, so that it is foreseen better."""

from __future__ import annotations

_MEMORY = 0.8
"""Factor on the weight of what was seen, with every step since."""
_FARTHEST = 2.0
"""Factor by which one time may be off: what is farther off had a cause of its own."""


class Foreseen:
    """The factor between seconds as foreseen and as they were, over the last steps.

    One time that came out as foreseen is always taken for seen, so that after a long while without
    news the factor is near 1 again, and what it kept from being done is tried.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum = 0.0

    def note(self, foreseen: float, seconds: float) -> None:
        """Remember how long something took."""
        if foreseen > 0:
            self._weight += 1
            self._sum += min(max(seconds / foreseen, 1 / _FARTHEST), _FARTHEST)

    def next_step(self) -> None:
        """Let what was seen so far count less."""
        self._weight *= _MEMORY
        self._sum *= _MEMORY

    @property
    def factor(self) -> float:
        """By which what is foreseen should be multiplied."""
        return (self._sum + 1) / (self._weight + 1)
