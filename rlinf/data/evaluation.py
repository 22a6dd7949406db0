"""Evaluation as a contract: a specification that is a file with a hash, results that carry it.

A success rate says nothing without the items it was measured on. Here is what all kinds of items
have in common, and the first kind, episodes; the other are prompts
(:mod:`rlinf.data.text_evaluation`). Only results of one specification can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

from rlinf.checkpoint.files import write_atomic
from rlinf.data.proportions import mcnemar_exact, paired_difference_interval, wilson_interval
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as _Dataclass
else:
    _Dataclass = object

Key = TypeVar("Key", bound=Hashable)
Outcome = TypeVar("Outcome")
SuccessDefinition = Literal["success_once", "success_at_end"]


class HashedSpec(_Dataclass):
    """Base of the specifications, frozen dataclasses of JSON values."""

    format: ClassVar[str]
    """Name and version of the file format, part of the hash."""

    def contents(self) -> dict[str, Any]:
        """Everything that the hash covers, as JSON values."""
        return asdict(self)

    @classmethod
    def restored(cls, contents: dict[str, Any]) -> Self:
        """From what :meth:`contents` became in a file.

        Raises:
            KeyError: Something is missing.
            TypeError: Something is unknown, or of another kind.
            ConfigError: A value is not legal.
        """
        return cls(**contents)

    @property
    def sha256(self) -> str:
        """SHA-256, in hex, of the canonical JSON: equal contents, equal hash."""
        content = {"format": self.format, **self.contents()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the specification, and its hash, as a JSON file."""
        write_json(path, {"format": self.format, "sha256": self.sha256, **self.contents()})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a specification.

        Raises:
            ConfigError: The file is none, or was changed after its hash was written.
        """
        content = read_json(path, cls.format)
        stated = content.pop("sha256", None)
        try:
            spec = cls.restored(content)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no specification: {error}") from error
        if stated not in (None, spec.sha256):
            raise ConfigError(
                f"{path} was changed after it was written: its hash is {spec.sha256[:12]}…, it "
                f"states {str(stated)[:12]}…. Remove the line `sha256` to make it a new one."
            )
        return spec


class SpecifiedResult(ABC, _Dataclass):
    """Base of the results, frozen dataclasses of JSON values."""

    format: ClassVar[str]
    """Name and version of the file format."""
    spec_sha256: str
    """Hash of the specification."""
    checkpoint: str
    """What was evaluated: run and step, or a path."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Rates for who reads the file; they are not read back."""

    @classmethod
    def restored(cls, contents: dict[str, Any]) -> Self:
        """From the fields as they became in a file.

        Raises:
            KeyError: Something is missing.
            TypeError: Something is unknown, or of another kind.
        """
        return cls(**contents)

    def save(self, path: Path | str) -> None:
        """Write a JSON file; the rates in it are for readers, only the outcomes are read back."""
        write_json(path, {"format": self.format, "summary": self.summary(), **asdict(self)})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a result.

        Raises:
            ConfigError: The file is none.
        """
        content = read_json(path, cls.format)
        content.pop("summary", None)
        try:
            return cls.restored(content)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no result: {error}") from error


def in_order(
    wanted: Iterable[Key],
    outcomes: Iterable[Outcome],
    key: Callable[[Outcome], Key],
    *,
    item: str,
    done: str,
    by: str = "",
) -> tuple[Outcome, ...]:
    """Outcomes in the order of a specification, each item of it once.

    Args:
        wanted: Keys of the items of the specification, in their order.
        outcomes: In any order.
        key: Of an outcome.
        item: What an item is called.
        done: What was done with it.
        by: What a key is, to be said where one is not known.

    Raises:
        ValueError: One is missing, unknown or there twice.
    """
    given, order = list(outcomes), list(wanted)
    found = {key(outcome): outcome for outcome in given}
    if len(found) < len(given):
        raise ValueError(f"a {item} of the evaluation was {done} twice")
    if found.keys() != set(order):
        raise ValueError(
            f"the {len(given)} {item}s that were {done} are not the {len(order)} of the "
            f"specification{by}"
        )
    return tuple(found[each] for each in order)


def require_one_spec(first: SpecifiedResult, second: SpecifiedResult, what: str) -> None:
    """Refuse to compare results of different specifications, of which nothing can be said.

    Args:
        first: A result.
        second: Another.
        what: What both must have in common, in words.

    Raises:
        ConfigError: They have not.
    """
    if first.spec_sha256 != second.spec_sha256:
        raise ConfigError(
            f"{first.checkpoint} was evaluated by specification {first.spec_sha256[:12]}…, "
            f"{second.checkpoint} by {second.spec_sha256[:12]}…: only results on the same {what} "
            "can be compared. Evaluate both with one specification."
        )


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


# -- episodes -----------------------------------------------------------------------------------


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
        ordered = in_order(
            spec.episodes,
            outcomes,
            lambda outcome: (outcome.episode_id, outcome.seed),
            item="episode",
            done="played",
            by=", by id and seed",
        )
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
