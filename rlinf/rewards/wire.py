"""Messages between the pool and its processes: length, then JSON.

JSON and not pickle: a process works on text that a model wrote, and what it answers must not be
able to do more than answer.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: The other side is gone, or took nothing for the time limit of the socket.
    """
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        EOFError: The other side is gone.
        OSError: So too, or the time limit of the socket is over.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(connection, length))
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = connection.recv(min(count - len(content), 2**20))
        if not part:
            raise EOFError("the other side of the connection is gone")
        content += part
    return bytes(content)
