"""Standard output and error of commands that go on for long: they outlive whoever reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, Literal

log = logging.getLogger(__name__)

_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class LastingStream:
    """A stream whose failures end its output and nothing else.

    The other end of a pipe may be closed (``| head``, ``| tee`` ended by the same Ctrl-C), a
    terminal may be gone, the disk of a file full. What is written then goes nowhere, and the log
    says so once.

    Args:
        stream: With a file descriptor of its own.
        name: What the log calls it.
    """

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        """As that of the stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """As that of the stream."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """As that of the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        log.warning("nothing more can be written to %s (%s): the command goes on without it",
                    self._name, error.strerror)  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting(*names: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Let a command go on when what it says can no longer be written."""
    before = {name: getattr(sys, name) for name in names}
    for name, stream in before.items():
        setattr(sys, name, LastingStream(stream, _NAMES[name]))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()  # what is wrong shows here, at the latest
            setattr(sys, name, stream)
