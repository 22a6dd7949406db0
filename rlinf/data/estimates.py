"""Success in proportions and in scores of repeated samples: means, 95 % intervals, comparisons."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from rlinf.errors import ConfigError

Kind = Literal["pass", "mean", "maj"]
Method = Literal["wilson", "bootstrap", "newcombe"]
_RESAMPLES = 10_000
_CHUNK = 250
_SEED = 20_260_731
"""Of the resampling: one result has one interval."""


def wilson_interval(k: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a proportion, k of n trials, by Wilson's score method.

    Without continuity correction. Wilson (1927), Journal of the American Statistical Association
    22, 209-212; method 3 of Newcombe (1998), Statistics in Medicine 17, 857-872.

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
    margins = k_first * (n - k_first) * k_second * (n - k_second)
    covariance = float(both * neither - only_first * only_second)
    if covariance > 0:
        covariance = max(covariance - n / 2, 0.0)
    phi = covariance / math.sqrt(margins) if margins else 0.0

    def combined(first: float, second: float) -> float:
        return math.sqrt(max(first**2 - 2 * phi * first * second + second**2, 0.0))

    below = combined(p_first - low_first, high_second - p_second)
    above = combined(high_first - p_first, p_second - low_second)
    return p_first - p_second - below, p_first - p_second + above


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test: a binomial test of the pairs that differ."""
    discordant = only_first + only_second
    fewer = min(only_first, only_second)
    tail = sum(math.comb(discordant, i) for i in range(fewer + 1))
    return min(1.0, tail / 2 ** (discordant - 1)) if discordant else 1.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k samples is right, from c right ones of n; unbiased.

    Chen et al. (2021), "Evaluating Large Language Models Trained on Code", eq. 1: 1 − C(n − c, k) /
    C(n, k), for 0 ≤ c ≤ n and 1 ≤ k ≤ n; ValueError for others.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {c} right samples of {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(correct: Sequence[bool], answers: Sequence[str | None]) -> float:
    """Whether the answer given most often is right (Wang et al. 2023, self-consistency).

    Of the n samples those without an answer do not vote; of answers with equally many votes that
    counts which was given first. Answers are equal if their texts are, up to white space at the
    ends. An answer is right as often as the samples that gave it are: 0 or 1, unless the reward is
    not consistent.
    """
    voted = [
        (answer.strip(), right)
        for answer, right in zip(answers, correct, strict=True)
        if answer is not None
    ]
    votes = Counter(answer for answer, _ in voted)
    if not votes:
        return 0.0
    # A counter keeps the order in which answers came, and of equals the first is the most common.
    winner, most = votes.most_common(1)[0]
    return sum(right for answer, right in voted if answer == winner) / most


@dataclass(frozen=True)
class Metric:
    """A score of the n samples of one prompt."""

    kind: Kind
    k: int

    @classmethod
    def parse(cls, name: str, samples: int) -> Metric:
        """The metric of a name such as ``pass@8``; ConfigError if so many samples have none."""
        found = re.fullmatch(r"(pass|mean|maj)@([1-9]\d*)", name)
        if found is None:
            raise ConfigError(f"`{name}` is no metric; known: pass@k, mean@n, maj@n")
        kind, k = found[1], int(found[2])
        if kind == "pass" and k > samples:
            raise ConfigError(
                f"pass@{k} needs {k} samples per prompt, there are {samples}; "
                f"nearest: pass@{samples}"
            )
        if kind != "pass" and k != samples:
            raise ConfigError(f"{name} is over all samples; nearest: {kind}@{samples}")
        return cls(kind, k)  # type: ignore[arg-type]

    def of(self, correct: Sequence[bool], answers: Sequence[str | None] | None) -> float:
        """Score of one prompt; ConfigError where it needs answers and there are none."""
        if self.kind == "pass":
            return pass_at_k(len(correct), sum(correct), self.k)
        if self.kind == "mean":
            return sum(correct) / len(correct)
        if answers is None:
            raise ConfigError(f"maj@{self.k} needs the answers, which were not recorded")
        return majority(correct, answers)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Args:
        name: The metric.
        value: The mean.
        low: Lower end of the 95 % interval.
        high: Upper end.
        prompts: How many prompts it is over.
        method: ``wilson``: score interval of a proportion; ``bootstrap``: over prompts.
    """

    name: str
    value: float
    low: float
    high: float
    prompts: int
    method: Method

    def __str__(self) -> str:
        return (
            f"{self.name} {self.value:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, "
            f"{self.method}, {self.prompts} prompts)"
        )


def estimate(scores: np.ndarray, *, name: str) -> Estimate:
    """Mean of scores [prompts] in [0, 1] with its 95 % interval for prompts drawn like these.

    Where every score is 0 or 1, as with one sample per prompt, the interval is Wilson's. Otherwise
    it is the percentile bootstrap over prompts (Efron & Tibshirani 1993, ch. 13). Where all scores
    are equal, resampling shows no spread; Wilson's interval is taken, which is too wide rather than
    too narrow, because no score in [0, 1] varies more than a 0/1 one of the same mean.
    """
    if not len(scores):
        raise ValueError("there is no score to average")
    mean = float(scores.mean())
    if _binary(scores) or np.ptp(scores) == 0:
        k = int(scores.sum()) if _binary(scores) else mean * len(scores)
        low, high = wilson_interval(k, len(scores))
        return Estimate(name, mean, low, high, len(scores), "wilson")
    low, high = np.quantile(_resampled_means(scores), [0.025, 0.975])
    return Estimate(name, mean, float(low), float(high), len(scores), "bootstrap")


@dataclass(frozen=True, kw_only=True)
class PairedEstimate:
    """Two checkpoints on the same prompts or episodes.

    Args:
        metric: What is compared.
        items: What it is compared on.
        first: The first checkpoint.
        second: The second.
        difference: Mean of the second minus that of the first.
        interval: 95 % interval of the difference.
        p_value: Two-sided, of no difference: McNemar's exact test or random changes of sign.
        better: Items on which the second scores higher.
        worse: Items on which it scores lower.
        n: All items.
        method: ``newcombe`` or ``bootstrap``.
    """

    metric: str
    items: str
    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    p_value: float
    better: int
    worse: int
    n: int
    method: Method

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.second} against {self.first}: {self.difference:+.3f} {self.metric} "
            f"(95 % interval {low:+.3f} to {high:+.3f}, {self.method}, p = {self.p_value:.3g}; "
            f"{self.better} of {self.n} {self.items} better, {self.worse} worse)"
        )


def difference(
    first: np.ndarray,
    second: np.ndarray,
    *,
    metric: str,
    first_name: str,
    second_name: str,
    items: str,
) -> PairedEstimate:
    """Mean of ``second`` − ``first`` over items, [items] scores each in the same order.

    Scores of 0 and 1 get Newcombe's interval and McNemar's exact test. Otherwise the interval is
    the percentile bootstrap over items, and the p-value that of a sign-flip test (Fisher 1935): how
    often random signs give a mean as far from 0.
    """
    change = second - first
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    method: Method = "newcombe" if _binary(first) and _binary(second) else "bootstrap"
    if method == "newcombe":
        both = int((first * second).sum())
        interval = paired_difference_interval(
            both, better, worse, len(change) - both - better - worse
        )
        p_value = mcnemar_exact(worse, better)
    else:
        low, high = np.quantile(_resampled_means(change), [0.025, 0.975])
        interval, p_value = (float(low), float(high)), _sign_flip(change)
    return PairedEstimate(
        metric=metric,
        items=items,
        first=first_name,
        second=second_name,
        difference=float(change.mean()),
        interval=interval,
        p_value=p_value,
        better=better,
        worse=worse,
        n=len(change),
        method=method,
    )


def _binary(scores: np.ndarray) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def _resampled_means(scores: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(_SEED)
    means = [
        scores[generator.integers(len(scores), size=(_CHUNK, len(scores)))].mean(axis=1)
        for _ in range(_RESAMPLES // _CHUNK)
    ]
    return np.concatenate(means)


def _sign_flip(change: np.ndarray) -> float:
    generator = np.random.default_rng(_SEED)
    observed = abs(change.sum()) - 1e-9
    extreme = 0
    for _ in range(_RESAMPLES // _CHUNK):
        signs = generator.choice((-1.0, 1.0), size=(_CHUNK, len(change)))
        extreme += int((abs((signs * change).sum(axis=1)) >= observed).sum())
    # The observed signs are one of the possible ones, so p is never 0 (Phipson & Smyth 2010).
    return (extreme + 1) / (_RESAMPLES + 1)
