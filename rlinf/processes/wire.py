"""Messages between a process and its child: trees of plain values and arrays, over a socket.

A message is a JSON header followed by the bytes of its arrays. Reading one executes nothing, as a
child may work on what a model or a stranger wrote. Imports the standard library alone, and numpy
where there are arrays, so that a child that knows none starts quickly.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from typing import Any

_LENGTHS = struct.Struct("<IQ")  # bytes of the header, and of the arrays behind it
_ARRAY = "__array__"
_SMALL, _PIECE = 1 << 12, 1 << 20


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: The other side is gone, or took nothing for the time limit of the socket.
    """
    connection.sendall(encode_tree(message))


class Messages:
    """The messages that come over a connection, one after the other.

    Most are read by one call of the system: what has come of the next one with them is kept.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._kept = connection, b""

    @property
    def begun(self) -> bool:
        """Whether some of the next message is here, of which the connection tells nothing more."""
        return bool(self._kept)

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            EOFError: The other side closed the connection or ended.
            OSError: So too, or the time limit of the socket is over.
            ValueError: What came is no message.
        """
        content = self._at_least(self._kept, _LENGTHS.size)
        end = _LENGTHS.size + sum(_LENGTHS.unpack_from(content))
        content = self._at_least(content, end)
        self._kept = content[end:]
        return decode_tree(content[:end])

    def _at_least(self, content: bytes, count: int) -> bytes:
        if len(content) >= count:
            return content
        found = bytearray(content)
        while len(found) < count:
            # Not so much more than is needed that a long message would be copied once more.
            part = self._part(min(max(count - len(found), _SMALL), _PIECE))
            if not part:
                raise EOFError("the other side closed the connection")
            found += part
        return bytes(found)

    def _part(self, count: int) -> bytes:
        """What has come, or else what comes next."""
        try:
            # A socket with a time limit would be asked first whether it has something.
            return os.read(self._connection.fileno(), count)
        except BlockingIOError:
            return self._connection.recv(count)


def encode_tree(tree: dict[str, Any]) -> bytes:
    """A tree of dicts and lists of arrays, numbers, text and None as bytes; else a TypeError."""
    buffers: list[bytes] = []
    try:
        text = json.dumps(tree)  # most messages hold no array: they need no second look
    except TypeError:
        text = ""
    if not text or _ARRAY in text:
        text = json.dumps(_without_arrays(tree, buffers))
    header = text.encode()
    return b"".join([_LENGTHS.pack(len(header), sum(map(len, buffers))), header, *buffers])


def decode_tree(data: bytes) -> dict[str, Any]:
    """What :func:`encode_tree` wrote, or a ValueError; the arrays are writable copies."""
    try:
        header, _ = _LENGTHS.unpack_from(data)
        begin = _LENGTHS.size + header
        text = data[_LENGTHS.size : begin].decode()
        found: dict[str, Any] = json.loads(text)
        return _with_arrays(found, memoryview(data), [begin]) if _ARRAY in text else found
    except (KeyError, TypeError, struct.error) as error:
        raise ValueError(f"no message: {error}") from error


def _without_arrays(value: Any, buffers: list[bytes]) -> Any:
    np = sys.modules.get("numpy")  # where it was not imported, nobody has arrays
    if np is not None and isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be part of a message")
        buffers.append(value.tobytes())
        return {_ARRAY: [np.lib.format.dtype_to_descr(value.dtype), value.shape]}
    if np is not None and isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_escaped(key): _without_arrays(item, buffers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(item, buffers) for item in value]
    return value


def _escaped(key: Any) -> Any:
    """A key that is not taken for the sign of an array: one more character where it begins so."""
    return f"{key}_" if isinstance(key, str) and key.startswith(_ARRAY) else key


def _unescaped(key: str) -> str:
    return key[:-1] if key.startswith(_ARRAY) else key


def _with_arrays(value: Any, data: memoryview, position: list[int]) -> Any:
    if isinstance(value, list):
        return [_with_arrays(item, data, position) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value:
        return {_unescaped(k): _with_arrays(item, data, position) for k, item in value.items()}
    import numpy as np

    descr, shape = value[_ARRAY]
    dtype = np.dtype(descr if isinstance(descr, str) else [tuple(field) for field in descr])
    begin = position[0]
    position[0] = begin + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(data[begin : position[0]], dtype).reshape(shape).copy()
