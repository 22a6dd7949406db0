"""A child process that answers messages: started, watched for its end and for hangs, ended.

:class:`SupervisedProcess` is the parent's handle, :func:`serve` the child's main loop. A child is
any module of this package with ``main(lifeline, commands, *descriptors)``. Imports no more than
the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlinf.errors import ConfigError, MissingPackageError, UserError
from rlinf.processes.child import ONE_THREAD, ChildProcess, watch_parent
from rlinf.processes.wire import receive, send

Loss = Literal["crash", "hang", "exception"]
"""How a child was lost: it ended, it did not answer in time, or it says that it cannot go on."""

CLOSE = "close"
"""Operation after whose answer a child ends."""

_LONGEST_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


class ProcessLostError(Exception):
    """A child ended, hangs or cannot go on.

    Args:
        reason: Which of these.
        detail: What is known about it: its output, its stacks.
    """

    def __init__(self, reason: Loss, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Loss = reason
        self.detail = detail


class SupervisedProcess:
    """One child that answers every message, in order.

    It builds what it works with when it is started; :meth:`receive` has its answer to that.

    Args:
        module: Its module; ``main`` of it calls :func:`serve`.
        settings: What it must know, as plain values; its first message, of operation ``start``.
        descriptors: File descriptors that it inherits, given to ``main``.
        environment: Variables on top of those of this process.
        python: Interpreter; None: this one.
        message_seconds: How long a message may be on its way, once it has begun.

    Raises:
        ConfigError: The interpreter ``python`` cannot be started.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] = ONE_THREAD,
        python: str | None = None,
        message_seconds: float = 30.0,
    ) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(message_seconds)
        try:
            inherited = [theirs.fileno(), *descriptors]
            self._child = ChildProcess(module, inherited, environment, python=python)
        except OSError as error:
            self.connection.close()
            reason = f"cannot start {python or sys.executable}: {error.strerror}"
            raise ConfigError(reason, key="python") from error
        finally:
            theirs.close()
        self.pid = self._child.pid
        with contextlib.suppress(OSError):  # one that has ended already is noticed later
            send(self.connection, {"operation": "start", **settings})

    def send(self, operation: str, **content: Any) -> None:
        """Ask for something; :meth:`receive` has the answer.

        Raises:
            ProcessLostError: The child ended, or does not read.
        """
        self._child.forget_long_output()
        try:
            send(self.connection, {"operation": operation, **content})
        except TimeoutError as error:
            raise self._hang("a message was not taken in time") from error
        except OSError as error:
            raise ProcessLostError("crash", self._child.obituary()) from error

    def receive(
        self, seconds: float, *, progress: Callable[[], int] | None = None
    ) -> dict[str, Any]:
        """The next answer.

        Args:
            seconds: How long the child may take, without progress where that is told.
            progress: A number that changes as long as the child gets on.

        Raises:
            ProcessLostError: The child ended, hangs, or says that it cannot go on.
            UserError: It refuses what was asked for.
            ValueError: So too.
        """
        self._wait(seconds, progress)
        try:
            message = receive(self.connection)
        except TimeoutError as error:
            raise self._hang("a message was not given in time") from error
        except (EOFError, OSError, ValueError) as error:
            raise ProcessLostError("crash", self._child.obituary()) from error
        if "pid" in message:  # the interpreter may be a program that starts another
            self.pid = int(message["pid"])
        if "error" in message:
            raise _error_of(message["error"])
        return message

    def ask(self, operation: str, *, seconds: float, **content: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; raises as :meth:`send` and :meth:`receive`."""
        self.send(operation, **content)
        return self.receive(seconds)

    def _wait(self, seconds: float, progress: Callable[[], int] | None) -> None:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        begin = time.monotonic()
        seen = None if progress is None else progress()
        while True:
            left = begin + seconds - time.monotonic()
            step = left if progress is None else min(left, seconds / 4, _LONGEST_POLL_SECONDS)
            if poll.poll(max(step, 0.0) * 1000):
                return
            if progress is not None and (now := progress()) != seen:
                seen, begin = now, time.monotonic()
            elif time.monotonic() >= begin + seconds:
                raise self._hang(f"no answer within {seconds:g} s")

    def _hang(self, what: str) -> ProcessLostError:
        return ProcessLostError("hang", f"{what}\n{self._child.stacks(self.pid)}")

    def obituary(self) -> str:
        """How it ended, with the end of what it printed; waits a moment for its end."""
        return self._child.obituary()

    def output_tail(self) -> str:
        """The end of what it printed."""
        return self._child.output_tail()

    def kill(self) -> None:
        """End it and whatever it started, now; may be called again."""
        self._child.kill()
        self.connection.close()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Let it close what it has, for so long at most, then end it; nothing may be in flight."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError, ValueError, UserError, ProcessLostError):
            self.ask(CLOSE, seconds=seconds)
            self._child.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


def serve(
    lifeline: int, commands: int, answer: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    """Answer the messages of the parent until it says ``close`` or goes away.

    Args:
        lifeline: See :func:`~rlinf.processes.child.watch_parent`.
        commands: Descriptor of the socket to the parent.
        answer: From a message, with its ``operation``, to the content of its answer.
    """
    watch_parent(lifeline)
    with (
        socket.socket(fileno=commands) as connection,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        while True:
            message = receive(connection)
            try:
                reply = answer(message) or {}
            except Exception as error:  # noqa: BLE001 - the parent decides; the child only reports
                reply = {"error": _described(error)}
            if message["operation"] == "start":
                reply = {**reply, "pid": os.getpid()}
            send(connection, reply)
            if message["operation"] == CLOSE:
                return


def _described(error: Exception) -> dict[str, Any]:
    stack = "".join(traceback.format_exception(error))
    if isinstance(error, MissingPackageError):
        return {"package": [error.package, error.extra, error.needed_for]}
    if isinstance(error, ConfigError):
        return {"reason": error.reason, "key": error.key}
    if isinstance(error, UserError):
        return {"reason": str(error), "key": ""}
    if isinstance(error, ValueError):
        return {"value": str(error), "stack": stack}
    return {"stack": stack}


def _error_of(report: dict[str, Any]) -> Exception:
    if "package" in report:
        return MissingPackageError(*report["package"])
    if "reason" in report:
        return ConfigError(report["reason"], key=report["key"])
    if "value" in report:
        return RefusedValueError(report["value"], report["stack"])
    return ProcessLostError("exception", report["stack"])


class RefusedValueError(ValueError):
    """A child found a value illegal.

    Args:
        reason: What its ValueError says.
        stack: Where it was raised.
    """

    def __init__(self, reason: str, stack: str) -> None:
        super().__init__(reason)
        self.stack = stack
