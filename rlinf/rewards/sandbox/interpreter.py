"""Which files a Python interpreter needs, so that a sandbox can show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlinf.errors import ConfigError

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_QUESTION = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"


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

    Args:
        python: Its path; None for the one under this process, without the packages of its virtual
            environment. That of a virtual environment brings the packages along.

    Raises:
        ConfigError: It cannot be run, or its files lie where they cannot be shown.
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
    found: list[str] = json.loads(answer.stdout)
    return found


def _refuse_if_too_much(folder: str, executable: str) -> None:
    home = os.path.expanduser("~")
    if home.startswith(folder.rstrip("/") + "/") or folder in ("/", home, "/tmp", "/etc", "/var"):
        raise ConfigError(
            f"the interpreter {executable} is installed into {folder}, which would be shown to "
            "sandboxed programs with everything in it; use one in a directory of its own"
        )
