"""Addresses of action servers, looked at before anything heavy is loaded."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from rlinf.errors import ConfigError

_PORTS = {"ws": 80, "wss": 443}
_SECONDS = 10.0  # for a connection to another machine


def require_listening(host: str, port: int) -> None:
    """Refuse an address at which this machine cannot listen now, by a ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # the address of version 4 has a socket of its own
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(1)
    except (OSError, UnicodeError) as error:  # the second of what no machine can be called
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    """What is told of an address that is taken, or not one of this machine."""
    foreign = isinstance(error, socket.gaierror | UnicodeError)
    foreign = foreign or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
    nearest = (
        "--host 127.0.0.1, or 0.0.0.0 for every address of this machine"
        if foreign
        else "another --port, or 0 for any free one"
    )
    why = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot listen at {host}, port {port}: {why}; nearest: {nearest}")


def require_server(url: str) -> None:
    """Refuse what is no ``ws://HOST:PORT``, or where nobody listens, by a ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # a port that is no number, or too large
        host = None
    if not host or parts.scheme not in _PORTS:
        raise ConfigError(
            f"--server = '{url}' is no address of an action server; write ws://HOST:PORT"
        )
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"no action server at {url}: {why}; rlinf serve policy prints where it listens"
        ) from error
