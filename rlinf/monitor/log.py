"""Where log lines go: all of them to the run's file, warnings to the screen as well."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = "rlinf"
_FORMAT = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"


@contextmanager
def logging_to(
    path: Path, *, level: int = logging.INFO, screen_level: int = logging.WARNING
) -> Iterator[None]:
    """Send the project's log lines, and Python's warnings, to a file and to standard error.

    On a terminal the lines stand above the live progress display, which takes over standard error
    while it is shown; elsewhere they are plain.

    Args:
        path: The file; lines are appended.
        level: Least level that the file takes.
        screen_level: Least level that is shown on the screen.
    """
    handlers: list[logging.Handler] = [_file_handler(path, level), _ScreenHandler(screen_level)]
    loggers = [logging.getLogger(ROOT), logging.getLogger("py.warnings")]
    levels = [logger.level for logger in loggers]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(min(level, screen_level))
        for handler in handlers:
            logger.addHandler(handler)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers:
            handler.close()


def _file_handler(path: Path, level: int) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.setLevel(level)
    return handler


class _ScreenHandler(logging.Handler):
    """Writes to what ``sys.stderr`` is at that moment.

    While a live display is shown that is a stand-in, which puts the line above the display. Rich's
    own log handler looks behind the stand-in and would write into the display.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a line."""
        try:
            label = f"{record.levelname.lower()}:"
            if sys.stderr.isatty():
                label = f"\x1b[1;33m{label}\x1b[0m"
            sys.stderr.write(f"{label} {self.format(record)}\n")
        except OSError:
            self.handleError(record)
