"""The host's side of the sandbox: start a program, watch it, end it, take what it wrote."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError
from rlinf.rewards.sandbox.interpreter import find_interpreter
from rlinf.rewards.sandbox.limits import Ending, Limits, SandboxError, SandboxResult
from rlinf.rewards.sandbox.seccomp import build_filter

SCRATCH = "/box"
"""Where a program finds its files: its working directory, its home and its temporary directory."""

_LAUNCHER = Path(__file__).with_name("launcher.py")
_END_SECONDS = 5.0
_READ_BYTES = 65536
_PROBE_SECONDS = 20.0
_PROBE = """\
import os
seen = [path for path in ("/proc/self", "/etc/passwd", "/home") if os.path.exists(path)]
try:
    import socket
    socket.socket()
    seen.append("sockets")
except OSError:
    pass
print("seen:", *seen) if seen or os.geteuid() == 0 else print("isolated")
"""


class Sandbox:
    """Runs Python programs that nobody has read.

    A program sees the system's programs and its interpreter, read-only, and an empty scratch
    directory. It has no network, no other processes, no privileges and a filtered kernel. When it
    ends, or is ended, every process that it started ends with it.

    Args:
        limits: What one program may use.
        python: Path of the interpreter; see :func:`find_interpreter`.
    """

    def __init__(self, limits: Limits | None = None, *, python: str | None = None) -> None:
        self.limits = limits or Limits()
        self._interpreter = find_interpreter(python)
        self._filter = build_filter().hex()

    def run(
        self, program: str, *, stdin: bytes = b"", files: Mapping[str, str] | None = None
    ) -> SandboxResult:
        """Run a program to its end.

        Args:
            program: Its source; it becomes ``main.py``.
            stdin: What it reads from standard input.
            files: Further files of the scratch directory by name.

        Raises:
            SandboxError: The sandbox could not be built; the program has not been run.
        """
        sources = {**(files or {}), "main.py": program}
        with self.start(["main.py"], stdin=stdin, files=sources) as process:
            supervise([process], until=process)
            return process.result()

    @contextmanager
    def start(
        self,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> Iterator[SandboxProcess]:
        """Start the interpreter; on leaving the context nothing of it is left.

        Args:
            arguments: Of the interpreter.
            stdin: What it reads from standard input.
            files: Files of the scratch directory by name.
            descriptors: Open files that it gets, from number 3.
        """
        limits = self.limits
        spec = {
            "command": [self._interpreter.executable, "-I", "-B", *arguments],
            "environment": {
                "HOME": SCRATCH,
                "TMPDIR": SCRATCH,
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
            "files": dict(files),
            "readable": self._interpreter.readable,
            "scratch": SCRATCH,
            "scratch_bytes": limits.scratch_bytes,
            "memory_bytes": limits.memory_bytes,
            "limits": limits.of_kernel(),
            "filter": self._filter,
        }
        process = SandboxProcess(spec, limits, stdin, descriptors)
        try:
            yield process
        finally:
            process.close()

    def check(self) -> None:
        """Find out by a small program whether this machine can isolate one.

        Raises:
            ConfigError: It cannot; says why and what to do.
        """
        if sys.platform != "linux":
            raise ConfigError(f"the sandbox for programs needs Linux; this is {sys.platform}")
        probe = Sandbox(Limits(wall_seconds=_PROBE_SECONDS))
        probe._interpreter, probe._filter = self._interpreter, self._filter
        try:
            result = probe.run(_PROBE)
        except SandboxError as error:
            raise ConfigError(f"{error}; {_HOW_TO_ALLOW}") from error
        if result.output.strip() != b"isolated":
            said = (result.output + result.errors).decode(errors="replace").strip()
            raise ConfigError(
                f"the sandbox for programs does not hold on this machine: a probe ended with "
                f"{result.ending} ({result.code}) and said: {said[-500:] or 'nothing'}"
            )


_HOW_TO_ALLOW = (
    "the kernel must allow namespaces: as an ordinary user, unprivileged user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
    "user.max_user_namespaces above 0); in a container, run it with --cap-add SYS_ADMIN and "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined. "
    "Programs are never run without isolation"
)


class SandboxProcess:
    """One program in its sandbox; made by :meth:`Sandbox.start`."""

    def __init__(
        self, spec: Mapping[str, Any], limits: Limits, stdin: bytes, descriptors: Sequence[int]
    ) -> None:
        self._limits = limits
        self._started = time.monotonic()
        self._ending: Ending | None = None
        self._report: dict[str, Any] = {}
        self._seconds = 0.0
        pipes = [os.pipe() for _ in range(3)]
        self._buffers = {reader: bytearray() for reader, _ in pipes}
        self._open = set(self._buffers)
        self._output, self._errors, self._status = self._buffers
        standard_input = _sealed(stdin)
        output, errors, status = (writer for _, writer in pipes)
        passed = [standard_input, output, errors, *descriptors]
        described = _sealed(
            json.dumps(
                {**spec, "descriptors": passed, "status": status, "host": os.getpid()}
            ).encode()
        )
        try:
            self._launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), str(described)],
                stdin=subprocess.DEVNULL,
                pass_fds=[*passed, status, described],
                env={},
            )
        except BaseException:
            for reader in self._open:
                os.close(reader)
            raise
        finally:
            for descriptor in (standard_input, output, errors, status, described):
                os.close(descriptor)

    @property
    def deadline(self) -> float:
        """When its time is over, on the monotonic clock."""
        return self._started + self._limits.wall_seconds

    @property
    def readers(self) -> set[int]:
        """Descriptors that something may still come from."""
        return set(self._open)

    @property
    def ended(self) -> bool:
        """Whether the program has ended and everything that it wrote has been read."""
        return not self._open or self._ending is not None

    def read(self, reader: int) -> None:
        """Take what has come from one of the readers."""
        content = os.read(reader, _READ_BYTES)
        if not content:
            self._open.discard(reader)
            os.close(reader)
            return
        buffer = self._buffers[reader]
        buffer += content
        if reader != self._status and len(buffer) > self._limits.output_bytes:
            del buffer[self._limits.output_bytes :]
            self.end("output")

    def end(self, ending: Ending) -> None:
        """End the program and everything that it started, and wait until it is gone."""
        if self._ending is None:
            self._ending = ending
        self._seconds = self._seconds or time.monotonic() - self._started
        with contextlib.suppress(ProcessLookupError):
            self._launcher.send_signal(signal.SIGTERM)
        try:
            self._launcher.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    def result(self) -> SandboxResult:
        """How it ended.

        Raises:
            SandboxError: The sandbox could not be built; nothing has been run.
        """
        report = self._read_report()
        ending, code = self._ending, report.get("code")
        if "error" in report:
            raise SandboxError(f"the sandbox cannot be built: {report['error']}")
        if ending is None and "over" in report:
            ending = report["over"]
        if ending is None and code is None:
            status = self._launcher.wait()
            raise SandboxError(f"the sandbox ended without a word (exit code {status})")
        if ending is None and code is not None:
            ending = self._ending_of(code, report["cpu"])
        assert ending is not None
        return SandboxResult(
            ending=ending,
            code=code,
            output=bytes(self._buffers[self._output]),
            errors=bytes(self._buffers[self._errors]),
            seconds=self._seconds or time.monotonic() - self._started,
        )

    def _ending_of(self, code: int, cpu_seconds: float) -> Ending:
        if code >= 0:
            return "exited"
        # A program that ignores the signal of the first second too many is killed by the next.
        killed = code == -signal.SIGKILL and cpu_seconds > self._limits.cpu_seconds
        return "cpu_time" if killed or code == -signal.SIGXCPU else "signalled"

    def _read_report(self) -> dict[str, Any]:
        lines = self._buffers[self._status].splitlines()
        report: dict[str, Any] = json.loads(lines[0]) if lines else {}
        return report

    def close(self) -> None:
        """Make sure that nothing is left."""
        self.end("stopped")
        for reader in self._open:
            os.close(reader)
        self._open = set()


def supervise(processes: Sequence[SandboxProcess], *, until: SandboxProcess) -> None:
    """Watch programs until one has ended; ends what exceeds its time or its output.

    Args:
        processes: All that run side by side.
        until: The one of them that is waited for.
    """
    with selectors.DefaultSelector() as selector:
        for process in processes:
            for reader in process.readers:
                selector.register(reader, selectors.EVENT_READ, process)
        while not until.ended:
            running = [process for process in processes if not process.ended]
            wait = min(process.deadline for process in running) - time.monotonic()
            for key, _ in selector.select(max(wait, 0)):
                process, reader = key.data, key.fd
                if not process.ended:
                    process.read(reader)
                if process.ended or reader not in process.readers:
                    selector.unregister(reader)
            now = time.monotonic()
            for process in running:
                if not process.ended and now >= process.deadline:
                    process.end("wall_time")


def _sealed(content: bytes) -> int:
    """Return a descriptor of a file in memory that can be read and not changed."""
    descriptor = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
