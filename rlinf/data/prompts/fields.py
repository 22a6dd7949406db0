"""Takes prompt, answer and level out of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.config.nearest import did_you_mean

Message = Mapping[str, str]


class UnusableRecordError(ValueError):
    """Why a record cannot become a prompt, in words."""


@dataclass(frozen=True, kw_only=True)
class RawPrompt:
    """A prompt before tokenisation.

    Args:
        where: Where it stands.
        content: A text, or messages.
        answer: What the reward is given.
        level: Level of difficulty, or None.
    """

    where: str
    content: str | tuple[Message, ...]
    answer: Any
    level: int | None


@dataclass(frozen=True)
class RecordKeys:
    """Keys of a record that are read."""

    prompt: str
    answer: str
    level: str | None = None


def raw_prompt(where: str, record: Mapping[str, Any], keys: RecordKeys) -> RawPrompt:
    """The prompt of a record.

    Raises:
        UnusableRecordError: A key is missing, or what it holds is of no use.
    """
    return RawPrompt(
        where=where,
        content=_content(_value(record, keys.prompt), keys.prompt),
        answer=answer_of(_value(record, keys.answer), keys.answer),
        level=None if keys.level is None else _level(_value(record, keys.level), keys.level),
    )


def _value(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise UnusableRecordError(f"has no key `{key}`; {did_you_mean(key, map(str, record))}")
    if record[key] is None:
        raise UnusableRecordError(f"`{key}` is null")
    return record[key]


def _content(value: Any, key: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return _text(value, key)
    if not isinstance(value, list):
        kind = type(value).__name__
        raise UnusableRecordError(f"`{key}` is a text or a list of messages, not {kind}")
    if not value:
        raise UnusableRecordError(f"`{key}` is empty")
    return tuple(_message(message, f"{key}[{i}]") for i, message in enumerate(value))


def _message(value: Any, key: str) -> Message:
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        raise UnusableRecordError(f"`{key}` is no message with `role` and `content`")
    if not isinstance(value["role"], str) or not isinstance(value["content"], str):
        raise UnusableRecordError(f"`{key}`: role and content are texts")
    return {name: _text(value[name], f"{key}.{name}") for name in ("role", "content")}


def _text(value: str, key: str) -> str:
    if not value:
        raise UnusableRecordError(f"`{key}` is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnusableRecordError(f"`{key}` holds half a character at {error.start}") from error
    return value


def answer_of(value: Any, key: str) -> Any:
    """The answer as rewards take it: a text or a number becomes a list of one.

    Raises:
        UnusableRecordError: It is empty.
    """
    if isinstance(value, str | int | float):
        value = [value]
    if isinstance(value, list | dict) and not value:
        raise UnusableRecordError(f"`{key}` is empty")
    if isinstance(value, list) and any(item is None or item == "" for item in value):
        raise UnusableRecordError(f"`{key}` holds an empty answer")
    return value


def _level(value: Any, key: str) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnusableRecordError(f"`{key}` is a whole number, not {value!r}")
    return value
