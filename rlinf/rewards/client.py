"""The pool's handle on one of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, Literal

from rlinf.errors import ConfigError, MissingPackageError, UserError
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.wire import receive, send

State = Literal["starting", "idle", "busy"]

_TAIL_BYTES = 2000
_MESSAGE_SECONDS = 30.0
_LARGEST_LOG = 16 * 2**20
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlinf.rewards.process import main
main(*map(int, sys.argv[2:]))
"""


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
        # What a function prints must not reach our own terminal.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._progress = os.memfd_create("progress")
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), lifeline, self._progress)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=inherited,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self.connection = ours
        ours.settimeout(_MESSAGE_SECONDS)
        with contextlib.suppress(OSError):  # one that has ended already is noticed later
            send(ours, {"config": config.model_dump(mode="json")})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def give(self, job: int, sample: dict[str, Any]) -> None:
        """Send a sample.

        Raises:
            OSError: The process has ended.
        """
        self._forget_long_log()
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
        """How it ended, with the end of what it printed; waits for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return f"the process ended with {how}; the end of its output: {self.log_tail()}"

    def log_tail(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        content = os.pread(self._log.fileno(), _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        return content.replace(b"\0", b"").decode(errors="replace").strip() or "(nothing)"

    def _forget_long_log(self) -> None:
        if os.fstat(self._log.fileno()).st_size > _LARGEST_LOG:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)  # its end of the file is the same

    def kill(self) -> None:
        """End it and whatever it started, now."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        self._log.close()
        os.close(self._progress)
        os.close(self._lifeline)
        self._lifeline = -1


def _error_of(report: dict[str, Any]) -> UserError:
    if "package" in report:
        return MissingPackageError(*report["package"])
    return ConfigError(report["reason"], key=report["key"])
