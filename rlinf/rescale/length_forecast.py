"""How many tokens unfinished answers have to go, as far as lengths seen so far tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST_AGE = 8
"""Tokens of the first interval of ages; each further one ends at √2 times the one before."""
_PRIOR_ENDS = 2.0
"""Ends by which an interval is taken to be like the one before it, until it has seen more."""
_MEMORY = 0.7
"""Weight of what was seen up to a step when the next one begins."""
_GRID = 64
"""Points at which what is left is integrated, and the most ages that are told apart."""

PARTS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Parts of the tokens that the longest answer has to go, at which a forecast looks ahead."""


@dataclass(frozen=True)
class TokensLeft:
    """What some running answers are expected to have left."""

    longest: float  # tokens that the longest has to go
    mean: float  # of one on average
    going: tuple[float, ...]  # part that still runs after each of the `PARTS` of `longest`
    to_go: tuple[float, ...]  # tokens that one has left then, those that ended counted as none


class LengthForecast:
    """The chance that a token is an answer's last one, by the number of tokens before it.

    That chance is constant within intervals of ages that grow by √2 (a piecewise exponential model
    of survival, Friedman 1982): ends / tokens seen there. For lengths with a heavy tail it falls
    with age: of most answers little is left, of those that are long already much. Intervals of
    which little was seen are taken to be like the one before. Sequences that still run or were cut
    off count with their tokens, without an end.

    Args:
        limit: Most tokens of an answer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        ages = [0.0]
        while ages[-1] < limit:
            ages.append(min(max(_FIRST_AGE, np.ceil(ages[-1] * 2**0.5)), limit))
        self._ages: Floats = np.array(ages)
        self._ends: Floats = np.zeros(len(ages) - 1)
        self._tokens: Floats = np.zeros(len(ages) - 1)

    def next_step(self) -> None:
        """What was seen in steps before counts less than what is seen from now on."""
        self._ends *= _MEMORY
        self._tokens *= _MEMORY

    def note(self, lengths: Sequence[int]) -> None:
        """Remember the tokens of answers that have ended, or were cut off at the limit."""
        of = np.asarray(lengths, float)
        self._tokens += self._tokens_by_age(of)
        self._ends += np.histogram(of[of < self._limit], self._ages)[0]

    def left(self, running: Sequence[int]) -> TokensLeft:
        """What answers are expected to have left, by the tokens, at most the limit, of each."""
        if not len(running):
            return TokensLeft(0.0, 0.0, (0.0,) * len(PARTS), (0.0,) * len(PARTS))
        have = np.sort(np.asarray(running, float))
        if not self._ends.any():
            return self._all_to_the_limit(have)
        hazard = np.concatenate(([0.0], np.cumsum(self._chances(have) * np.diff(self._ages))))
        parts = np.array_split(have, min(len(have), _GRID))
        ages, counts = np.array([p.mean() for p in parts]), np.array([len(p) for p in parts])
        # Squares, as much ends soon and a little late.
        later = (self._limit - have[0]) * np.linspace(0.0, 1.0, _GRID) ** 2
        at = np.minimum(ages[:, None] + later, self._limit)
        passed = np.interp(at, self._ages, hazard)
        alive = np.exp(passed[:, :1] - passed) * (at < self._limit)
        none = np.exp(np.log1p(-np.minimum(alive, 1 - 1e-12)).T @ counts)
        going = alive.T @ counts / len(have)
        drawn = _area_so_far(going, later)
        longest = float(_area_so_far(1 - none, later)[-1])
        ahead = np.array(PARTS) * longest
        runs = tuple(np.interp(ahead, later, going).tolist())
        to_go = tuple((drawn[-1] - np.interp(ahead, later, drawn)).tolist())
        return TokensLeft(longest, float(drawn[-1]), runs, to_go)

    def _all_to_the_limit(self, have: Floats) -> TokensLeft:
        longest = float(self._limit - have[0])
        rest = np.maximum(self._limit - have[:, None] - np.array(PARTS) * longest, 0.0)
        to_go = rest.mean(axis=0)
        going = tuple((rest > 0).mean(axis=0).tolist())
        return TokensLeft(longest, float(to_go[0]), going, tuple(to_go.tolist()))

    def _tokens_by_age(self, lengths: Floats) -> Floats:
        passed = np.clip(lengths[:, None] - self._ages[:-1], 0.0, np.diff(self._ages))
        found: Floats = passed.sum(axis=0)
        return found

    def _chances(self, running: Floats) -> Floats:
        tokens = self._tokens + self._tokens_by_age(running)
        before = self._ends.sum() / tokens.sum()
        chances = np.empty(len(tokens))
        for place, (ends, seen) in enumerate(zip(self._ends, tokens, strict=True)):
            before = chances[place] = (ends + _PRIOR_ENDS) / (seen + _PRIOR_ENDS / before)
        return chances


def _area_so_far(heights: Floats, at: Floats) -> Floats:
    """[n] under straight lines between points, up to each of them."""
    found: Floats = np.cumsum((heights[1:] + heights[:-1]) * np.diff(at) / 2)
    return np.concatenate(([0.0], found))
