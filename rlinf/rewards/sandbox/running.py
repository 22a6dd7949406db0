"""One program in its sandbox: what it may use, how it is watched and ended, what it wrote."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf.errors import RLinfError

Ending = Literal["exited", "signalled", "cpu_time", "wall_time", "memory", "output", "stopped"]
"""How a program ended: by itself, by a signal, over one of its limits, or because the host had what
it wanted."""

_LAUNCHER = Path(__file__).with_name("launcher.py")
_END_SECONDS = 5.0
_READ_BYTES = 65536


class SandboxError(RLinfError):
    """The sandbox could not be built; nothing has been run."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use.

    Args:
        cpu_seconds: Processor time of each of its processes.
        wall_seconds: Time from its start, that of the sandbox included.
        memory_bytes: Address space of each process, and resident memory of all together.
        processes: Processes and threads at a time.
        scratch_bytes: All files in the scratch directory together.
        output_bytes: Standard output and standard error, each.
        descriptors: Open files of each process.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 10.0
    memory_bytes: int = 512 * 2**20
    processes: int = 16
    scratch_bytes: int = 16 * 2**20
    output_bytes: int = 2**20
    descriptors: int = 64

    def of_kernel(self) -> dict[str, int]:
        """The limits that the kernel keeps for each process, by their name in ``resource``."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes + 1,  # the first process of the namespace counts
            "RLIMIT_FSIZE": self.scratch_bytes,
            "RLIMIT_NOFILE": self.descriptors,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How the run of a program ended.

    Args:
        ending: How.
        code: Exit code; minus the number of the signal that ended it; None where the host did.
        output: Standard output, cut at the limit.
        errors: Standard error, cut at the limit.
        seconds: Time from its start.
    """

    ending: Ending
    code: int | None
    output: bytes
    errors: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0; says nothing about what it did."""
        return self.ending == "exited" and self.code == 0


class SandboxProcess:
    """One program in its sandbox; made by :meth:`~rlinf.rewards.sandbox.host.Sandbox.start`."""

    def __init__(
        self, spec: Mapping[str, Any], limits: Limits, stdin: bytes, descriptors: Sequence[int]
    ) -> None:
        self._limits = limits
        self._started = time.monotonic()
        self._ending: Ending | None = None
        self._seconds = 0.0
        pipes = [os.pipe() for _ in range(3)]
        self._buffers = {reader: bytearray() for reader, _ in pipes}
        self._open = set(self._buffers)
        self._output, self._errors, self._status = self._buffers
        standard_input = _sealed(stdin)
        output, errors, status = (writer for _, writer in pipes)
        passed = [standard_input, output, errors, *descriptors]
        work = {**spec, "descriptors": passed, "status": status, "host": os.getpid()}
        described = _sealed(json.dumps(work).encode())
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
        """How it ended; SandboxError where nothing has been run."""
        lines = self._buffers[self._status].splitlines()
        report: dict[str, Any] = json.loads(lines[0]) if lines else {}
        if "error" in report:
            raise SandboxError(f"the sandbox cannot be built: {report['error']}")
        code: int | None = report.get("code")
        ending: Ending | None = self._ending or report.get("over")
        if ending is None:
            if code is None:
                status = self._launcher.wait()
                raise SandboxError(f"the sandbox ended without a word (exit code {status})")
            ending = self._ending_of(code, report["cpu"])
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

    def close(self) -> None:
        """Make sure that nothing is left."""
        self.end("stopped")
        for reader in self._open:
            os.close(reader)
        self._open = set()


def supervise(processes: Sequence[SandboxProcess], *, until: SandboxProcess) -> None:
    """Watch programs until one has ended; ends those that exceed their time or their output."""
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
    """A descriptor of a file in memory that can be read and not changed."""
    descriptor = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
