"""Evaluation on episodes as a contract (see :mod:`rlinf.data.evaluation_files`).

A success rate says nothing without the episodes it was measured on. An :class:`EvaluationSpec`
lists every episode with its seed; an :class:`EvaluationResult` carries the hash of its
specification, and only results of one specification can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlinf.data.evaluation_files import HashedSpec, SpecifiedResult, require_one_spec
from rlinf.data.proportions import mcnemar_exact, paired_difference_interval, wilson_interval
from rlinf.errors import ConfigError

SuccessDefinition = Literal["success_once", "success_at_end"]


@dataclass(frozen=True)
class EvaluationSpec(HashedSpec):
    """What is played in an evaluation, to the last seed.

    Raises:
        ConfigError: No episode, an episode id twice, or a value out of range.
    """

    format = "rlinf-evaluation-spec/1"

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

    @classmethod
    def restored(cls, contents: dict[str, Any]) -> EvaluationSpec:
        """From the content of a file."""
        episodes = tuple((episode, seed) for episode, seed in contents.pop("episodes"))
        return cls(episodes=episodes, **contents)


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
class EvaluationResult(SpecifiedResult):
    """Outcomes of every episode of a specification, in its order; built by :meth:`of`."""

    format = "rlinf-evaluation-result/1"

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

    def summary(self) -> dict[str, Any]:
        """Counts, the success rate with its interval, and the mean return."""
        mean_return = self.mean_return
        return {
            "n": self.n,
            "n_invalid": self.n_invalid,
            "successes": self.successes,
            "success_rate": self.success_rate,
            "wilson_interval_95": list(self.interval),
            "mean_return": None if math.isnan(mean_return) else mean_return,
        }

    @classmethod
    def restored(cls, contents: dict[str, Any]) -> EvaluationResult:
        """From the content of a file."""
        outcomes = tuple(EpisodeOutcome(**outcome) for outcome in contents.pop("outcomes"))
        return cls(outcomes=outcomes, **contents)


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
    require_one_spec(first, second, "episodes")
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
