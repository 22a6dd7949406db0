"""The numbers of a run: always in ``metrics.jsonl``, and sent to the loggers asked for."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.checkpoint.files import is_disk_full
from rlinf.errors import CheckpointError, ConfigError, RunFailure, UserError
from rlinf.monitor.loggers.base import (
    REGISTRY,
    Ending,
    LoggerConfig,
    LoggerContext,
    MetricLogger,
)
from rlinf.monitor.run_directory import METRICS_FILE

logger = logging.getLogger(__name__)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors of many numbers
        what = type(value).__name__
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise RunFailure(f"the metric `{name}` is no number, but a {what}{shape}") from error


class MetricsLog:
    """Writes the metrics of every step to every logger of a run.

    A logger that raises is dropped with one warning; the run and the other loggers go on. A
    context manager that closes them. ``run_config`` is for loggers that show it.

    Raises:
        MissingPackageError: The package of a logger is not installed.
        ConfigError: A logger is unknown, or its service refuses the run.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: LoggerConfig | None = None,
        *,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        config = config or LoggerConfig()
        config.check()
        context = LoggerContext(
            run_dir=Path(run_dir),
            project=config.project,
            name=config.name or Path(run_dir).resolve().name,
            mode=config.mode,
            config=run_config or {},
        )
        self._file = JsonlLogger(context)
        self._loggers: dict[str, MetricLogger] = {
            name: _opened(name, context) for name in config.backends if name != "jsonl"
        }
        self.ending: Ending = "finished"
        """How the run ended, which hosted loggers show."""

    @property
    def active(self) -> list[str]:
        """Loggers that still take metrics, besides the file."""
        return list(self._loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics, ``group/name``, after ``step`` training steps; NaN is allowed.

        Raises:
            RunFailure: One is no number.
        """
        now = time.time()
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._file.log(step, numbers, now)
        self._each(lambda target: target.log(step, numbers, now))

    def cursor(self) -> dict[str, int]:
        """The place behind the last line, for a checkpoint: bytes and lines."""
        return self._file.cursor()

    def truncate(self, cursor: Mapping[str, int] | None) -> None:
        """Forget everything that was logged behind a cursor, or everything if it is None.

        Raises:
            CheckpointError: The cursor was not made by :meth:`cursor`.
        """
        cursor = {"bytes": 0, "lines": 0} if cursor is None else cursor
        if not {"bytes", "lines"} <= cursor.keys():
            raise CheckpointError(f"a metrics cursor has bytes and lines, this one is {cursor}")
        step = self._file.truncate(cursor)
        self._each(lambda target: target.rewind(step))

    def close(self) -> None:
        """Let every logger send what is left."""
        for target in self._loggers.values():
            target.ending = self.ending
        self._each(lambda target: target.close())
        self._loggers.clear()
        self._file.close()

    def _each(self, action: Callable[[MetricLogger], None]) -> None:
        for name, target in list(self._loggers.items()):
            try:
                action(target)
            except Exception as error:  # noqa: BLE001 - foreign code; its failure is not ours
                del self._loggers[name]
                logger.warning(
                    "The logger %s failed and is dropped (%s: %s). The numbers are in %s.",
                    target.title, type(error).__name__, error, self._file.path,
                )  # fmt: skip

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.ending = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
        self.close()


def _opened(name: str, context: LoggerContext) -> MetricLogger:
    """A logger; ConfigError where a hosted service is not to be had."""
    logger_class = REGISTRY.load(name)
    try:
        return logger_class(context)
    except UserError:
        raise
    except Exception as error:
        if not logger_class.remedy:
            raise
        said = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ConfigError(
            f"{logger_class.title} refused the run: {said}; nearest: {logger_class.remedy}, or "
            f"{'no ' + name if context.mode == 'offline' else 'logger.mode=offline'}",
            key="logger.backends",
        ) from error


class JsonlLogger(MetricLogger):
    """Appends to ``metrics.jsonl``; a line is written when its step ends.

    Values that JSON has no number for are the texts ``"nan"``, ``"inf"`` and ``"-inf"``. While the
    disk is full, lines wait in memory for the next step.
    """

    title = "metrics.jsonl"

    def __init__(self, context: LoggerContext) -> None:
        self.path = context.run_dir / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._lines = sum(1 for _ in _whole_lines(self.path))
        self._waiting = b""
        self._drop_half_line()

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Append one line; it is in the hands of the operating system when this returns.

        Raises:
            OSError: The file cannot be written, for another reason than a full disk.
        """
        entry = {"step": step, "time": round(unix_time, 3)}
        values = {name: _json_value(value) for name, value in metrics.items()}
        self._waiting += json.dumps({**entry, **values}, allow_nan=False).encode() + b"\n"
        self._lines += 1
        self._write_waiting()

    def cursor(self) -> dict[str, int]:
        """Return where the next line begins."""
        return {"bytes": self._file.tell() + len(self._waiting), "lines": self._lines}

    def truncate(self, cursor: Mapping[str, int]) -> int:
        """Remove every line behind a cursor; return the last step that is left, or 0.

        A file that is shorter than the cursor (the machine lost power) is kept as it is.
        """
        self._waiting = b""
        length = self._file.seek(0, os.SEEK_END)
        if length < cursor["bytes"]:
            logger.warning(
                "%s has %d bytes, the checkpoint was made at %d: some lines are lost.",
                self.path, length, cursor["bytes"],
            )  # fmt: skip
        else:
            self._file.truncate(cursor["bytes"])
        self._drop_half_line()
        self._lines = sum(1 for _ in _whole_lines(self.path))
        return max((int(entry["step"]) for entry in _entries(self.path)), default=0)

    def close(self) -> None:
        """Write what waits and close the file."""
        self._write_waiting()
        self._file.close()

    def _write_waiting(self) -> None:
        """Write whole lines or none: what follows a half line would be lost with it."""
        begin, waited = self._file.tell(), self._waiting.count(b"\n")
        try:
            if self._file.write(self._waiting) == len(self._waiting):
                self._waiting = b""
                return
        except OSError as error:
            if not is_disk_full(error):
                error.filename = str(self.path)  # which writing does not give
                raise
        self._file.truncate(begin)
        self._file.seek(begin)
        if waited == 1:
            logger.warning("The disk is full: %s waits. Free some space.", self.path)

    def _drop_half_line(self) -> None:
        """A killed process may have left a line without its end; the next one must not join it."""
        whole = sum(len(line) for line in _whole_lines(self.path))
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Return the lines of a ``metrics.jsonl``: ``step``, ``time`` and every metric, as numbers."""
    return [{name: float(value) for name, value in line.items()} for line in _entries(Path(path))]


def _entries(path: Path) -> Iterator[dict[str, float]]:
    """What the whole lines say; a line that a loss of power spoilt is passed over."""
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and type(entry.get("step")) is int and _numeric(entry):
            yield entry
        else:
            logger.warning("Line %d of %s is damaged and passed over.", number, path)


def _numeric(entry: Mapping[str, Any]) -> bool:
    try:
        for value in entry.values():
            float(value)
    except (TypeError, ValueError):
        return False
    return True


def _whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _json_value(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else repr(value)
