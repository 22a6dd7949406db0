"""Scores of repeated samples, their means over prompts, and 95 % intervals."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlinf.data.proportions import mcnemar_exact, paired_difference_interval, wilson_interval
from rlinf.errors import ConfigError

Kind = Literal["pass", "mean", "maj"]
Method = Literal["wilson", "bootstrap", "newcombe"]
_RESAMPLES = 10_000
_CHUNK = 250
_SEED = 20_260_731
"""Of the resampling: one result has one interval."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k samples is right, from c right ones of n; unbiased.

    Chen et al. (2021), "Evaluating Large Language Models Trained on Code", eq. 1:
    1 − C(n − c, k) / C(n, k).

    Raises:
        ValueError: Not 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {c} right samples of {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(correct: Sequence[bool], answers: Sequence[str | None]) -> float:
    """Whether the answer given most often is right (Wang et al. 2023, self-consistency).

    Samples without an answer do not vote; of answers with equally many votes that counts which was
    given first. Answers are equal if their texts are, up to white space at the ends. An answer is
    right as often as the samples that gave it are: 0 or 1, unless the reward is not consistent.

    Args:
        correct: [n] whether each sample is right.
        answers: [n] what each sample answered, or None.
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
        """The metric of a name such as ``pass@8``.

        Raises:
            ConfigError: The name is none, or does not go with so many samples.
        """
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
        """Score of one prompt.

        Raises:
            ConfigError: Answers are needed and were not recorded.
        """
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
    """Mean of scores in [0, 1] with its 95 % interval for prompts drawn like these.

    Where every score is 0 or 1, as with one sample per prompt, the interval is Wilson's. Otherwise
    it is the percentile bootstrap over prompts (Efron & Tibshirani 1993, ch. 13). Where all scores
    are equal, resampling shows no spread; Wilson's interval is taken, which is too wide rather
    than too narrow, because no score in [0, 1] varies more than a 0/1 one of the same mean.

    Args:
        scores: [prompts].
        name: The metric.

    Raises:
        ValueError: There is no score.
    """
    if not len(scores):
        raise ValueError("there is no score to average")
    mean = float(scores.mean())
    if _binary(scores):
        low, high = wilson_interval(int(scores.sum()), len(scores))
        return Estimate(name, mean, low, high, len(scores), "wilson")
    if np.ptp(scores) == 0:
        low, high = wilson_interval(mean * len(scores), len(scores))  # type: ignore[arg-type]
        return Estimate(name, mean, low, high, len(scores), "wilson")
    low, high = np.quantile(_resampled_means(scores), [0.025, 0.975])
    return Estimate(name, mean, float(low), float(high), len(scores), "bootstrap")


@dataclass(frozen=True)
class PairedEstimate:
    """Two checkpoints on the same prompts.

    Args:
        metric: What is compared.
        first: The first checkpoint.
        second: The second.
        difference: Mean of the second minus that of the first.
        interval: 95 % interval of the difference.
        p_value: Two-sided, of no difference: McNemar's exact test or random changes of sign.
        better: Prompts on which the second scores higher.
        worse: Prompts on which it scores lower.
        prompts: All prompts.
        method: ``newcombe`` or ``bootstrap``.
    """

    metric: str
    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    p_value: float
    better: int
    worse: int
    prompts: int
    method: Method

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.second} against {self.first}: {self.difference:+.3f} {self.metric} "
            f"(95 % interval {low:+.3f} to {high:+.3f}, {self.method}, p = {self.p_value:.3g}; "
            f"{self.better} of {self.prompts} prompts better, {self.worse} worse)"
        )


def difference(
    first: np.ndarray, second: np.ndarray, *, metric: str, first_name: str, second_name: str
) -> PairedEstimate:
    """Mean of ``second`` − ``first`` over prompts.

    Scores of 0 and 1 are compared as episodes are: Newcombe's interval and McNemar's exact test.
    Otherwise the interval is the percentile bootstrap over prompts, and the p-value that of a
    sign-flip test (Fisher 1935): how often random signs give a mean as far from 0.

    Args:
        first: [prompts] scores.
        second: [prompts] scores of the same prompts.
        metric: Name of the scores.
        first_name: What was scored first.
        second_name: What was scored second.
    """
    change = second - first
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    if _binary(first) and _binary(second):
        both = int((first * second).sum())
        neither = len(change) - both - better - worse
        interval = paired_difference_interval(both, better, worse, neither)
        p_value, method = mcnemar_exact(worse, better), "newcombe"
    else:
        low, high = np.quantile(_resampled_means(change), [0.025, 0.975])
        interval, p_value, method = (float(low), float(high)), _sign_flip(change), "bootstrap"
    return PairedEstimate(
        metric=metric,
        first=first_name,
        second=second_name,
        difference=float(change.mean()),
        interval=interval,
        p_value=p_value,
        better=better,
        worse=worse,
        prompts=len(change),
        method=method,  # type: ignore[arg-type]
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
