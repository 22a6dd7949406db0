"""A straight line through measured pairs, kept as running sums."""

from __future__ import annotations

import numpy as np


class RunningLine:
    """Least squares through pairs (x, y), y being about ``fixed + slope · x``, neither below 0.

    Kept are sums, so that a line costs little to ask for while others wait.

    Args:
        memory: Factor on the weight of all former pairs with each new one.
    """

    def __init__(self, memory: float = 1.0) -> None:
        self._memory = memory
        # Σw, Σwx, Σwy, Σwx², Σwxy.
        self._sums = np.zeros(5)

    @property
    def weight(self) -> float:
        """Of all pairs together; a new one weighs 1."""
        return float(self._sums[0])

    def note(self, x: float, y: float) -> None:
        """Remember a pair."""
        self._sums *= self._memory
        self._sums += (1.0, x, y, x**2, x * y)

    def fade(self, factor: float) -> None:
        """Let all pairs so far count less."""
        self._sums *= factor

    def mean(self) -> tuple[float, float]:
        """Mean x and y; both 0 where no pair was seen."""
        x, y = self._sums[1:3] / (self._sums[0] or 1.0)
        return float(x), float(y)

    def coefficients(self) -> tuple[float, float]:
        """Fixed part and slope; both 0 where no pair was seen."""
        if not self._sums[0]:
            return 0.0, 0.0
        x, y, squares, products = self._sums[1:] / self._sums[0]
        spread = squares - x**2
        # Of one x alone nothing is known about another.
        slope = (products - x * y) / spread if spread > 1e-9 * squares else 0.0
        slope = min(max(slope, 0.0), y / x) if x > 0 else 0.0
        return float(y - slope * x), float(slope)

    def at(self, x: float) -> float:
        """The line's y."""
        fixed, slope = self.coefficients()
        return fixed + slope * x
