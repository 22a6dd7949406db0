"""Evaluation as a contract: a specification that is a file with a hash, results that carry it.

A success rate says nothing without the items it was measured on. Here is what all kinds of items
have in common, and episodes; :mod:`rlinf.data.text_evaluation` has prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np

from rlinf.checkpoint.files import write_atomic
from rlinf.data.estimates import PairedEstimate, difference, wilson_interval
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as _Dataclass
else:
    _Dataclass = object

Key = TypeVar("Key", bound=Hashable)
Outcome = TypeVar("Outcome")
SuccessDefinition = Literal["success_once", "success_at_end"]


class HashedSpec(_Dataclass):
    """Base of the specifications, frozen dataclasses of JSON values with tuples for lists."""

    format: ClassVar[str]
    """Name and version of the file format, part of the hash."""

    def contents(self) -> dict[str, Any]:
        """Everything that the hash covers, as JSON values."""
        return asdict(self)

    @property
    def sha256(self) -> str:
        """SHA-256, in hex, of the canonical JSON: equal contents, equal hash."""
        content = {"format": self.format, **self.contents()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the specification, and its hash, as a JSON file."""
        _write_json(path, {"format": self.format, "sha256": self.sha256, **self.contents()})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a specification; ConfigError for other files, and ones changed since their hash."""
        content = _read_json(path, cls.format)
        stated = content.pop("sha256", None)
        try:
            spec = cls(**_with_tuples(content))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no specification: {error}") from error
        if stated not in (None, spec.sha256):
            raise ConfigError(
                f"{path} was changed after it was written: its hash is {spec.sha256[:12]}…, it "
                f"states {str(stated)[:12]}…. Remove the line `sha256` to make it a new one."
            )
        return spec


class SpecifiedResult(ABC, _Dataclass):
    """Base of the results, frozen dataclasses with an outcome for every item of a specification."""

    format: ClassVar[str]
    """Name and version of the file format."""
    outcome: ClassVar[Callable[..., Any]]
    """Class of the outcomes."""
    items: ClassVar[str]
    """What the items are called."""
    metric: ClassVar[str]
    """What results are compared by where nothing else is said."""
    spec_sha256: str
    """Hash of the specification."""
    checkpoint: str
    """What was evaluated: run and step, or a path."""

    @abstractmethod
    def scores(self, metric: str) -> np.ndarray:
        """[items] float64 in [0, 1], the metric of each item."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Rates for who reads the file; they are not read back."""

    def save(self, path: Path | str) -> None:
        """Write a JSON file; the rates in it are for readers, only the outcomes are read back."""
        _write_json(path, {"format": self.format, "summary": self.summary(), **asdict(self)})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a result; ConfigError where the file is none."""
        content = _read_json(path, cls.format)
        content.pop("summary", None)
        try:
            found = content["outcomes"]
            content["outcomes"] = tuple(cls.outcome(**_with_tuples(each)) for each in found)
            return cls(**_with_tuples(content))
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
    """Outcomes in the order of a specification.

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


def compare(
    first: SpecifiedResult, second: SpecifiedResult, metric: str | None = None
) -> PairedEstimate:
    """Compare two results item by item.

    Raises:
        ConfigError: They are of different specifications, or have no such metric.
    """
    if first.spec_sha256 != second.spec_sha256:
        raise ConfigError(
            f"{first.checkpoint} was evaluated by specification {first.spec_sha256[:12]}…, "
            f"{second.checkpoint} by {second.spec_sha256[:12]}…: only results on the same "
            f"{first.items} and seeds can be compared. Evaluate both with one specification."
        )
    metric = metric or first.metric
    return difference(
        first.scores(metric),
        second.scores(metric),
        metric=metric,
        first_name=first.checkpoint,
        second_name=second.checkpoint,
        items=first.items,
    )


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return {name: tuples(value) for name, value in content.items()}


def _write_json(path: Path | str, content: Mapping[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def _read_json(path: Path | str, expected_format: str) -> dict[str, Any]:
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
    """What is played in an evaluation, to the last seed; ConfigError where that makes no sense."""

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
    task: int = 0
    """Which of the result's tasks it was."""
    seed_shift: int = 0
    """By how much the simulator moved on from the seed, where it could not start that one."""


@dataclass(frozen=True)
class EvaluationResult(SpecifiedResult):
    """Outcomes of every episode of a specification, in its order; built by :meth:`of`."""

    format = "rlinf-evaluation-result/1"
    outcome = EpisodeOutcome
    items = "episodes"
    metric = "success rate"

    spec_sha256: str
    success: SuccessDefinition
    """The specification's definition of success."""
    checkpoint: str
    outcomes: tuple[EpisodeOutcome, ...]
    """One per episode."""
    tasks: tuple[str, ...] = ()
    """What the tasks are, in words; empty where the simulator says nothing."""

    @classmethod
    def of(
        cls,
        spec: EvaluationSpec,
        outcomes: Iterable[EpisodeOutcome],
        checkpoint: str,
        tasks: Iterable[str] = (),
    ) -> EvaluationResult:
        """Put the outcomes in the order of the specification; ValueError for others than its."""
        ordered = in_order(
            spec.episodes,
            outcomes,
            lambda outcome: (outcome.episode_id, outcome.seed),
            item="episode",
            done="played",
            by=", by id and seed",
        )
        return cls(spec.sha256, spec.success, checkpoint, ordered, tuple(tasks))

    def scores(self, metric: str = metric) -> np.ndarray:
        """[episodes] float64, 1 for success by the specification's definition."""
        return np.array([float(o.valid and getattr(o, self.success)) for o in self.outcomes])

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
        return int(self.scores().sum())

    @property
    def success_rate(self) -> float:
        """Successful share of all episodes."""
        return self.successes / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.n)

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        """Successes and episodes of every task; one that was not played has 0 of 0."""
        found = dict.fromkeys(self.tasks, (0, 0))
        for outcome, score in zip(self.outcomes, self.scores(), strict=True):
            task = self.tasks[outcome.task] if self.tasks else ""
            successes, episodes = found.get(task, (0, 0))
            found[task] = (successes + int(score), episodes + 1)
        return found

    @property
    def mean_over_tasks(self) -> float:
        """Mean of the tasks' success rates, NaN where a task was not played."""
        rates = [won / played if played else math.nan for won, played in self.by_task.values()]
        return math.fsum(rates) / len(rates)

    @property
    def mean_return(self) -> float:
        """Mean return of the valid episodes; NaN if there is none."""
        returns = [outcome.episode_return for outcome in self.outcomes if outcome.valid]
        return math.fsum(returns) / len(returns) if returns else math.nan

    def __str__(self) -> str:
        low, high = self.interval
        whole = (
            f"success rate {self.success_rate:.3f} (95 % interval {low:.3f} to {high:.3f}, "
            f"n = {self.n}, spec {self.spec_sha256[:12]})"
        )
        return "\n".join([whole, *self._lines_of_tasks()]) if len(self.tasks) > 1 else whole

    def _lines_of_tasks(self) -> Iterator[str]:
        """Every task's rate with its interval, then their mean; what was not played is named."""
        for task, (won, played) in self.by_task.items():
            if played:
                low, high = wilson_interval(won, played)
                yield f"  {won / played:.3f} ({low:.3f} to {high:.3f}, n = {played})  {task}"
            else:
                yield f"  not played  {task}"
        missing = sum(not played for _, played in self.by_task.values())
        mean = self.mean_over_tasks
        yield (
            f"  no mean over tasks: {missing} of {len(self.tasks)} were not played"
            if missing
            else f"  {mean:.3f}  mean over {len(self.tasks)} tasks"
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
            "tasks": {
                task: {
                    "n": played,
                    "successes": won,
                    "wilson_interval_95": list(wilson_interval(won, played)) if played else None,
                }
                for task, (won, played) in self.by_task.items()
            },
            "missing_tasks": [task for task, (_, played) in self.by_task.items() if not played],
        }
