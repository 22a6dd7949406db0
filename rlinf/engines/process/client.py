"""The parent's handle on one engine process: start, talk, notice that it is lost, end it."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, Literal

from rlinf.child_process import ChildProcess
from rlinf.engines.process.messages import About, Call, Done, Failed, Operation, Refused, Start

Loss = Literal["crash", "hang", "exception"]

_CLOSE_SECONDS = 5.0
_SERVER = "rlinf.engines.process.server"


class ProcessLostError(Exception):
    """An engine process ended, hangs or cannot go on.

    Args:
        reason: Which of these.
        detail: What is known about it.
    """

    def __init__(self, reason: Loss, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")


class EngineProcess:
    """One process with an engine.

    Args:
        start: What to build.
        start_deadline: Seconds that this may take.
        deadline: Seconds that any other call may take.

    Raises:
        ProcessLostError: It could not be started, ended, or was not ready in time.
        UserError: The engine cannot be built so.
    """

    def __init__(self, start: Start, *, start_deadline: float, deadline: float) -> None:
        self._deadline = deadline
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            # A process that stops in the middle of a message must not hold us for ever.
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", ceil(deadline), 0))
        try:
            threads = {"OMP_NUM_THREADS": str(start.threads)}
            self._child = ChildProcess(_SERVER, [theirs.fileno()], threads)
        except OSError as error:
            ours.close()
            raise ProcessLostError("crash", f"it could not be started: {error}") from error
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        try:
            self.about: About = self._exchange(start, start_deadline)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def call(self, operation: Operation, *arguments: Any) -> Any:
        """Let it do something; returns what the engine returned.

        Raises:
            ProcessLostError: It ended, did not answer in time or cannot go on.
            UserError: The engine refused.
            ValueError: Likewise.
        """
        return self._exchange(Call(operation, arguments), self._deadline)

    def _exchange(self, message: Start | Call, seconds: float) -> Any:
        self._child.forget_long_output()
        try:
            self._connection.send(message)
            if not self._connection.poll(seconds):
                detail = f"no answer within {seconds:g} s\n{self._child.stacks()}"
                raise ProcessLostError("hang", detail)
            answer: Done | Refused | Failed = self._connection.recv()
        except BlockingIOError as error:
            detail = f"a message was not taken or given within {self._deadline:g} s"
            raise ProcessLostError("hang", f"{detail}\n{self._child.stacks()}") from error
        except (EOFError, OSError) as error:
            raise ProcessLostError("crash", self._child.obituary()) from error
        if isinstance(answer, Refused):
            raise answer.error
        if isinstance(answer, Failed):
            raise ProcessLostError("exception", answer.stack)
        return answer.result

    def kill(self) -> None:
        """End it and whatever it started, now."""
        self._child.kill()
        self._connection.close()

    def close(self) -> None:
        """Let the engine close, then end the process."""
        begin = time.monotonic()
        with contextlib.suppress(Exception):
            self._exchange(Call("close"), _CLOSE_SECONDS)
            self._child.wait(max(0.0, begin + _CLOSE_SECONDS - time.monotonic()))
        self.kill()
