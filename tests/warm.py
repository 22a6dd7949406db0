"""Processes that begin with torch imported, as forks of one server.

Many tests are about a process of its own; to import torch and transformers in each of them took
longer than what they then do. The server starts with the first process that is asked for and ends
with the process that runs the tests. It only imports, so that a fork begins as a new interpreter
would, but for its modules and the seed of its hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "tests.runners.support",
    "tests.trainers.two_ranks",
    "rlinf.cli.main",
    "rlinf.runners.embodied",
    "rlinf.runners.reasoning",
    "torch._dynamo",  # which the first optimizer imports
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_ROOT = Path(__file__).resolve().parents[1]
_LARGEST = 1 << 20


class Warm:
    """A program in a session of its own, with what of :class:`subprocess.Popen` tests need.

    Args:
        words: What follows ``python``: a file, or ``-m`` and a module, or ``-c`` and a program;
            then its arguments.
        environment: Variables on top of those of this process.
        directory: Where it runs; None: where this process does.
        merged: Whether standard error is part of the output.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] = ONE_THREAD,
        directory: Path | None = None,
        merged: bool = False,
    ) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._errors = self._output if merged else tempfile.TemporaryFile()  # noqa: SIM115
        self._state, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "words": list(words),
            "environment": {**os.environ, **environment},
            "directory": str(directory or Path.cwd()),
        }
        files = [theirs.fileno(), self._output.fileno(), self._errors.fileno()]
        socket.send_fds(_server(), [json.dumps(request).encode()], files)
        theirs.close()
        self.returncode: int | None = None
        self.pid = int(self._state.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; of a signal, its negative number."""
        if self.returncode is None:
            if not select.select([self._state], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0)
            self.returncode = int(self._state.recv(64))
        return self.returncode

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Output and standard error, once it has ended."""
        self.wait(timeout)
        return self._read(self._output), self._read(self._errors)

    @staticmethod
    def _read(file: Any) -> bytes:
        file.seek(0)
        return file.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """Where requests go."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()], cwd=_ROOT, env={**os.environ, **ONE_THREAD},
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return ours


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for every request. Returns it in the fork; None here, once no one can ask any more."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}  # by descriptor of a process: its id, who is told
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pid, state = running.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                selector.unregister(key.fd)
                with contextlib.suppress(OSError):  # who asked has gone
                    os.write(state, str(code).encode())
                os.close(state)
                os.close(key.fd)
                continue
            content, files, _, _ = socket.recv_fds(requests, _LARGEST, 3)
            if not content:
                return None
            pid = os.fork()
            if not pid:
                for descriptor, (_, state) in running.items():
                    os.close(descriptor)
                    os.close(state)
                selector.close()
                requests.close()
                return json.loads(content), files
            descriptor = os.pidfd_open(pid)
            running[descriptor] = (pid, files[0])
            selector.register(descriptor, selectors.EVENT_READ)
            os.close(files[1])
            os.close(files[2])


def become(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that was asked for."""
    os.setsid()
    os.write(files[0], str(os.getpid()).encode())
    os.dup2(files[1], 1)
    os.dup2(files[2], 2)
    for descriptor in files:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    first, *words = request["words"]
    if first == "-m":
        sys.argv, sys.path[0] = words, str(Path.cwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(words[0], module.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *words], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def leave(program: Callable[[], None]) -> NoReturn:
    """Run it and end as an interpreter does, but leave the modules of the server alone: to clear
    them copies all of the memory that the forks share, which takes a second."""
    code: Any = 0
    try:
        program()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # transformers is an extra
            importlib.import_module(name)
    gc.freeze()  # no collection in a fork copies what the server imported
    forked = serve(socket.socket(fileno=int(sys.argv[1])))
    if forked is not None:
        leave(functools.partial(become, *forked))
