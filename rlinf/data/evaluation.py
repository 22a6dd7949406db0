"""Evaluation as a contract: a specification that is a file with a hash, and results that carry it.

A success rate says nothing without the episodes it was measured on. An :class:`EvaluationSpec`
lists every episode with its seed; an :class:`EvaluationResult` carries the hash of its
specification, and only results of one specification can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, get_args

from rlinf.checkpoint.files import write_atomic
from rlinf.errors import ConfigError

SuccessDefinition = Literal["success_once", "success_at_end"]
SPEC_FORMAT = "rlinf-evaluation-spec/1"
RESULT_FORMAT = "rlinf-evaluation-result/1"


@dataclass(frozen=True)
class EvaluationSpec:
    """What is played in an evaluation, to the last seed.

    Raises:
        ConfigError: No episode, an episode id twice, or a value out of range.
    """

    task: Mapping[str, Any]
    """Simulator, task and options, as JSON values."""
    episodes: tuple[tuple[int, int], ...]
    """Every episode: its id and the seed of its reset."""
    horizon: int
    """Primitive steps after which an episode ends."""
    chunk: int = 1
    """Primitive actions that are executed per query of the policy."""
    success: SuccessDefinition = "success_once"
    """Whether an episode succeeds by any of its steps, or by its last one."""

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ConfigError("an evaluation needs at least one episode")
        if len({episode for episode, _ in self.episodes}) < len(self.episodes):
            raise ConfigError("an evaluation lists every episode id once")
        if self.horizon < 1 or self.chunk < 1:
            raise ConfigError(
                f"horizon and chunk of an evaluation are at least 1, not {self.horizon} and "
                f"{self.chunk}"
            )
        if self.success not in get_args(SuccessDefinition):
            raise ConfigError(
                f"success = {self.success!r} is unknown; one of {get_args(SuccessDefinition)}"
            )

    @property
    def n(self) -> int:
        """Number of episodes."""
        return len(self.episodes)

    @property
    def sha256(self) -> str:
        """SHA-256, in hex, of the canonical JSON: equal contents, equal hash."""
        content = {"format": SPEC_FORMAT, **asdict(self)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the specification, and its hash, as a JSON file."""
        write_json(path, {"format": SPEC_FORMAT, "sha256": self.sha256, **asdict(self)})

    @classmethod
    def load(cls, path: Path | str) -> EvaluationSpec:
        """Read a specification.

        Raises:
            ConfigError: The file is none, or was changed after its hash was written.
        """
        content = read_json(path, SPEC_FORMAT)
        stated = content.pop("sha256", None)
        content["episodes"] = tuple((episode, seed) for episode, seed in content["episodes"])
        spec = cls(**content)
        if stated not in (None, spec.sha256):
            raise ConfigError(
                f"{path} was changed after it was written: its hash is {spec.sha256[:12]}…, it "
                f"states {str(stated)[:12]}…. Remove the line `sha256` to make it a new one."
            )
        return spec


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one episode of an evaluation ended."""

    episode_id: int
    seed: int
    success_once: bool
    success_at_end: bool
    episode_return: float
    episode_len: int
    valid: bool = True
    """False when the simulator failed; such an episode counts as no success."""


@dataclass(frozen=True)
class EvaluationResult:
    """Outcomes of every episode of a specification, in its order; built by :meth:`of`."""

    spec_sha256: str
    """Hash of the specification."""
    success: SuccessDefinition
    """The specification's definition of success."""
    checkpoint: str
    """What was evaluated: run and step, or a path."""
    outcomes: tuple[EpisodeOutcome, ...]
    """One per episode."""

    @classmethod
    def of(
        cls, spec: EvaluationSpec, outcomes: Iterable[EpisodeOutcome], checkpoint: str
    ) -> EvaluationResult:
        """Put the outcomes in the order of the specification.

        Raises:
            ValueError: An episode is missing, unknown, played twice or with another seed.
        """
        given = list(outcomes)
        played = {outcome.episode_id: outcome for outcome in given}
        if len(played) < len(given):
            raise ValueError("an episode of the evaluation was played twice")
        if {(o.episode_id, o.seed) for o in given} != set(spec.episodes):
            raise ValueError(
                f"the {len(given)} episodes that were played are not the {spec.n} of the "
                "specification, by id and seed"
            )
        ordered = tuple(played[episode] for episode, _ in spec.episodes)
        return cls(spec.sha256, spec.success, checkpoint, ordered)

    def succeeded(self) -> tuple[bool, ...]:
        """Success of every episode, by the specification's definition."""
        return tuple(o.valid and bool(getattr(o, self.success)) for o in self.outcomes)

    @property
    def n(self) -> int:
        """Number of episodes."""
        return len(self.outcomes)

    @property
    def n_invalid(self) -> int:
        """Episodes that the simulator did not finish; they count as no success."""
        return sum(not outcome.valid for outcome in self.outcomes)

    @property
    def successes(self) -> int:
        """Number of successful episodes."""
        return sum(self.succeeded())

    @property
    def success_rate(self) -> float:
        """Successful share of all episodes."""
        return self.successes / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.n)

    @property
    def mean_return(self) -> float:
        """Mean return of the valid episodes; NaN if there is none."""
        returns = [outcome.episode_return for outcome in self.outcomes if outcome.valid]
        return math.fsum(returns) / len(returns) if returns else math.nan

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"success rate {self.success_rate:.3f} (95 % interval {low:.3f} to {high:.3f}, "
            f"n = {self.n}, spec {self.spec_sha256[:12]})"
        )

    def save(self, path: Path | str) -> None:
        """Write a JSON file; the rates in it are for readers, only the outcomes are read back."""
        mean_return = self.mean_return
        summary = {
            "n": self.n,
            "n_invalid": self.n_invalid,
            "successes": self.successes,
            "success_rate": self.success_rate,
            "wilson_interval_95": list(self.interval),
            "mean_return": None if math.isnan(mean_return) else mean_return,
        }
        write_json(path, {"format": RESULT_FORMAT, "summary": summary, **asdict(self)})

    @classmethod
    def load(cls, path: Path | str) -> EvaluationResult:
        """Read a result.

        Raises:
            ConfigError: The file is none.
        """
        content = read_json(path, RESULT_FORMAT)
        del content["summary"]
        outcomes = tuple(EpisodeOutcome(**outcome) for outcome in content.pop("outcomes"))
        return cls(outcomes=outcomes, **content)


@dataclass(frozen=True)
class PairedComparison:
    """Two checkpoints on the same episodes."""

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    """Success rate of the second minus that of the first."""
    interval: tuple[float, float]
    """95 % interval of the difference."""
    p_value: float
    """Two-sided exact McNemar test of equal success rates."""

    @property
    def n(self) -> int:
        """Number of episodes."""
        return self.both + self.only_first + self.only_second + self.neither

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.second} against {self.first}: {self.difference:+.3f} success rate "
            f"(95 % interval {low:+.3f} to {high:+.3f}, p = {self.p_value:.3g}, n = {self.n}; "
            f"{self.only_second} episodes won, {self.only_first} lost)"
        )


def compare_paired(first: EvaluationResult, second: EvaluationResult) -> PairedComparison:
    """Compare two results episode by episode.

    Raises:
        ConfigError: They are of different specifications, so that nothing can be said.
    """
    if first.spec_sha256 != second.spec_sha256:
        raise ConfigError(
            f"{first.checkpoint} was evaluated by specification {first.spec_sha256[:12]}…, "
            f"{second.checkpoint} by {second.spec_sha256[:12]}…: only results on the same "
            "episodes can be compared. Evaluate both with one specification."
        )
    pairs = list(zip(first.succeeded(), second.succeeded(), strict=True))
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    return PairedComparison(
        first=first.checkpoint,
        second=second.checkpoint,
        both=both,
        only_first=lost,
        only_second=won,
        neither=neither,
        difference=(won - lost) / len(pairs),
        interval=paired_difference_interval(both, won, lost, neither),
        p_value=mcnemar_exact(lost, won),
    )


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


def write_json(path: Path | str, content: Mapping[str, Any]) -> None:
    """Write a file that is whole or not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path | str, expected_format: str) -> dict[str, Any]:
    """Read what :func:`write_json` wrote, without its format.

    Raises:
        ConfigError: The file is not there, or is of another format.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != expected_format:
        raise ConfigError(f"{path} is no file of the format {expected_format}")
    return content
