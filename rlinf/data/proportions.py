"""Intervals and tests of proportions: shares of trials that succeeded."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a proportion by Wilson's score method, without continuity correction.

    Wilson (1927), Journal of the American Statistical Association 22, 209-212; method 3 of
    Newcombe (1998), Statistics in Medicine 17, 857-872.

    Args:
        k: Successes.
        n: Trials.
        confidence: Probability that the interval covers the true proportion.

    Raises:
        ValueError: ``n`` is not positive, or ``k`` is not between 0 and ``n``.
    """
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"{k} successes of {n} trials are no proportion")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = k + z * z / 2
    spread = z * math.sqrt(k * (n - k) / n + z * z / 4)
    low, high = (centre - spread) / (n + z * z), (centre + spread) / (n + z * z)
    # Rounding must not push the bound of a certain outcome off the end of the scale.
    return (0.0 if k == 0 else low, 1.0 if k == n else high)


def paired_difference_interval(
    both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of p_first − p_second for two proportions on the same trials.

    Method 10 of Newcombe (1998), "Improved confidence intervals for the difference between
    binomial proportions based on paired data", Statistics in Medicine 17, 2635-2650: Wilson
    intervals of both, combined with the correlation of the pairs.
    """
    n = both + only_first + only_second + neither
    k_first, k_second = both + only_first, both + only_second
    p_first, p_second = k_first / n, k_second / n
    low_first, high_first = wilson_interval(k_first, n, confidence)
    low_second, high_second = wilson_interval(k_second, n, confidence)
    phi = _corrected_phi(both, only_first, only_second, neither)
    below = _combine(p_first - low_first, high_second - p_second, phi)
    above = _combine(high_first - p_first, p_second - low_second, phi)
    difference = p_first - p_second
    return difference - below, difference + above


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test: a binomial test of the pairs that differ.

    Args:
        only_first: Trials in which the first alone succeeded.
        only_second: Trials in which the second alone succeeded.
    """
    discordant = only_first + only_second
    fewer = min(only_first, only_second)
    tail = sum(math.comb(discordant, i) for i in range(fewer + 1))
    return min(1.0, tail / 2 ** (discordant - 1)) if discordant else 1.0


def _corrected_phi(both: int, only_first: int, only_second: int, neither: int) -> float:
    n = both + only_first + only_second + neither
    margins = (
        (both + only_first)
        * (only_second + neither)
        * (both + only_second)
        * (only_first + neither)
    )
    if margins == 0:
        return 0.0
    covariance = float(both * neither - only_first * only_second)
    if covariance > 0:
        covariance = max(covariance - n / 2, 0.0)
    return covariance / math.sqrt(margins)


def _combine(first: float, second: float, phi: float) -> float:
    return math.sqrt(max(first**2 - 2 * phi * first * second + second**2, 0.0))
