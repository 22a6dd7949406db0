"""Messages as clients of openpi write them: msgpack, in which an array is bytes, type and shape."""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np

from rlinf.errors import UserError

LARGEST_MESSAGE = 256 << 20
"""Bytes of a message that is too large for a server, which drops the connection of who sends it."""
_KIND = re.compile(r"[<>|=]?[biufSU]\d{1,6}")
"""Types of numpy that travel, as it writes them; objects and records do not: no code is ever
executed, and numpy parses nothing else."""


class WireError(UserError):
    """Bytes that are no message."""


def pack(message: Any) -> bytes:
    """A message of plain values, numpy arrays and numpy scalars as bytes.

    Raises:
        WireError: It holds anything else.
    """
    try:
        packed: bytes = msgpack.packb(message, default=_encode)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"this cannot be sent: {error}") from error
    return packed


def unpack(data: bytes) -> Any:
    """The message behind bytes; its arrays are views of them, and read-only.

    Raises:
        WireError: They are no message.
    """
    try:
        return msgpack.unpackb(data, object_hook=_decode)
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise WireError(f"this is no message in msgpack: {said}") from error


def _encode(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{type(value).__name__} is neither a plain value nor an array")
    kind = _type(value.dtype.str).str
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True, b"data": value.tobytes(), b"dtype": kind, b"shape": value.shape
        }  # fmt: skip
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": kind}


def _decode(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        kind, shape = _type(value[b"dtype"]), value[b"shape"]
        # numpy would take a negative length, and leave out what is too much.
        if math.prod(shape) * kind.itemsize != len(value[b"data"]) or min(shape, default=0) < 0:
            raise ValueError(f"{len(value[b'data'])} bytes are no array {shape} of {kind}")
        return np.ndarray(buffer=value[b"data"], dtype=kind, shape=shape)
    if b"__npgeneric__" in value:
        kind, data = _type(value[b"dtype"]), value[b"data"]
        if kind.kind in "SU" and not isinstance(data, bytes | str):  # a number would be a length
            raise ValueError(f"{str(data)[:20]} is no text")
        return kind.type(data)
    return value


def _type(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _KIND.fullmatch(name):
        raise ValueError(f"arrays of type {str(name)[:20]!r} do not travel")
    return np.dtype(name)
