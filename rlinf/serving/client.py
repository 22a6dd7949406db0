"""A client of an action server; needs numpy, msgpack and websockets, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from rlinf.errors import UserError
from rlinf.serving.wire import LARGEST_MESSAGE, pack, unpack

_UNAUTHORISED = 401
_FAREWELL, _REACHED = 0.5, 60.0  # seconds


class ServerError(UserError):
    """What a server refused, in its words, or why it cannot be reached."""


class ActionClient:
    """One connection to a server, for one thread at a time; a context manager that closes it.

    Args:
        url: ``ws://HOST:PORT``.
        token: What the server asks for.
        timeout: Seconds after which a server that does not answer counts as lost; of one that is
            not reached, 60 at most.

    Raises:
        ServerError: It cannot be reached, or refuses the token, or no token can be like this one.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0) -> None:
        self._timeout, self._open, self._closed = timeout, ExitStack(), False
        # A server that is lost does not answer the end of the connection either. Pings would end it
        # earlier than `timeout` says where a server answers none while its policy acts.
        settings: dict[str, Any] = {
            "compression": None, "max_size": None, "proxy": None, "close_timeout": _FAREWELL,
            "open_timeout": min(timeout, _REACHED), "ping_interval": None,
        }  # fmt: skip
        if token and not token.isprintable():  # what is raised later would show the token
            raise ServerError(
                "the token has a line end or another sign that no header may have, as where it was "
                "read from a file; strip it"
            )
        if token:
            settings["additional_headers"] = {"Authorization": f"Api-Key {token}"}
        try:
            self._socket = self._open.enter_context(connect(url, **settings))
            told = self._received(settings["open_timeout"])
            self.metadata: dict[str, Any] = unpack(told)
        except (OSError, ValueError, WebSocketException) as error:  # a port may be no number
            self.close()
            if isinstance(error, InvalidStatus) and error.response.status_code == _UNAUTHORISED:
                does = "refuses this token" if token else "asks for a token"
                wants = f"the action server at {url} {does}: give what it printed at its start"
                raise ServerError(f"{wants} (HTTP {_UNAUTHORISED})") from error
            raise ServerError(f"no action server at {url}: {error}") from error

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """``actions`` [C, A] for one observation, or [B, C, A] for ``{"batch": [observation, …]}``,
        with ``version`` of the weights, ``policy_timing`` and ``server_timing``.

        Raises:
            ServerError: The server refuses it, or would (and can be asked again), or is gone.
                Whatever else ends it before its answer is there, as Ctrl-C does, closes the
                connection as well.
        """
        request = pack(observation)
        if len(request) >= LARGEST_MESSAGE:
            raise ServerError(
                f"a request of {len(request):,} bytes is larger than a server takes; nearest: "
                f"several of less than {LARGEST_MESSAGE:,}"
            )
        if self._closed:
            raise ServerError(
                "the connection is closed, by `close` or because a request was broken off before "
                "its answer came; connect again"
            )
        try:
            self._socket.send(request)
            answer: dict[str, Any] = unpack(self._received(self._timeout))
        except ServerError:  # a refusal is an answer, too
            raise
        except BaseException as error:
            self.close()  # a late answer must not be taken for that of the next request
            if isinstance(error, OSError | WebSocketException):
                raise ServerError(f"the action server is gone: {error}") from error
            raise
        return answer

    def _received(self, timeout: float) -> bytes:
        answer: str | bytes = self._socket.recv(timeout)
        if isinstance(answer, str):
            raise ServerError(answer)
        return answer

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
