"""How long answers are, and when those of different lengths leave an engine.

An engine runs so many sequences at most. In each decoding step every running sequence gets one
token; where one ends, the next that waits begins. A step with ``r`` running sequences takes
``fixed + r · per_sequence`` seconds: reading the weights does not depend on the batch,
reading the caches does.

Counted in steps, the schedule does not depend on these times: a sequence ends as many steps after
it was admitted as it has tokens. And between two ends the number of running sequences is constant:
the most while sequences wait, then what is left. One event per sequence is therefore enough, and
exact; nothing is simulated token by token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.errors import ConfigError
from rlinf.planner.profile import Measurement
from rlinf.planner.search.formulas import Floats

ASSUMED_SIGMA = 0.8
"""Standard deviation of the logarithm where nobody knows it, as in the scenarios."""
ASSUMED_CORRELATION = 0.5
"""Part of its variance that responses to one prompt share where nobody knows it."""
DRAWS = 41
"""Steps of which the median of a model is taken."""
_NORMAL = NormalDist()


class LengthDistribution(StrictModel):
    """Tokens of a response: log-normal, with what is beyond the limit cut off.

    Responses of reasoning models have a heavy tail, which takes three parameters: the mean of what
    is generated, the limit, and how heavy the tail is.
    """

    mean: float = Field(gt=0)
    """Mean, after the cut [tokens]."""
    maximum: int = Field(ge=1)
    """Limit; what would be longer ends there [tokens]."""
    sigma: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation of the logarithm before the cut; 0: all have the mean length."""
    correlation: float = Field(default=0.0, ge=0, le=1)
    """Part of the variance of the logarithm that the responses to one prompt share."""
    origin: str = ""
    """Where the figures are from."""

    @model_validator(mode="after")
    def _mean_below_limit(self) -> LengthDistribution:
        if self.mean > self.maximum or (self.sigma and self.mean >= 0.99 * self.maximum):
            why = f"a mean of {self.mean:g} tokens needs a limit well above it"
            raise illegal("maximum", why, hint=f"nearest: {math.ceil(1.5 * self.mean)}")
        return self

    def draw(self, rng: np.random.Generator, groups: int, group_size: int) -> NDArray[np.int64]:
        """[groups, group_size] lengths, at least 1."""
        shared = rng.standard_normal((groups, 1))
        own = rng.standard_normal((groups, group_size))
        normal = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * own
        lengths = np.exp(self.location() + self.sigma * normal)
        return np.clip(np.rint(lengths), 1, self.maximum).astype(np.int64)

    def location(self) -> float:
        """Mean of the logarithm before the cut, such that the mean after it is :attr:`mean`.

        For X log-normal and a limit m:
        ``E[min(X, m)] = exp(μ + σ²/2) Φ((ln m − μ − σ²)/σ) + m (1 − Φ((ln m − μ)/σ))``,
        which grows with μ, so that bisection finds it.
        """
        if self.sigma == 0:
            return math.log(self.mean)
        low, high = math.log(self.mean) - self.sigma**2, math.log(self.maximum) + 9 * self.sigma
        for _ in range(200):
            middle = (low + high) / 2
            if self._mean_of(middle) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _mean_of(self, location: float) -> float:
        limit = math.log(self.maximum)
        below = _NORMAL.cdf((limit - location - self.sigma**2) / self.sigma)
        above = 1 - _NORMAL.cdf((limit - location) / self.sigma)
        return math.exp(location + self.sigma**2 / 2) * below + self.maximum * above

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.sigma:g}:{self.maximum}:{self.correlation:g}"


def parse_lengths(text: str) -> LengthDistribution:
    """Read ``lognormal:MEAN:SIGMA:MAX``, or with the correlation of a prompt's responses behind it.

    Raises:
        ConfigError: It cannot be read, or such lengths do not exist.
    """
    kind, *numbers = text.split(":")
    try:
        if kind != "lognormal" or len(numbers) not in (3, 4):
            raise ValueError(text)
        mean, sigma, maximum, correlation = (*numbers, str(ASSUMED_CORRELATION))[:4]
        values = {
            "mean": float(mean),
            "sigma": float(sigma),
            "maximum": int(maximum),
            "correlation": float(correlation),
        }
    except ValueError:
        raise ConfigError(
            f"lengths '{text}' are not lognormal:MEAN:SIGMA:MAX[:CORRELATION]; for answers of 2000 "
            "tokens on average and 8192 at most write lognormal:2000:0.8:8192"
        ) from None
    try:
        return LengthDistribution.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"lengths '{text}': {what}") from error


class GenerationModel(StrictModel):
    """How long generation takes, for a component whose time depends on lengths."""

    lengths: LengthDistribution
    """Tokens of the responses."""
    max_running: int = Field(ge=1)
    """Sequences that run in one engine at the same time."""
    seconds_fixed: float = Field(ge=0)
    """Time of a decoding step that does not depend on the batch [s]."""
    seconds_per_sequence: float = Field(default=0.0, ge=0)
    """Time that each running sequence adds to a decoding step [s]."""

    def serve(self, lengths: NDArray[np.int64]) -> Floats:
        """[E, N] times at which sequences end in engines, all of which wait from 0 on [s].

        ``lengths`` are [E, N] tokens, in the order of admission.
        """
        count = lengths.shape[1]
        steps = lengths.astype(np.int64)
        if count > self.max_running:
            steps = np.stack([_last_steps(each, self.max_running) for each in steps])
        order = np.argsort(steps, axis=1, kind="stable")
        between = np.diff(np.take_along_axis(steps, order, axis=1), prepend=0)
        running = np.minimum(self.max_running, count - np.arange(count))
        step_seconds = self.seconds_fixed + self.seconds_per_sequence * running
        ends = np.empty(lengths.shape)
        np.put_along_axis(ends, order, np.cumsum(between * step_seconds, axis=1), axis=1)
        return ends

    def groups(
        self, rng: np.random.Generator, groups: int, group_size: int, engines: int
    ) -> tuple[Floats, Floats, int]:
        """Generate the responses of one step.

        Groups are shared out over the engines in blocks, as the executor does it.

        Returns:
            Time at which each group is complete [groups], time at which each engine is done
            [engines], and the tokens of all.
        """
        lengths = self.lengths.draw(rng, groups, group_size)
        first = -(-np.arange(engines + 1) * groups // engines)
        counts = np.diff(first)
        ready, done = np.zeros(groups), np.zeros(engines)
        for count in np.unique(counts[counts > 0]).tolist():
            alike = np.flatnonzero(counts == count)
            own = first[alike][:, None] + np.arange(count)
            ends = self.serve(lengths[own].reshape(len(alike), -1))
            ready[own] = ends.reshape(*own.shape, group_size).max(axis=2)
            done[alike] = ends.max(axis=1)
        return ready, done, int(lengths.sum())

    def median_seconds(self, groups: int, group_size: int, engines: int) -> float:
        """Median time until the last engine is done [s]."""
        draws = (
            self.groups(np.random.default_rng(draw), groups, group_size, engines)[1].max()
            for draw in range(DRAWS)
        )
        return float(np.median(list(draws)))


def _last_steps(lengths: NDArray[np.int64], max_running: int) -> NDArray[np.int64]:
    """[N] decoding step in which each sequence ends; admission is in order, at once."""
    steps = lengths.copy()
    running = steps[:max_running].tolist()
    heapq.heapify(running)
    for index in range(max_running, len(lengths)):
        steps[index] += running[0]
        heapq.heapreplace(running, int(steps[index]))
    return steps


def calibrated(
    lengths: LengthDistribution,
    max_running: int,
    measured: Sequence[Measurement],
    *,
    seconds: float,
    groups: int,
    group_size: int,
    engines: int,
    devices_per_engine: int = 1,
) -> GenerationModel:
    """A model of generation that takes a given time in the median of steps.

    How a decoding step divides into its fixed part and one per running sequence is fitted to the
    measured sizes, by least squares of relative deviations; where they do not tell, the step is
    fixed. The time of a generation is linear in both: it is the number of decoding steps times the
    one, and the running sequences, summed over the steps, times the other. ``seconds`` is for the
    groups of a step on so many engines, ``measured`` are sizes of any kind.
    """
    by_step = GenerationModel(lengths=lengths, max_running=max_running, seconds_fixed=1.0)
    by_sequence = by_step.model_copy(update={"seconds_fixed": 0.0, "seconds_per_sequence": 1.0})
    parts = []
    for each in measured:
        measured_groups = max(1, each.items // group_size)
        count = min(measured_groups, max(1, each.devices // devices_per_engine))
        parts.append(
            [
                model.median_seconds(measured_groups, group_size, count) / each.seconds
                for model in (by_step, by_sequence)
            ]
        )
    fixed, per_sequence = _least_squares(np.array(parts))
    found = {"seconds_fixed": fixed, "seconds_per_sequence": per_sequence}
    model = by_step.model_copy(update=found)
    scale = seconds / model.median_seconds(groups, group_size, engines)
    return model.model_copy(update={name: scale * part for name, part in found.items()})


def _least_squares(matrix: Floats) -> tuple[float, float]:
    """The two parts of which each row makes 1, none negative; the first where rows do not tell."""
    found, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(matrix)), rcond=1e-3)
    if rank == 2 and (found >= 0).all():
        return float(found[0]), float(found[1])
    # Else the best fit that is allowed has one of the two parts only.
    alone = matrix.sum(axis=0) / (matrix**2).sum(axis=0)
    left = ((matrix * alone - 1) ** 2).sum(axis=0)
    if rank == 2 and left[1] < left[0]:
        return 0.0, float(alone[1])
    return float(alone[0]), 0.0
