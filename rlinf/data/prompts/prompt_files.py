"""Reads prompts from files, record by record; a broken record costs itself alone where that can be.

What is left out on the way to a set, here and when it is tokenised, is counted and named.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError, MissingPackageError

_BOM = b"\xef\xbb\xbf"
PICTURE_MARK = "<image>"
"""In a text the place of a picture."""
_SHOWN = 5  # records that are named; the rest is counted

Message = Mapping[str, Any]


Taker = Callable[[str, Mapping[str, Any], Path], "RawPrompt"]
"""From where a record stands, the record and the folder of its file to a prompt."""


class UnusableRecordError(ValueError):
    """Why a record cannot be read or become a prompt, in words."""


class _NullError(UnusableRecordError):
    """Its key is there, and holds nothing."""


@dataclass(frozen=True, kw_only=True)
class RawPrompt:
    """A prompt before tokenisation.

    Args:
        where: Where it stands: ``file:line``, or ``file: record 3`` (from 1).
        content: A text, or messages.
        answer: What the reward is given.
        level: Level of difficulty, or None.
        pictures: What its pictures are read from; None: prompts have none.
        unpictured: Why it has none, where its record has not even their key.
        columns: What else of its record the reward is given.
    """

    where: str
    content: str | tuple[Message, ...]
    answer: Any
    level: int | None = None
    pictures: tuple[bytes | Path, ...] | None = None
    unpictured: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadingReport:
    """How many records became prompts.

    Args:
        records: Records that were read.
        prompts: Prompts that they gave.
        broken: Records that were left out because they could not be read.
        long: Prompts that were longer than allowed.
        truncated: Those of them that were cut and kept.
        beyond_limit: Prompts that were not taken because enough were there.
        pictured: Prompts with pictures; None: none is to have any.
        stopped: Whether there are more records, which were not read as enough prompts were there.
        examples: The first broken and over-long records: where, and why.
    """

    records: int
    prompts: int
    broken: int = 0
    long: int = 0
    truncated: int = 0
    beyond_limit: int = 0
    pictured: int | None = None
    stopped: bool = False
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        first = "the first " if self.stopped else ""
        parts = [f"{self.prompts} prompts of {first}{self.records} records"]
        if self.pictured is not None and self.pictured < self.prompts:
            parts.append(f"{self.pictured} with pictures")
        counts = {
            "broken": self.broken,
            "too long": self.long - self.truncated,
            "cut to length": self.truncated,
            "beyond the limit": self.beyond_limit,
        }
        parts += [f"{count} {name}" for name, count in counts.items() if count]
        lines = [", ".join(parts), *(f"  {example}" for example in self.examples)]
        hidden = self.broken + self.long - len(self.examples)
        if hidden:
            lines.append(f"  and {hidden} more")
        return "\n".join(lines)


@dataclass
class Notes:
    """Collects what happens while one set is loaded, by the names in :class:`LoadingReport`."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[tuple[str, str]] = field(default_factory=list)
    """The first events of each kind, in the order in which they came."""

    def add(self, kind: str, where: str, reason: object) -> None:
        """Count an event, and keep it if it is one of the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= _SHOWN:
            self.first.append((kind, f"{where}: {reason}"))

    def listed(self, text: str, kind: str) -> str:
        """A text with the first events of a kind, a line each."""
        return "\n  ".join([f"{text}:", *(line for other, line in self.first if other == kind)])

    def report(
        self, prompts: int, pictured: int | None = None, *, stopped: bool = False
    ) -> LoadingReport:
        """Everything so far, and how many prompts were kept, so many with pictures; ``stopped``:
        there are more records."""
        counts = {"records": 0, **self.counts}
        examples = tuple(line for _, line in self.first[:_SHOWN])
        return LoadingReport(
            prompts=prompts, pictured=pictured, stopped=stopped, examples=examples, **counts
        )


def read_prompts(
    paths: Iterable[Path], take: Taker, notes: Notes, *, keys: Sequence[str] = ()
) -> Iterator[RawPrompt]:
    """The prompts of files, in order and as they are asked for; ``notes`` is told which records are
    broken.

    Lines of JSON may have the suffix of JSON: what the file begins with decides.

    Args:
        paths: The files.
        take: Gives the prompt of a record, of which it is told where it stands and the folder of
            its file, or raises UnusableRecordError.
        notes: Counts.
        keys: What ``take`` looks at in a record, ``a.b`` for one in a mapping; none: everything.

    Raises:
        ConfigError: A file cannot be opened, or is broken as a whole.
        MissingPackageError: It is Parquet, and pyarrow is not installed.
    """
    for path in paths:
        yield from (found for found in _taken(path, take, notes, keys) if found is not None)


def check_records(path: Path, take: Taker, *, most: int, keys: Sequence[str] = ()) -> None:
    """Look whether a file has a record that can be used, among the first ones: behind more than
    ``most`` that are broken it does not matter.

    Raises:
        ConfigError: It has none.
        MissingPackageError: As :func:`read_prompts`.
    """
    notes = Notes()
    for found in _taken(path, take, notes, keys):
        if found is not None:
            return
        if notes.counts["broken"] > most:
            break
    broken = notes.counts["broken"]
    if not broken:
        raise ConfigError(f"{path} has no record")
    raise ConfigError(
        notes.listed(f"none of the first {broken} records of {path} can be used", "broken")
    )


def first_prompts(
    path: Path, take: Taker, *, most: int | None, keys: Sequence[str] = ()
) -> list[RawPrompt]:
    """Those among the first ``most`` records of a file, None: all, that can be used; errors are
    those of :func:`read_prompts`."""
    taken = _taken(path, take, Notes(), keys)
    return [found for found in islice(taken, most) if found is not None]


def _taken(
    path: Path, take: Taker, notes: Notes, keys: Sequence[str]
) -> Iterator[RawPrompt | None]:
    """The prompt of each record; None of one that is broken."""
    path = path.expanduser()
    try:
        for where, record in _READERS.get(path.suffix.lower(), _lines)(path, keys):
            notes.counts["records"] += 1
            try:
                found = take(where, _mapping(record), path.parent)
            except UnusableRecordError as error:
                notes.add("broken", where, error)
                found = None
            yield found
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


# -- files: each reader yields where a record stands, and the record or why there is none ---------
# It is told which keys are looked at; the others need not be read.

Read = Iterator[tuple[str, Any]]


def _json(path: Path, keys: Sequence[str]) -> Read:
    with path.open("rb") as file:
        begin = file.read(4096).removeprefix(_BOM).lstrip()
    if not begin.startswith(b"["):
        yield from _lines(path, keys)
        return
    items = _parsed(path.read_bytes().removeprefix(_BOM))
    if isinstance(items, UnusableRecordError):
        raise ConfigError(f"{path} is broken as a whole: {items}") from items
    for number, item in enumerate(items, 1):
        yield f"{path}: record {number}", item


def _lines(path: Path, keys: Sequence[str]) -> Read:
    del keys
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                yield f"{path}:{number}", _parsed(text)


def _csv(path: Path, keys: Sequence[str]) -> Read:
    del keys
    data = path.read_bytes().removeprefix(_BOM)
    # A field may be as long as the file; the limit of the module is that of the process.
    csv.field_size_limit(max(csv.field_size_limit(), len(data)))
    try:
        reader = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
        keys = reader.fieldnames or ()
        if repeated := [key for key, times in Counter(keys).items() if times > 1]:
            raise ConfigError(f"{path}: the first line has the key '{repeated[0]}' more than once")
        for number, row in enumerate(reader, 1):
            uneven = None in row or None in row.values()
            why = "has another number of columns than the first line"
            yield f"{path}: record {number}", UnusableRecordError(why) if uneven else row
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is broken as a whole: {_not_utf8(error)}") from error
    except csv.Error as error:
        raise ConfigError(f"{path} is broken as a whole: no CSV, {error}") from error


def _parquet(path: Path, keys: Sequence[str]) -> Read:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackageError("pyarrow", "language", f"the file {path.name}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow.names, keys)
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: record {number}", _as_written(row)
    except (pyarrow.ArrowException, ValueError) as error:  # as of a time that Python cannot tell
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is broken after record {number}: {why}") from error


def _columns(names: Sequence[str], keys: Sequence[str]) -> list[str] | None:
    """Those of a file that are looked at; None, all of them, where one is not there, so that the
    nearest can be named."""
    found = dict.fromkeys(key if key in names else key.partition(".")[0] for key in keys)
    return [*found] if found and found.keys() <= {*names} else None


def _as_written(value: Any) -> Any:
    """A value of Parquet without nulls in its messages: there each call of a tool has the arguments
    of all tools of the file, and a template would write those that nobody gave it."""
    if isinstance(value, list):
        return [_as_written(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if {"role", "content"} <= value.keys():
        return _without_nulls(value)
    return {key: _as_written(each) for key, each in value.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(each) for key, each in value.items() if each is not None}


_READERS = {".parquet": _parquet, ".csv": _csv, ".json": _json}


def _parsed(data: bytes) -> Any:
    """What JSON says, or the error that it is none."""
    try:
        return json.loads(data.decode().rstrip(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return UnusableRecordError(_not_utf8(error))
    except json.JSONDecodeError as error:
        return UnusableRecordError(f"no JSON, {error.msg} at column {error.colno}")
    except RecursionError:
        return UnusableRecordError("nested too deeply")
    except ValueError as error:
        return UnusableRecordError(f"no JSON, {error}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 at byte {error.start}"


def _mapping(record: Any) -> Mapping[str, Any]:
    if isinstance(record, UnusableRecordError):
        raise record
    if not isinstance(record, Mapping):
        raise UnusableRecordError(f"an object is expected, not {type(record).__name__}")
    return record


# -- fields of a record -------------------------------------------------------------------------


def raw_prompt(
    where: str,
    record: Mapping[str, Any],
    prompt: str,
    answer: str,
    level: str | None = None,
    *,
    pictured: bool = False,
) -> RawPrompt:
    """The prompt of a record by keys; UnusableRecordError where what they hold is of no use."""
    return RawPrompt(
        where=where,
        content=_content(_value(record, prompt), prompt, pictured),
        answer=_answer(_value(record, answer), answer),
        level=None if level is None else _level(_value(record, level), level),
    )


def columns_of(record: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What a record holds under keys; UnusableRecordError where it lacks one. null is a value."""
    nothing = {key for key in keys if key in record and record[key] is None}
    return {
        key: None if key in nothing else _told_as_json(_value(record, key), key) for key in keys
    }


def _told_as_json(value: Any, key: str) -> Any:
    """A value that reward functions can be given; Parquet has others, such as dates and bytes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnusableRecordError(f"`{key}` holds half a character") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableRecordError(f"`{key}` is nothing that JSON can say: {error}") from error
    return value


def value_or_why(record: Mapping[str, Any], key: str) -> tuple[Any, str]:
    """What a record holds under a key that it may lack, or None and why; null is no reason."""
    try:
        return _value(record, key), ""
    except _NullError:
        return None, ""
    except UnusableRecordError as error:
        return None, str(error)


def _value(record: Mapping[str, Any], key: str) -> Any:
    first, dot, rest = key.partition(".")
    if key not in record and dot and isinstance(record.get(first), Mapping):
        return _value(record[first], rest)
    if key not in record:
        raise UnusableRecordError(f"has no key `{key}`; {did_you_mean(key, map(str, record))}")
    if record[key] is None:
        raise _NullError(f"`{key}` is null")
    return record[key]


def _content(value: Any, key: str, pictured: bool) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return _text(value, key)
    if not isinstance(value, list):
        kind = type(value).__name__
        raise UnusableRecordError(f"`{key}` is a text or a list of messages, not {kind}")
    if not value:
        raise UnusableRecordError(f"`{key}` is empty")
    return tuple(message_of(message, f"{key}[{i}]", pictured) for i, message in enumerate(value))


def message_of(value: Any, key: str, pictured: bool = False) -> Message:
    """A message that stands under a key, its content one text, with marks where it is ``pictured``;
    UnusableRecordError for what is none."""
    calls = isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list | tuple)
    if calls and value["tool_calls"] and value.get("content") is None:
        value = {**value, "content": ""}  # who calls tools need not say anything
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        raise UnusableRecordError(f"`{key}` is no message with `role` and `content`")
    if isinstance(value["content"], list):
        value = {**value, "content": _joined(value["content"], key, pictured)}
    if not isinstance(value["role"], str) or not isinstance(value["content"], str):
        raise UnusableRecordError(f"`{key}`: role and content are texts")
    silent = not value["content"] and (value["role"] == "tool" or bool(value.get("tool_calls")))
    texts = ("role",) if silent else ("role", "content")
    told = {name: _text(value[name], f"{key}.{name}") for name in texts}
    # What else a message has is the template's: who says it, calls of tools.
    return {**{name: each for name, each in value.items() if each is not None}, **told}


def _joined(parts: list[Any], key: str, pictured: bool) -> str:
    """Parts of a message as one text, with a mark where a picture goes."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image" and pictured:
            texts.append(PICTURE_MARK)
        elif kind == "image":
            raise UnusableRecordError(f"`{key}` has a picture, and no image_key says where it is")
        else:
            raise UnusableRecordError(f"`{key}`: parts of content are texts or of type image")
    return "".join(texts)


def _text(value: str, key: str) -> str:
    if not value:
        raise UnusableRecordError(f"`{key}` is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnusableRecordError(f"`{key}` holds half a character at {error.start}") from error
    return value


def _answer(value: Any, key: str) -> Any:
    """The answer as rewards take it: a text or a number becomes a list of one."""
    if isinstance(value, str | int | float):
        value = [value]
    if isinstance(value, list | dict) and not value:
        raise UnusableRecordError(f"`{key}` is empty")
    if isinstance(value, list) and any(
        item is None or (isinstance(item, str) and not item.strip()) for item in value
    ):
        raise UnusableRecordError(f"`{key}` holds an empty answer")
    # In Parquet what is missing among numbers may be a NaN.
    if isinstance(value, list) and any(
        isinstance(item, float) and math.isnan(item) for item in value
    ):
        raise UnusableRecordError(f"`{key}` holds NaN")
    return _told_as_json(value, key)


def _level(value: Any, key: str) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnusableRecordError(f"`{key}` is a whole number, not {value!r}")
    return value
