"""Plain Python values as JSON, without losing their types.

Runs in the sandboxes as well, so it imports the standard library alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MAX_LINE = 16 * 2**20
"""Bytes of one message; a longer one counts as the end of the conversation."""

_PLAIN_BITS = 64
"""A whole number of more goes in hexadecimal: Python refuses to write or read one of over 4300
decimal digits, and takes time by the square of their number."""

_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: _whole(int.__int__(value))),
    (float, float.__float__),
    (str, str.__str__),
)
_FORMS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (bytes, "bytes", bytes.hex),
    (complex, "complex", lambda value: [value.real, value.imag]),
    (Decimal, "decimal", str),
    (Fraction, "fraction", lambda value: f"{value.numerator:x}/{value.denominator:x}"),
)
_SEQUENCES: tuple[tuple[Any, str], ...] = (
    (list, "list"),
    (tuple, "tuple"),
    (set, "set"),
    (frozenset, "frozenset"),
)
_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "decimal": Decimal,
    "fraction": lambda text: Fraction(*(int(part, 16) for part in text.split("/"))),
    "whole": lambda text: int(text, 16),
}


class NotPlainError(TypeError):
    """A value is no plain data."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value in the form of JSON.

    Numbers, texts, None, and containers of such; one of a subclass becomes one of the built-in
    type. ``other`` is called for everything else, and returns its form or raises.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind, exact in _SCALARS:
        if isinstance(value, kind):
            return exact(value)
    for kind, name, content in _FORMS:
        if isinstance(value, kind):
            return {name: content(value)}
    for sequence, name in _SEQUENCES:
        if isinstance(value, sequence):
            return {name: [encode(item, other) for item in sequence.__iter__(value)]}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in pairs]}
    return other(value)


def _whole(value: int) -> Any:
    return value if value.bit_length() <= _PLAIN_BITS else {"whole": hex(value)}


def decode(form: Any, handle: Callable[[int], Any]) -> Any:
    """The value of a form (ValueError for others); ``handle`` gives what stands for an object."""
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if not isinstance(form, dict) or len(form) != 1:
        raise ValueError("not the form of a value")
    ((name, content),) = form.items()
    if name in [known for _, known in _SEQUENCES]:
        return next(kind for kind, known in _SEQUENCES if known == name)(
            decode(item, handle) for item in content
        )
    if name == "dict":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    if name == "complex":
        return complex(*content)
    if name == "handle" and isinstance(content, int):
        return handle(content)
    if name in _FROM_TEXT and isinstance(content, str):
        return _FROM_TEXT[name](content)
    raise ValueError(f"no value is called {name!r}")


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any]:
    """Read one message; EOFError where the other side has ended, or says what is none."""
    line = stream.readline(MAX_LINE)
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EOFError("the other side has ended") from error
    if not isinstance(message, dict):
        raise EOFError("the other side sent no message")
    return message
