"""Reads records from files, one at a time; a broken one costs itself alone where that can be."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError, MissingPackageError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One record and where it stands: ``file:line``, or ``file: record 3`` (from 1)."""

    where: str
    value: Mapping[str, Any]


@dataclass(frozen=True)
class BrokenRecord:
    """A record that cannot be read, where it stands and why."""

    where: str
    reason: str


Read = Iterator[Record | BrokenRecord]


def read_records(path: Path) -> Read:
    """Yield every record of a file, in order.

    Lines of JSON may have the suffix of JSON: what the file begins with decides.

    Raises:
        ConfigError: The file cannot be opened, or is broken as a whole.
        MissingPackageError: It is Parquet, and pyarrow is not installed.
    """
    path = path.expanduser()
    readers: dict[str, Callable[[Path], Read]] = {
        ".parquet": _parquet,
        ".csv": _csv,
        ".json": _json,
    }
    try:
        yield from readers.get(path.suffix.lower(), _lines)(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _json(path: Path) -> Read:
    with path.open("rb") as file:
        begin = file.read(4096).removeprefix(_BOM).lstrip()
    return _array(path) if begin.startswith(b"[") else _lines(path)


def _array(path: Path) -> Read:
    data = path.read_bytes().removeprefix(_BOM)
    try:
        items = _parse(data)
    except _UnreadableError as error:
        raise ConfigError(f"{path} is broken as a whole: {error}") from error
    for number, item in enumerate(items, 1):
        yield _record(f"{path}: record {number}", item)


def _lines(path: Path) -> Read:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield _record(where, _parse(text))
            except _UnreadableError as error:
                yield BrokenRecord(where, str(error))


def _csv(path: Path) -> Read:
    data = path.read_bytes().removeprefix(_BOM)
    try:
        reader = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
        for number, row in enumerate(reader, 1):
            where = f"{path}: record {number}"
            if None in row or None in row.values():
                yield BrokenRecord(where, "has another number of columns than the first line")
            else:
                yield Record(where, row)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is broken as a whole: {_not_utf8(error)}") from error
    except csv.Error as error:
        raise ConfigError(f"{path} is broken as a whole: no CSV, {error}") from error


def _parquet(path: Path) -> Read:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackageError("pyarrow", "language", f"the file {path.name}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}: record {number}", row)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is broken after record {number}: {why}") from error


class _UnreadableError(ValueError):
    """What is wrong with a piece of JSON, in words."""


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _UnreadableError(_not_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise _UnreadableError(f"no JSON, {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise _UnreadableError("nested too deeply") from error
    except ValueError as error:
        raise _UnreadableError(f"no JSON, {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 at byte {error.start}"


def _record(where: str, item: Any) -> Record | BrokenRecord:
    if isinstance(item, Mapping):
        return Record(where, item)
    return BrokenRecord(where, f"an object is expected, not {type(item).__name__}")
