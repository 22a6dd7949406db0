"""The exceptions that the project raises on purpose.

A :class:`UserError` is a mistake that the reader of the message can correct: the command line
prints it without a stack trace and exits with 2. Everything else is a failure of the run (1).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RLinfError(Exception):
    """Base of every exception that the project raises on purpose."""


class UserError(RLinfError):
    """A mistake in what the user gave us; the message says what, why and what to do."""


class ConfigError(UserError):
    """A configuration value, key or combination that is not legal: why, and the nearest legal one.

    ``key`` is relative to the section of who raises this, which :func:`in_section` puts before it;
    empty where the reason names the culprits.
    """

    def __init__(self, reason: str, *, key: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.key = key

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" if self.key else self.reason


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Let the key of a ConfigError from within be one of ``section``, unless that is empty."""
    try:
        yield
    except ConfigError as error:
        if error.key and section:
            error.key = f"{section}.{error.key}"
        raise


_FRAME = re.compile(r'\s*File "(.+)", line (\d+)')


def told(error: BaseException) -> str:
    """An exception of somebody else's code in a line: type, message, and :func:`own_line`. Half a
    character, which no file takes, is shown by its number."""
    message = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    return " ".join(message.split()) + own_line(traceback.format_tb(error.__traceback__))


def own_line(trace: list[str]) -> str:
    """From a trace the file and line of the innermost call that is neither in this package, nor in
    an installed one, nor in Python's own library, as ``" (FILE line N)"``; empty: there is none."""
    away = "<", f"{Path(__file__).resolve().parent}{os.sep}", f"{Path(os.__file__).parent}{os.sep}"
    for found in filter(None, map(_FRAME.match, reversed(trace))):
        file, line = found.groups()
        # Modules of Cython name their sources, by a path that leads nowhere.
        compiled = file.endswith((".pyx", ".pxi"))
        if not (compiled or "site-packages" in file or file.startswith(away)):
            return f" ({file} line {line})"
    return ""


def shortened(text: str, most: int) -> str:
    """A text without its middle where it is longer than so many characters, as that of an exception
    that shows its data; begin and end say what it is."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} … {left_out} characters … {text[-(most // 2) :]}"


def sought(path: Path) -> str:
    """A path as it was written, with the directory where a relative one was looked for."""
    return str(path) if path.expanduser().is_absolute() else f"{path} in {Path.cwd()}"


def install_command(extra: str) -> str:
    """The command that installs an extra for this interpreter, from the checkout if it is one."""
    root = Path(__file__).resolve().parents[1]
    in_checkout = (root / "pyproject.toml").is_file()
    if in_checkout and extra == "vllm":  # which asks for packages that it must not have here
        return shlex.join(["make", "-C", str(root), extra])
    project = ["-e", f"{root}[{extra}]"] if in_checkout else [f"rlinf[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *project])


class MissingPackageError(UserError):
    """The package (by import name) behind what the user asked for, in words, is not installed.

    ``extra`` is that of this project which installs it.
    """

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package '{package}', which is not installed. "
            f"Install it with: {install_command(extra)}"
        )
        self.package, self.extra, self.needed_for = package, extra, needed_for

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.needed_for)


class CheckpointError(UserError):
    """A checkpoint that cannot be used: missing, damaged, or of another model."""


class RunFailure(RLinfError):  # noqa: N818 - a failure of the run, not an error of the user
    """The run cannot go on; the message names the first failure."""
