"""By how much predicted times were off, so that the next ones are better."""

from __future__ import annotations

_MEMORY = 0.8
"""Factor on the weight of what was seen, with every step since."""
_FARTHEST = 2.0
"""Factor by which one time may be off: what is farther off had a cause of its own."""


class PredictionBias:
    """The factor between predicted and measured seconds, over the last steps.

    One time that was as predicted is always taken for seen, so that after a long while without
    news the factor is near 1 again, and what it kept from being done is tried.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum = 0.0

    def note(self, predicted: float, measured: float) -> None:
        """Remember seconds of something."""
        if predicted > 0:
            self._weight += 1
            self._sum += min(max(measured / predicted, 1 / _FARTHEST), _FARTHEST)

    def next_step(self) -> None:
        """Let what was seen so far count less."""
        self._weight *= _MEMORY
        self._sum *= _MEMORY

    @property
    def factor(self) -> float:
        """By which predicted seconds should be multiplied."""
        return (self._sum + 1) / (self._weight + 1)
