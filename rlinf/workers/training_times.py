"""What training takes, as measured: batches, numbers of ranks, and moves between these."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from rlinf.rescale.running_line import RunningLine

_FADES = 0.8
"""Factor on the weight of former phases in the speeds of numbers of ranks."""
_FORGOTTEN = 0.01
"""Weight in batches below which a number of ranks is taken for not seen."""
_MOVES = 5
"""Moves whose median counts."""
_DOUBTED = 0.9
"""Factor on what a move takes with every phase without one."""


@dataclass
class Timings:
    """What updates and moves took, over training steps.

    Args:
        batches: Seconds of the global batches of a phase in their order, by one rank; each is the
            average over the last phases, as later batches have longer answers.
        moves: Seconds of the last changes of the number of ranks.
        lines: Seconds of a batch against its tokens, by the number of ranks that trained on it.
        phases: That are over.
    """

    batches: dict[int, float] = field(default_factory=dict)
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=_MOVES))
    lines: dict[int, RunningLine] = field(default_factory=dict)
    phases: int = 0
    _moved_in: int = field(default=0, init=False)
    """Phase of the last move."""

    def note_batch(self, number: int, tokens: int, seconds: float, size: int) -> None:
        """Remember what a batch of so many tokens took on so many ranks."""
        alone = seconds * self.speed(size)
        self.batches[number] = _average(self.batches.get(number), alone)
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


def _average(before: float | None, now: float) -> float:
    return now if before is None else 0.5 * (before + now)
