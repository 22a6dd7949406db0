"""Evaluation as a contract: a specification that is a file with a hash, results that carry it.

A success rate says nothing without the items it was measured on. Here is what all kinds of items
have in common; :mod:`rlinf.data.episode_evaluation` has episodes, :mod:`rlinf.data.text_evaluation`
prompts.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from rlinf.checkpoint.files import write_atomic
from rlinf.data.estimates import PairedEstimate, difference
from rlinf.errors import ConfigError, sought

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as _Dataclass
else:
    _Dataclass = object

Key = TypeVar("Key", bound=Hashable)
OutcomeT = TypeVar("OutcomeT")


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
            own = spec.sha256
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no specification: {error}") from error
        if stated not in (None, own):
            raise ConfigError(
                f"{path} was changed after it was written: its hash is {own[:12]}…, it "
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
    """What it measures first of all."""
    spec_sha256: str
    """Hash of the specification."""
    checkpoint: str
    """What was evaluated: run and step, or a path."""

    @property
    def manner(self) -> str:
        """How it was come by, where there are several ways."""
        return ""

    @abstractmethod
    def scores(self, metric: str) -> np.ndarray:
        """[items] float64, the metric of each item."""

    def compared_by(self, other: Self) -> str:
        """What two results of one specification are compared by where nothing else is said."""
        return self.metric

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
    outcomes: Iterable[OutcomeT],
    key: Callable[[OutcomeT], Key],
    *,
    item: str,
    done: str,
    by: str = "",
) -> tuple[OutcomeT, ...]:
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
    if first.manner != second.manner:
        raise ConfigError(
            f"{first.checkpoint} was evaluated {first.manner}, {second.checkpoint} "
            f"{second.manner}; nearest: both in one way, which evaluation.deterministic says"
        )
    metric = metric or first.compared_by(second)
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
        raise ConfigError(f"there is no file {sought(Path(path))}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != expected_format:
        raise ConfigError(f"{path} is no file of the format {expected_format}")
    return content
