"""A process that has imported what children need, which then begin as forks of it.

:class:`Templates` is for the parent, :func:`main` is the template itself, which only imports: a
fork begins as a new interpreter would, but for its modules, and shares the memory of those. Imports
the standard library alone, and runs under any interpreter from 3.8 on.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Tuple  # noqa: UP035 - evaluated under 3.8 as well

POSSIBLE = sys.platform == "linux"
"""Whether children may be forks: elsewhere, libraries of the system itself forbid it."""

_MOST = 4
"""Templates of a process at the same time."""
_START_SECONDS = 30.0
_LARGEST = 1 << 16
_MOST_DESCRIPTORS = 16
_THREADS = "/proc/self/task"


class ForkedProcess:
    """A process that a template forked, with what its parent needs of :class:`subprocess.Popen`."""

    def __init__(self, state: socket.socket, pid: int) -> None:
        self._state, self.pid = state, pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, of a signal its negative number; raises a TimeoutExpired."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._state, select.POLLIN)
            if not poll.poll(None if timeout is None else max(timeout, 0.0) * 1000):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = self._told()
            with contextlib.suppress(OSError):
                self._state.shutdown(socket.SHUT_WR)  # so that nothing stays of it
            _received(self._state)
            self._state.close()
        return self.returncode

    def _told(self) -> int:
        if code := _received(self._state):
            return int(code)
        # Somebody killed the template: nobody would tell of the end of this one, which is now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


@dataclass(frozen=True)
class Kind:
    """What forks of the same template have in common."""

    bootstrap: tuple[str, ...]
    """The command that runs ``main`` of a module, behind which that and its descriptors stand."""
    module: str
    """That of their ``main``, which they import."""
    imported: tuple[str, ...]
    """What they import besides."""
    environment: tuple[tuple[str, str], ...]
    """All of their variables."""


@dataclass
class _Template:
    """A template as its parent sees it: it ends when nobody can ask it any more."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    def of(cls, kind: Kind) -> _Template:
        """One that begins to import."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                # Its forks are seen by these words, too: their module is the last.
                [*kind.bootstrap, __name__, str(theirs.fileno()), *kind.imported, kind.module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=dict(kind.environment),
                start_new_session=True,
            )
        return cls(process, ours)

    def asked(self, content: bytes, files: Sequence[int]) -> bool:
        """Ask for a fork; False where nobody is there."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        try:
            self.connection.sendmsg([content], [rights])
        except OSError:
            return False
        return True


class Templates:
    """Those of one process, by kind; a few, as what began as forks of an older one goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Kind, _Template | None] = OrderedDict()  # None: of no use
        self._left: list[_Template] = []
        os.register_at_fork(after_in_child=self._begin_anew)

    def fork(self, kind: Kind, output: int, descriptors: Sequence[int]) -> ForkedProcess | None:
        """A process that runs ``main(*descriptors)`` and prints to ``output``, or None where it
        must be started: on another system than Linux; where an import begins a thread, ends the
        process, or takes more than 30 seconds.

        Raises:
            OSError: The system takes no more processes.
        """
        if not POSSIBLE:
            return None
        request = {"directory": os.getcwd(), "affinity": sorted(os.sched_getaffinity(0))}
        content = json.dumps({"module": kind.module, **request}).encode()
        state, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        state.settimeout(_START_SECONDS)
        with theirs:
            asked = self._ask(kind, content, [theirs.fileno(), output, *descriptors])
        answer = _received(state) if asked else b""
        if not answer:
            state.close()
            with self._lock:
                self._leave(kind)
                self._known[kind] = None
            return None
        if (pid := int(answer)) < 0:
            state.close()
            raise OSError(-pid, os.strerror(-pid))
        return ForkedProcess(state, pid)

    def close(self) -> None:
        """Ask none of them any more."""
        with self._lock:
            for kind in list(self._known):
                self._leave(kind)

    def _ask(self, kind: Kind, content: bytes, files: Sequence[int]) -> bool:
        with self._lock:
            if kind in self._known:
                self._known.move_to_end(kind)
                template = self._known[kind]
                if template is None or template.asked(content, files):
                    return template is not None
                self._leave(kind)  # somebody killed it
            template = self._known[kind] = _Template.of(kind)
            while len(self._known) > _MOST:
                self._leave(next(iter(self._known)))
            return template.asked(content, files)

    def _begin_anew(self) -> None:
        """In a fork of the process whose templates these are, where another thread may have had the
        lock."""
        self._lock = threading.Lock()
        for template in filter(None, self._known.values()):
            template.connection.close()
        self._known, self._left = OrderedDict(), []

    def _leave(self, kind: Kind) -> None:
        if (template := self._known.pop(kind, None)) is not None:
            template.connection.close()
            self._left.append(template)
        self._left[:] = [each for each in self._left if each.process.poll() is None]


def _received(connection: socket.socket) -> bytes:
    """The next answer; nothing where there will be none, or not in time."""
    try:
        return connection.recv(64)
    except OSError:
        return b""


TEMPLATES = Templates()
"""Those of this process."""


def main(requests: int, *modules: str) -> None:
    """Import what is asked for, then fork for every request, until nobody can ask any more and all
    forks have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=requests) as connection:
        for name in modules:
            with contextlib.suppress(Exception):  # the fork imports it too, and says what is wrong
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # no collection in a fork copies what is here
        request = None
        if len(os.listdir(_THREADS)) == 1:  # a fork would lack the other threads
            request = _Forks(connection).next_request()
    if request is not None:
        _become(*request)


_Request = Tuple["dict[str, Any]", "list[int]"]  # noqa: UP006


class _Forks:
    """The forks of this process that have not ended, and who is told of their end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._running: dict[int, int] = {}  # from a fork to where its end is told
        self._ended: dict[int, int] = {}  # who was told, to what is left of the fork
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._ends, woken = os.pipe()
        os.set_blocking(woken, False)
        self._woken = woken
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._ends, select.POLLIN)

    def next_request(self) -> _Request | None:
        """In a fork what it is to be; in this process None, at its end."""
        asked = True
        while asked or self._running:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._ends:
                    os.read(self._ends, 512)
                    self._tell_ends()
                elif descriptor != self._connection.fileno():
                    self._forget(descriptor)
                elif (found := self._read()) is None:
                    asked = False
                    self._poll.unregister(descriptor)
                elif self._fork(found[1][0]):
                    return found
                else:
                    for each in found[1][1:]:
                        os.close(each)
        return None

    def _read(self) -> _Request | None:
        size = _MOST_DESCRIPTORS * array.array("i").itemsize
        content, ancillary, _, _ = self._connection.recvmsg(_LARGEST, socket.CMSG_SPACE(size))
        files = array.array("i")
        for _, _, given in ancillary:
            files.frombytes(given[: len(given) - len(given) % files.itemsize])
        return (json.loads(content), list(files)) if content else None

    def _fork(self, state: int) -> bool:
        """Whether this is the fork."""
        try:
            pid = os.fork()
        except OSError as error:
            os.write(state, str(-(error.errno or 1)).encode())
            os.close(state)
            return False
        if pid:
            self._running[pid] = state
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (self._ends, self._woken, *self._running.values(), *self._ended):
            os.close(descriptor)
        return True

    def _tell_ends(self) -> None:
        for pid, state in list(self._running.items()):
            # What is left of it stays until its parent knows: its id means no other process.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                continue
            del self._running[pid]
            self._ended[state] = pid
            self._poll.register(state, select.POLLIN)  # it is closed by who was told
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            with contextlib.suppress(OSError):
                os.write(state, str(code).encode())

    def _forget(self, state: int) -> None:
        self._poll.unregister(state)
        os.waitpid(self._ended.pop(state), 0)
        os.close(state)


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Be the process that was asked for."""
    state, output, *descriptors = files
    os.setsid()
    os.write(state, str(os.getpid()).encode())
    os.close(state)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["affinity"])
    if "numpy.random" in sys.modules:  # Python's own generator begins anew in a fork by itself
        sys.modules["numpy.random"].seed()
    importlib.import_module(request["module"]).main(*descriptors)
