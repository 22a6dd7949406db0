"""What evaluations of all kinds have in common: a specification that is a file with a hash, and
results that carry it.

Only results of one specification can be compared.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlinf.checkpoint.files import write_atomic
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as _Dataclass
else:
    _Dataclass = object


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
