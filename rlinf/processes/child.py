"""A child process that says how it ended and never outlives its parent.

Both sides of it: :class:`ChildProcess` is the parent's handle, :func:`watch_parent` is what the
child calls first. Imports the standard library alone, so that a child starts quickly and may run
under an interpreter that has few packages.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import rlinf

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of a child that is one of several and computes little."""

_TAIL_BYTES = 4000
_LARGEST_LOG = 16 * 2**20
_STACK_SECONDS = 0.3
_END_SECONDS = 1.0
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
importlib.import_module(module).main(*map(int, sys.argv[4:]))
"""


class ChildProcess:
    """Runs ``main(lifeline, *descriptors)`` of a module in a new session.

    Ctrl-C reaches the parent alone, which ends the child cleanly; what the child prints goes to a
    file that is read when it is lost.

    Args:
        module: Name of the module, which is one of this package.
        descriptors: File descriptors that the child inherits, given to ``main`` by their numbers.
        environment: Variables on top of those of this process.
        python: Interpreter, which finds other packages by itself; None: this one, with what it
            finds.

    Raises:
        OSError: The interpreter cannot be started.
    """

    def __init__(
        self,
        module: str,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        *,
        python: str | None = None,
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        lifeline, self._lifeline = os.pipe()
        inherited = (lifeline, *descriptors)
        root, path = Path(rlinf.__file__).parent, sys.path if python is None else []
        command = [python or sys.executable, "-c", _BOOTSTRAP, str(root), json.dumps(path), module]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=inherited,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def output_tail(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        content = os.pread(self._log.fileno(), _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        return content.replace(b"\0", b"").decode(errors="replace").strip() or "(nothing)"

    def forget_long_output(self) -> None:
        """Drop what it printed where that is much."""
        if os.fstat(self._log.fileno()).st_size > _LARGEST_LOG:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)  # its end of the file is the same

    def obituary(self) -> str:
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
        return f"{how}; the end of its output:\n{self.output_tail()}"

    def stacks(self, pid: int | None = None) -> str:
        """Ask where its threads are; returns the end of its output with the answer, if any.

        Args:
            pid: Its own process id, where the interpreter is a program that starts another.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid if pid is None else pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return self.output_tail()

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """End it and whatever it started, now; may be called again."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        os.close(self._lifeline)
        self._lifeline = -1


def watch_parent(lifeline: int) -> None:
    """End this process and its group when the parent ends; the child's first call.

    Also prepares it to print its stacks, on a crash or when the parent asks.

    Args:
        lifeline: Reading end of a pipe that nobody writes to and whose closing is the parent's end.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        # The kernel itself kills the group, also where a call that hangs lets no thread run.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)
