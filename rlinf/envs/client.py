"""The parent's handle on one env process: start, talk, notice that it died or hangs, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

import rlinf
from rlinf.envs.records import FaultReason
from rlinf.envs.wire import Message, Op, decode_tree, encode_tree, receive, send
from rlinf.errors import ConfigError, MissingPackageError, RLinfError, RunFailure

_TAIL_BYTES = 4000
_STACK_SECONDS = 0.3
_CLOSE_SECONDS = 2.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# The package is found by its place and not by PYTHONPATH: the folder around an installed package
# also holds every other package of this interpreter, which another interpreter must not see.
_BOOTSTRAP = """\
import importlib.util, sys
root = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    "rlinf", root + "/__init__.py", submodule_search_locations=[root])
module = importlib.util.module_from_spec(spec)
sys.modules["rlinf"] = module
spec.loader.exec_module(module)
from rlinf.envs.process import main
main(sys.argv[1:])
"""


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
        # Open as long as the process lives: what it prints must not reach our own terminal.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.progress: np.ndarray | None = None
        self.pending: dict[int, Message] = {}
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), memory, lifeline)
        command = [python or sys.executable, "-c", _BOOTSTRAP, str(Path(rlinf.__file__).parent)]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=inherited,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends cleanly
            )
        except OSError as error:
            ours.close()
            self._errors.close()
            os.close(self._lifeline)
            reason = f"cannot start {command[0]}: {error.strerror}"
            raise ConfigError(reason, key="python") from error
        finally:
            theirs.close()
            os.close(lifeline)
        self._connection = ours
        self._pid = self._process.pid
        shared = sys.path if python is None else []
        path = [entry for entry in shared if entry]
        send(ours, Message(Op.START, payload=encode_tree({**settings, "search_path": path})))

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
                f"(start_deadline); its stack and output:\n{self._stack()}"
            ) from error
        except (EOFError, OSError) as error:
            raise RunFailure(
                f"an env process ended while it started:\n{self._obituary()}"
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
            raise ProcessLostError(FaultReason.CRASH, self._obituary()) from error

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
            raise ProcessLostError(FaultReason.CRASH, self._obituary()) from error
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
                    detail = f"no step ended within {self._step_deadline:g} s\n{self._stack()}"
                    raise ProcessLostError(FaultReason.HANG, detail) from None
            except (EOFError, OSError) as error:
                raise ProcessLostError(FaultReason.CRASH, self._obituary()) from error

    def _ticks(self) -> int:
        return -1 if self.progress is None else int(self.progress[1])

    @staticmethod
    def _content(message: Message) -> dict[str, Any]:
        content = decode_tree(message.payload) if message.payload else {}
        if message.op != Op.ERROR:
            return content
        raise _error_of(content)

    def _stack(self) -> str:
        """Ask the process where it is, and return what it wrote."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return self._output_tail()

    def _obituary(self) -> str:
        self._wait_briefly()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return f"the env process ended with {how}; the end of its output:\n{self._output_tail()}"

    def _wait_briefly(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)

    def _output_tail(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(size - _TAIL_BYTES, 0))
        return self._errors.read().decode(errors="replace").strip() or "(nothing)"

    def kill(self) -> None:
        """End the process and whatever it started, now."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._errors.close()
        os.close(self._lifeline)
        self._lifeline = -1

    def close(self) -> None:
        """Let the process close its envs, then end it."""
        with contextlib.suppress(OSError, ProcessLostError, RLinfError, EOFError):
            self._connection.settimeout(_CLOSE_SECONDS)
            if not self.pending:
                send(self._connection, Message(Op.CLOSE))
                receive(self._connection)
                self._wait_briefly()
        self.kill()


def _error_of(report: dict[str, Any]) -> RLinfError:
    if report["kind"] == "missing":
        return MissingPackageError(*report["package"])
    if report["kind"] == "user":
        return ConfigError(report["message"], key=report["key"])
    return RunFailure(f"an env process failed:\n{report['stack']}")
