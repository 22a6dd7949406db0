"""Which walls stand around programs that nobody has read, and what such a program gets to see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlinf.errors import ConfigError
from rlinf.rewards.sandbox.running import (
    Limits,
    SandboxError,
    SandboxProcess,
    SandboxResult,
    supervise,
)
from rlinf.rewards.sandbox.seccomp import build_filter

SCRATCH = "/box"
"""Where a program finds its files: its working directory, its home and its temporary directory."""

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_QUESTION = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
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
_HOW_TO_ALLOW = (
    "the kernel must allow namespaces: as an ordinary user, unprivileged user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
    "user.max_user_namespaces above 0); in a container, run it with --cap-add SYS_ADMIN and "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined. "
    "Programs are never run without isolation"
)


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

    def run(self, program: str, *, stdin: bytes = b"") -> SandboxResult:
        """Run a program to its end.

        SandboxError where the sandbox could not be built; the program has not been run.
        """
        with self.start(["main.py"], stdin=stdin, files={"main.py": program}) as process:
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
        limits: Limits | None = None,
    ) -> Iterator[SandboxProcess]:
        """Start the interpreter; on leaving the context nothing of it is left.

        The scratch directory holds the files; open descriptors are given from number 3 on.
        ``limits`` take the place of those of the sandbox.
        """
        limits = limits or self.limits
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
        """Try by a small program whether this machine can isolate one; ConfigError says why not."""
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


@dataclass(frozen=True)
class Interpreter:
    """An interpreter in a sandbox.

    Args:
        executable: Its path, the same inside and outside.
        readable: Paths that are shown, read-only.
    """

    executable: str
    readable: tuple[str, ...]


@cache
def find_interpreter(python: str | None = None) -> Interpreter:
    """The interpreter for sandboxed programs.

    By its path, with the packages of a virtual environment that is its own; None: the one under
    this process, without those packages. ConfigError where it cannot be run, or its files lie where
    they cannot be shown.
    """
    if python is None:
        executable = os.path.realpath(sys.executable)
        prefixes = [sys.base_prefix]
    else:
        executable = os.path.abspath(python)
        prefixes = _ask(executable)
    executables = {executable, os.path.realpath(executable)}
    folders = [*prefixes, *map(os.path.realpath, prefixes), *map(os.path.dirname, executables)]
    system = [path for path in _SYSTEM if os.path.lexists(path)]
    own: list[str] = []
    for folder in sorted(set(folders)):
        if not any(Path(folder).is_relative_to(shown) for shown in (*system, *own)):
            _refuse_if_too_much(folder, executable)
            own.append(folder)
    return Interpreter(executable, (*system, *own))


def _ask(executable: str) -> list[str]:
    try:
        answer = subprocess.run(
            [executable, "-I", "-c", _QUESTION], capture_output=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cannot run the interpreter {executable}: {error}") from error
    try:
        found: list[str] = json.loads(answer.stdout)
    except ValueError as error:
        raise ConfigError(f"{executable} is no interpreter of Python") from error
    return found


def _refuse_if_too_much(folder: str, executable: str) -> None:
    home = os.path.expanduser("~")
    if home.startswith(folder.rstrip("/") + "/") or folder in ("/", home, "/tmp", "/etc", "/var"):
        raise ConfigError(
            f"the interpreter {executable} is installed into {folder}, which would be shown to "
            "sandboxed programs with everything in it; use one in a directory of its own"
        )
