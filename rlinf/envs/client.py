"""The parent's handle on one env process: start, talk, notice that it died or hangs, end it."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf.child_process import ONE_THREAD, ChildProcess
from rlinf.envs.records import FaultReason
from rlinf.envs.wire import Message, Op, decode_tree, encode_tree, receive, send
from rlinf.errors import ConfigError, MissingPackageError, RLinfError, RunFailure

_CLOSE_SECONDS = 2.0


class ProcessLostError(Exception):
    """An env process ended or hangs; the vector env rebuilds it."""

    def __init__(self, reason: FaultReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class EnvProcess:
    """One env process.

    Args:
        settings: What the process must know (see ``process.py``).
        memory: Descriptor of the shared memory.
        python: Interpreter, or None for this one.
        step_deadline: Seconds that one primitive step or reset may take.
        start_deadline: Seconds that building the envs may take.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        memory: int,
        python: str | None,
        step_deadline: float,
        start_deadline: float,
    ) -> None:
        self._step_deadline = step_deadline
        self._start_deadline = start_deadline
        self.progress: np.ndarray | None = None
        self.pending: dict[int, Message] = {}
        self._connection, theirs = socket.socketpair()
        try:
            self._child = ChildProcess(
                "rlinf.envs.process", [theirs.fileno(), memory], ONE_THREAD, python=python
            )
        except OSError as error:
            self._connection.close()
            reason = f"cannot start {python or sys.executable}: {error.strerror}"
            raise ConfigError(reason, key="python") from error
        finally:
            theirs.close()
        self._pid = self._child.pid
        with contextlib.suppress(OSError):  # one that has ended already is noticed later
            send(self._connection, Message(Op.START, payload=encode_tree(dict(settings))))

    def started(self) -> dict[str, Any]:
        """Wait until the envs are built and return what the process says of them.

        Raises:
            ConfigError: The options are not legal for the simulator.
            MissingPackageError: The simulator is not installed under this interpreter.
            RunFailure: The process failed, ended or took too long.
        """
        self._connection.settimeout(self._start_deadline)
        try:
            message = receive(self._connection)
        except TimeoutError as error:
            raise RunFailure(
                f"an env process was not ready after {self._start_deadline:g} s "
                f"(start_deadline); its stack and output:\n{self._child.stacks(self._pid)}"
            ) from error
        except (EOFError, OSError) as error:
            raise RunFailure(
                f"an env process was lost at its start: {self._child.obituary()}"
            ) from error
        self._connection.settimeout(min(max(self._step_deadline / 4, 0.02), 1.0))
        reply = self._content(message)
        self._pid = int(reply["pid"])
        return reply

    @property
    def pid(self) -> int:
        """The id of the process that holds the envs."""
        return self._pid

    def send(self, message: Message) -> None:
        """Send the command of a stage; it is in flight until :meth:`collect` has its answer.

        Raises:
            ProcessLostError: The process ended.
        """
        self.pending[message.stage] = message
        try:
            send(self._connection, message)
        except OSError as error:
            raise ProcessLostError(FaultReason.CRASH, self._child.obituary()) from error

    def collect(self) -> list[dict[str, Any]]:
        """Wait for the next answer to a command of a stage and return the faults it reports.

        Raises:
            ProcessLostError: The process ended, or no step ended within the deadline.
            RunFailure: The process reports that it cannot go on.
        """
        message = self._next_message()
        content = self._content(message)
        del self.pending[message.stage]
        faults: list[dict[str, Any]] = content.get("faults", [])
        return faults

    def ask(self, message: Message) -> dict[str, Any]:
        """Send a command outside of the stages, none of which may be in flight; return its answer.

        Raises:
            ProcessLostError: The process ended, or no step ended within the deadline.
            RunFailure: The process reports that it cannot do it.
        """
        try:
            send(self._connection, message)
        except OSError as error:
            raise ProcessLostError(FaultReason.CRASH, self._child.obituary()) from error
        return self._content(self._next_message())

    def _next_message(self) -> Message:
        seen, since = self._ticks(), time.monotonic()
        while True:
            try:
                return receive(self._connection)
            except TimeoutError:
                if self._ticks() != seen:
                    seen, since = self._ticks(), time.monotonic()
                elif time.monotonic() - since >= self._step_deadline:
                    detail = f"no step ended within {self._step_deadline:g} s"
                    stacks = self._child.stacks(self._pid)
                    raise ProcessLostError(FaultReason.HANG, f"{detail}\n{stacks}") from None
            except (EOFError, OSError) as error:
                raise ProcessLostError(FaultReason.CRASH, self._child.obituary()) from error

    def _ticks(self) -> int:
        return -1 if self.progress is None else int(self.progress[1])

    @staticmethod
    def _content(message: Message) -> dict[str, Any]:
        content = decode_tree(message.payload) if message.payload else {}
        if message.op != Op.ERROR:
            return content
        raise _error_of(content)

    def kill(self) -> None:
        """End the process and whatever it started, now; may be called again."""
        self._child.kill()
        self._connection.close()

    def close(self) -> None:
        """Let the process close its envs, then end it."""
        with contextlib.suppress(OSError, ProcessLostError, RLinfError, EOFError):
            self._connection.settimeout(_CLOSE_SECONDS)
            if not self.pending:
                send(self._connection, Message(Op.CLOSE))
                receive(self._connection)
                self._child.wait(_CLOSE_SECONDS)
        self.kill()


def _error_of(report: dict[str, Any]) -> RLinfError:
    if report["kind"] == "missing":
        return MissingPackageError(*report["package"])
    if report["kind"] == "user":
        return ConfigError(report["message"], key=report["key"])
    return RunFailure(f"an env process failed:\n{report['stack']}")
