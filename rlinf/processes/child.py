"""A child process that answers messages: started, watched for its end and for hangs, ended.

:class:`SupervisedProcess` is the parent's handle, :func:`serve` the child's main loop. Imports the
standard library alone: a child starts quickly, also under an interpreter with few packages.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Literal

from rlinf.errors import ConfigError, MissingPackageError, UserError
from rlinf.processes.template import TEMPLATES, ForkedProcess, Kind
from rlinf.processes.wire import Messages, send

log = logging.getLogger(__name__)

Loss = Literal["crash", "hang", "exception", "memory"]
"""How a child was lost: it ended, it did not answer in time, it says that it cannot go on, or its
parent gave it up for the memory it held."""

CLOSE = "close"
"""Operation after whose answer a child ends."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of a child that is one of several and computes little."""

_ROOT = Path(__file__).resolve().parents[1]
_TAIL_BYTES = 4000
_LARGEST_LOG = 16 * 2**20
_LOGGED_BYTES = 64 * 2**10
"""Of what a child prints, so much goes to the log."""
_OPEN_FILES = 2**16
_FILES_OF_A_CHILD, _FILES_OF_A_START = 4, 16
"""That its parent has open: socket, lifeline, output, and what tells of its end; and for a moment
while it is started."""
_STACK_SECONDS = 0.3
_END_SECONDS = 1.0
_LONGEST_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
# The package is found by its place and not by a search path: the folder around an installed package
# also holds every other package of this interpreter, which another interpreter must not see.
_BOOTSTRAP = """\
import importlib, importlib.util, json, sys
root, path, module = sys.argv[1:4]
sys.path[:] = json.loads(path) or sys.path
spec = importlib.util.spec_from_file_location(
    "rlinf", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["rlinf"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rlinf"])
words = [int(word) if word.isdigit() else word for word in sys.argv[4:]]
importlib.import_module(module).main(*words)
"""
# A process of its own, which is there where a call that hangs lets no thread of the child run, and
# where the child was killed first, as Ray does with the children of a worker that ends.
_GUARD = ("sh", "-c", "read line; kill -KILL 0", "rlinf.processes.child ends with its parent")


class ProcessLostError(Exception):
    """A child ended, hangs or cannot go on; ``detail`` holds its output, its stacks."""

    def __init__(self, reason: Loss, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Loss = reason
        self.detail = detail


class RefusedValueError(ValueError):
    """A child found a value illegal: what its ValueError says, and where it was raised."""

    def __init__(self, reason: str, stack: str) -> None:
        super().__init__(reason)
        self.stack = stack


def require_open_files(processes: int) -> None:
    """Let this process have as many files open as the system allows, which at its start is often
    no more than 1024, and refuse so many further children where these need more.

    Raises:
        ConfigError: They do.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    begun = len(os.listdir("/dev/fd")) + _FILES_OF_A_START
    needed = begun + _FILES_OF_A_CHILD * processes
    wanted = max(needed, _OPEN_FILES)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system may have a lower bound, unsaid
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"{processes} more processes need {needed} open files, and this one may have {soft}: "
            f"ulimit -n {needed}, which the administrator may have to allow; nearest: "
            f"{max(0, soft - begun) // _FILES_OF_A_CHILD} processes"
        )


class SupervisedProcess:
    """One child, in a session of its own, that answers every message, in order.

    It builds what it works with when it is started; :meth:`receive` has its answer to that. Ctrl-C
    reaches the parent alone, which ends the child cleanly; what the child prints goes to a file
    that is read when it is lost, and its beginning to the log, line by line.

    Args:
        module: One of this package, whose ``main(lifeline, commands, *descriptors)`` calls
            :func:`serve`.
        settings: What it must know, as plain values; its first message, of operation ``start``.
        descriptors: File descriptors that it inherits, given to ``main``.
        environment: Variables on top of those of this process.
        python: Interpreter, which finds other packages by itself; None: this one, with what it
            finds.
        message_seconds: How long a message may be on its way, once it has begun.
        imported: Modules that it needs besides and that open no device and begin no thread when
            they are imported: it begins as a fork of a process that has imported them and
            ``module``, if there may be one. None: as an interpreter of its own.

    Raises:
        ConfigError: The interpreter ``python`` cannot be started, too many files are open, or the
            system takes no more processes.
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
        imported: Sequence[str] | None = None,
    ) -> None:
        require_open_files(1)
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(message_seconds)
        self._messages = Messages(self.connection)
        self._poll = select.poll()
        self._poll.register(self.connection, select.POLLIN)
        lifeline, self._lifeline = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        inherited = (lifeline, theirs.fileno(), *descriptors)
        path = json.dumps(sys.path if python is None else [])
        bootstrap = (python or sys.executable, "-c", _BOOTSTRAP, str(_ROOT), path)
        variables = {**os.environ, **environment}
        forked: ForkedProcess | None = None
        try:
            if imported is not None:
                kind = Kind(bootstrap, module, tuple(imported), tuple(sorted(variables.items())))
                forked = TEMPLATES.fork(kind, self._log.fileno(), inherited)
            self._process = forked or subprocess.Popen(
                [*bootstrap, module, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=inherited,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            self.connection.close()
            self._log.close()
            os.close(self._lifeline)
            raise _not_started(python or sys.executable, error) from error
        finally:
            theirs.close()
            os.close(lifeline)
        self.pid = self._process.pid
        self._module, self._logged = module, 0
        self._closed_by: float | None = None
        with contextlib.suppress(OSError):  # one that has ended already is noticed later
            send(self.connection, {"operation": "start", **settings})

    def send(self, operation: str, **content: Any) -> None:
        """Ask for something; :meth:`receive` has the answer.

        Raises:
            ProcessLostError: The child ended, or does not read.
        """
        try:
            send(self.connection, {"operation": operation, **content})
        except TimeoutError as error:
            raise self._hang("a message was not taken in time") from error
        except OSError as error:
            raise self._crash() from error

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
            message = self._messages.receive()
        except TimeoutError as error:
            raise self._hang("a message was not given in time") from error
        except (EOFError, OSError, ValueError) as error:
            raise self._crash() from error
        self._log_printed()
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
        if self._messages.begun:
            return
        begin = time.monotonic()
        seen = None if progress is None else progress()
        while True:
            left = begin + seconds - time.monotonic()
            step = left if progress is None else min(left, seconds / 4, _LONGEST_POLL_SECONDS)
            if self._poll.poll(max(step, 0.0) * 1000):
                return
            if progress is not None and (now := progress()) != seen:
                seen, begin = now, time.monotonic()
            elif time.monotonic() >= begin + seconds:
                raise self._hang(f"no answer within {seconds:g} s")

    def _hang(self, what: str) -> ProcessLostError:
        """Ask where its threads are and add the answer, if any."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return ProcessLostError("hang", f"{what}\n{self.output_tail()}")

    def _crash(self) -> ProcessLostError:
        """How it ended, with the end of what it printed; waits a moment for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.returncode
        if code is None:
            how = "it closed its connection and still runs"
        elif code < 0:
            how = f"it ended with signal {signal.Signals(-code).name}"
        else:
            how = f"it ended with exit code {code}"
        text = f"{how}; the end of its output:\n{self.output_tail()}"
        return ProcessLostError("crash", text)

    def _log_printed(self) -> None:
        """Log what it has printed since the last message, in whole lines, until it is much."""
        file, left = self._log.fileno(), _LOGGED_BYTES - self._logged
        size = os.fstat(file).st_size
        if size > _LARGEST_LOG:
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)  # the child's end of the file is the same
        if left <= 0 or size <= self._logged:
            return
        printed = os.pread(file, left, self._logged)
        much = len(printed) == left
        lines, end, _ = (printed, b"", b"") if much else printed.rpartition(b"\n")
        self._logged += len(lines + end)
        for line in lines.decode(errors="replace").splitlines():
            log.info("process %d (%s) printed: %s", self.pid, self._module, line)
        if much:
            log.info("process %d (%s) prints much: the rest is left out", self.pid, self._module)

    def output_tail(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        content = os.pread(self._log.fileno(), _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        return content.replace(b"\0", b"").decode(errors="replace").strip() or "(nothing)"

    def kill(self) -> None:
        """End it and whatever it started, now; may be called again."""
        if self._lifeline >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()
            os.close(self._lifeline)
            self._lifeline = -1
        self.connection.close()

    def begin_close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Have it close what it has, for so long at most, which :meth:`close` waits for; nothing
        may be in flight."""
        if self._lifeline >= 0 and self._closed_by is None:
            self._closed_by = time.monotonic() + seconds
            with contextlib.suppress(OSError, ProcessLostError):
                self.send(CLOSE)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Let it close what it has, for so long at most, then end it; nothing may be in flight."""
        self.begin_close(seconds)
        if self._lifeline >= 0 and self._closed_by is not None:
            with contextlib.suppress(
                OSError, ValueError, UserError, ProcessLostError, subprocess.TimeoutExpired
            ):
                self.receive(max(0.0, self._closed_by - time.monotonic()))
                self._process.wait(max(0.0, self._closed_by - time.monotonic()))
        self.kill()


def _not_started(python: str, error: OSError) -> ConfigError:
    """Why a process was not started: its interpreter, or that the system takes no more of them."""
    if error.errno == errno.EAGAIN:
        return ConfigError(
            "no more processes may be started (ulimit -u, or pids.max of the container): allow "
            "more; nearest: fewer env processes"
        )
    if error.errno == errno.ENOMEM:
        return ConfigError(
            "no process can be started, memory is full: end other programs, or allow the container "
            "more; nearest: fewer env processes"
        )
    reason = f"cannot start {python}: {error.strerror}"
    of_files = error.errno in (errno.EMFILE, errno.ENFILE)
    return ConfigError(reason, key="" if of_files else "python")


def serve(
    lifeline: int, commands: int, answer: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    """Answer the messages of the parent until it says ``close``; it ends when the parent does, and
    with it all of its group. A copy of it that ``answer`` forks, and does not end, ends here: a
    second answer would be taken for that of the next message.

    Args:
        lifeline: Reading end of a pipe that nobody writes to and whose closing is the parent's end.
        commands: Descriptor of the socket to the parent.
        answer: From a message, with its ``operation``, to the content of its answer.
    """
    itself = os.getpid()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # prints stacks when the parent asks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what is printed is logged, and in its order
    lost = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)
    guard = subprocess.Popen(_GUARD, stdin=lifeline, stdout=subprocess.DEVNULL)
    os.close(lifeline)
    with socket.socket(fileno=commands) as connection, lost:
        messages = Messages(connection)
        while True:
            message = messages.receive()
            try:
                reply = answer(message) or {}
            except Exception as error:  # noqa: BLE001 - the parent decides; the child only reports
                reply = {"error": _described(error)}
            if os.getpid() != itself:
                os._exit(0)
            if message["operation"] == "start":
                reply = {**reply, "pid": os.getpid()}
            send(connection, reply)
            if message["operation"] == CLOSE:
                guard.kill()
                guard.wait()
                return
    os.killpg(0, signal.SIGKILL)  # the parent is gone


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, MissingPackageError):
        return {"package": [error.package, error.extra, error.needed_for]}
    if isinstance(error, ConfigError):
        return {"reason": error.reason, "key": error.key}
    if isinstance(error, UserError):
        return {"reason": str(error), "key": ""}
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return (
        {"value": str(error), "stack": stack} if isinstance(error, ValueError) else {"stack": stack}
    )


def _error_of(report: dict[str, Any]) -> Exception:
    if "package" in report:
        return MissingPackageError(*report["package"])
    if "reason" in report:
        return ConfigError(report["reason"], key=report["key"])
    if "value" in report:
        return RefusedValueError(report["value"], report["stack"])
    return ProcessLostError("exception", report["stack"])
