"""What decoding, training and moves took, as measured."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np

_BIAS_MEMORY = 0.8
"""Factor on the weight of what was seen, with every step since."""
_FARTHEST = 2.0
"""Factor by which one time may be off: what is farther off had a cause of its own."""
_FADES = 0.8
"""Factor on the weight of former phases in the speeds of numbers of ranks."""
_FORGOTTEN = 0.01
"""Weight in batches below which a number of ranks is taken for not seen."""
_MOVES = 5
"""Moves whose median counts."""
_DOUBTED = 0.9
"""Factor on what a move takes with every phase without one."""


class RunningLine:
    """Least squares through pairs (x, y), y being about ``fixed + slope · x``, neither below 0.

    Kept are sums, so that a line costs little to ask for while others wait; all former pairs weigh
    ``memory`` times as much with each new one.
    """

    def __init__(self, memory: float = 1.0) -> None:
        self._memory = memory
        self._sums = np.zeros(5)  # Σw, Σwx, Σwy, Σwx², Σwxy

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
        self._weight *= _BIAS_MEMORY
        self._sum *= _BIAS_MEMORY

    @property
    def factor(self) -> float:
        """By which predicted seconds should be multiplied."""
        return (self._sum + 1) / (self._weight + 1)


class TrainerTimes:
    """What updates and moves took, over training steps.

    Attributes:
        batches: Seconds of the global batches of a phase in their order, by one rank; each is the
            average over the last phases, as later batches have longer answers.
        moves: Seconds of the last changes of the number of ranks.
        lines: Seconds of a batch against its tokens, by the number of ranks that trained on it.
        phases: That are over.
    """

    def __init__(self) -> None:
        self.batches: dict[int, float] = {}
        self.moves: deque[float] = deque(maxlen=_MOVES)
        self.lines: dict[int, RunningLine] = {}
        self.phases = 0
        self._moved_in = 0  # phase of the last move

    def note_batch(self, number: int, tokens: int, seconds: float, size: int) -> None:
        """Remember what a batch of so many tokens took on so many ranks."""
        alone = seconds * self.speed(size)
        self.batches[number] = 0.5 * (self.batches.get(number, alone) + alone)
        if self.phases:  # the first one also allocates memory and loads libraries
            self.lines.setdefault(size, RunningLine()).note(tokens, seconds)

    def end_phase(self) -> None:
        """Let what was measured so far count less for speeds."""
        self.phases += 1
        for line in self.lines.values():
            line.fade(_FADES)
        self.lines = {n: line for n, line in self.lines.items() if line.weight > _FORGOTTEN}

    def speed(self, size: int) -> float:
        """How many times as fast as one rank so many train.

        Measured against the fewest ranks that were seen, on as many tokens, and at most as many
        times as they are more. One batch of that highest speed is taken for seen: so a number of
        ranks that was slow once is tried again.
        """
        line = self.lines.get(size)
        if line is None:
            return float(size)
        fewest = min(self.lines)
        tokens, seconds = line.mean()
        measured = fewest * self.lines[fewest].at(tokens) / seconds
        return (line.weight * min(measured, size) + size) / (line.weight + 1)

    def speeds(self, sizes: Iterable[int]) -> dict[int, float]:
        """:meth:`speed` of several numbers of ranks."""
        return {size: self.speed(size) for size in sizes}

    def note_move(self, seconds: float) -> None:
        """Remember what a move took."""
        self.moves.append(seconds)
        self._moved_in = self.phases

    @property
    def move_seconds(self) -> float | None:
        """A change of the number of ranks; None where none was seen.

        The median of the last ones, so that one which was held up does not count; less with every
        phase without any, so that a number that says moves are not worth it is not believed for
        ever.
        """
        if not self.moves:
            return None
        without = max(self.phases - self._moved_in - 1, 0)
        return statistics.median(self.moves) * _DOUBTED**without

    def seconds_left(self, done: int, count: int) -> float | None:
        """Of the batches after the first ``done`` of ``count``; None: not known."""
        if not self.batches:
            return None
        # In the first phase later batches are not known, and taken for as long as those before.
        mean = sum(self.batches.values()) / len(self.batches)
        return sum(self.batches.get(number, mean) for number in range(done, count))
