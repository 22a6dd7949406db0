"""Messages between a vector env and its env processes: a small header and, rarely, a payload."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

_HEADER = struct.Struct("<BbhqI")
_LENGTH = struct.Struct("<I")
_ARRAY = "__array__"


class Op(IntEnum):
    """What a message asks for or answers."""

    START = 1
    ATTACH = 2
    RESET = 3
    STEP = 4
    RESTORE = 5
    STATE = 6
    RENDER = 7
    SCHEDULE = 8
    CLOSE = 9
    DONE = 20
    ERROR = 21


@dataclass(frozen=True)
class Message:
    """One message.

    Args:
        op: What it asks for or answers.
        stage: Pipeline stage it concerns, -1 when none.
        chunk: Primitive steps of a STEP.
        sequence: Number of the command, repeated in its answer.
        payload: Further content.
    """

    op: int
    stage: int = -1
    chunk: int = 0
    sequence: int = 0
    payload: bytes = b""


def send(connection: socket.socket, message: Message) -> None:
    """Send one message.

    Raises:
        OSError: The other side is gone.
    """
    header = _HEADER.pack(
        message.op, message.stage, message.chunk, message.sequence, len(message.payload)
    )
    connection.sendall(header + message.payload)


def receive(connection: socket.socket) -> Message:
    """Return the next message.

    Raises:
        EOFError: The other side closed the connection or ended.
        TimeoutError: Nothing came within the socket's timeout.
    """
    op, stage, chunk, sequence, size = _HEADER.unpack(_read(connection, _HEADER.size))
    return Message(op, stage, chunk, sequence, _read(connection, size) if size else b"")


def _read(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    while len(data) < size:
        part = connection.recv(size - len(data)) if data else b""
        if not part:
            raise EOFError("the other side closed the connection")
        data += part
    return data


def encode_tree(tree: dict[str, Any]) -> bytes:
    """Return ``tree`` (nested dicts and lists of arrays, numbers, text, None) as bytes."""
    buffers: list[bytes] = []
    header = json.dumps(_strip(tree, buffers)).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *buffers])


def decode_tree(data: bytes) -> dict[str, Any]:
    """Return what :func:`encode_tree` wrote; the arrays are writable copies. Executes no code."""
    (size,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + size
    tree = json.loads(data[_LENGTH.size : start])
    restored: dict[str, Any] = _fill(tree, memoryview(data), [start])
    return restored


def _strip(value: Any, buffers: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be part of a state")
        buffers.append(value.tobytes())
        return {_ARRAY: [np.lib.format.dtype_to_descr(value.dtype), value.shape]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _strip(item, buffers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strip(item, buffers) for item in value]
    return value


def _fill(value: Any, data: memoryview, position: list[int]) -> Any:
    if isinstance(value, list):
        return [_fill(item, data, position) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value:
        return {key: _fill(item, data, position) for key, item in value.items()}
    descr, shape = value[_ARRAY]
    dtype = np.dtype(descr if isinstance(descr, str) else [tuple(field) for field in descr])
    start = position[0]
    position[0] = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(data[start : position[0]], dtype).reshape(shape).copy()
