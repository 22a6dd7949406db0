"""The pool's handle on one of its processes."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Literal

from rlinf.child_process import ONE_THREAD, ChildProcess
from rlinf.errors import ConfigError, MissingPackageError, UserError
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.wire import receive, send

State = Literal["starting", "idle", "busy"]

_MESSAGE_SECONDS = 30.0


class RewardProcess:
    """One process that scores; starts at once, and says itself when it is ready.

    Args:
        config: The functions.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._names = list(config.functions)
        self.state: State = "starting"
        self.job = -1
        self.deadline = time.monotonic() + config.start_deadline
        self._closed = False
        self._progress = os.memfd_create("progress")
        ours, theirs = socket.socketpair()
        try:
            self._child = ChildProcess(
                "rlinf.rewards.process", [theirs.fileno(), self._progress], ONE_THREAD
            )
        finally:
            theirs.close()
        self.connection = ours
        ours.settimeout(_MESSAGE_SECONDS)
        with contextlib.suppress(OSError):  # one that has ended already is noticed later
            send(ours, {"config": config.model_dump(mode="json")})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def give(self, job: int, sample: dict[str, Any]) -> None:
        """Send a sample.

        Raises:
            OSError: The process has ended.
        """
        self._child.forget_long_output()
        os.pwrite(self._progress, b"\0", 0)
        send(self.connection, sample)
        self.state, self.job = "busy", job
        self.deadline = time.monotonic() + self._config.deadline

    def take(self) -> dict[str, Any] | None:
        """Read a message: the output of the sample that it has, or None when it is ready.

        Raises:
            EOFError: The process has ended.
            OSError: So too.
            UserError: The functions cannot be built.
        """
        message = receive(self.connection)
        if "refused" in message:
            raise _error_of(message["refused"])
        self.state = "idle"
        output: dict[str, Any] | None = message.get("output")
        return output

    def function_at_work(self) -> str:
        """Name of the function that the process has begun last."""
        return self._names[os.pread(self._progress, 1, 0)[0]]

    def obituary(self) -> str:
        """How it ended, with the end of what it printed; waits a moment for its end."""
        return self._child.obituary()

    def output_tail(self) -> str:
        """The end of what it printed."""
        return self._child.output_tail()

    def kill(self) -> None:
        """End it and whatever it started, now; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._child.kill()
        self.connection.close()
        os.close(self._progress)


def _error_of(report: dict[str, Any]) -> UserError:
    if "package" in report:
        return MissingPackageError(*report["package"])
    return ConfigError(report["reason"], key=report["key"])
