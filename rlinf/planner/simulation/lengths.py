"""Lengths of responses: log-normal, cut off at the longest that is allowed.

Responses of reasoning models have a heavy tail. A log-normal length whose excess over the limit is
cut off has three parameters: the mean of what is generated, the limit, and how heavy the tail is.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.errors import ConfigError

ASSUMED_SIGMA = 0.8
"""Standard deviation of the logarithm where nobody knows it, as in the scenarios."""
ASSUMED_CORRELATION = 0.5
"""Part of its variance that responses to one prompt share where nobody knows it."""


class LengthDistribution(StrictModel):
    """Tokens of a response."""

    mean: float = Field(gt=0, allow_inf_nan=False)
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
        below = _normal((limit - location - self.sigma**2) / self.sigma)
        above = 1 - _normal((limit - location) / self.sigma)
        return math.exp(location + self.sigma**2 / 2) * below + self.maximum * above

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.sigma:g}:{self.maximum}:{self.correlation:g}"


def parse_lengths(text: str) -> LengthDistribution:
    """Read ``lognormal:MEAN:SIGMA:MAX``, or with the correlation of a prompt's responses behind it.

    Raises:
        ConfigError: It cannot be read, or such lengths do not exist.
    """
    kind, *numbers = text.split(":")
    if kind != "lognormal" or len(numbers) not in (3, 4):
        raise _unreadable(text)
    mean, sigma, maximum, correlation = (*numbers, str(ASSUMED_CORRELATION))[:4]
    try:
        values = {
            "mean": float(mean),
            "sigma": float(sigma),
            "maximum": int(maximum),
            "correlation": float(correlation),
        }
    except ValueError:
        raise _unreadable(text) from None
    try:
        return LengthDistribution.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"lengths '{text}': {what}") from error


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"lengths '{text}' are not lognormal:MEAN:SIGMA:MAX[:CORRELATION]; for answers of 2000 "
        "tokens on average and 8192 at most write lognormal:2000:0.8:8192"
    )


def _normal(value: float) -> float:
    """Distribution function of the standard normal distribution."""
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))
