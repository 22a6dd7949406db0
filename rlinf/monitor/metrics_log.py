"""The numbers of a run: always in ``metrics.jsonl``, and sent to the loggers asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.monitor.config import LoggerConfig
from rlinf.monitor.loggers.base import REGISTRY, LoggerContext, MetricLogger
from rlinf.monitor.loggers.jsonl import JsonlLogger

logger = logging.getLogger(__name__)


class MetricsLog:
    """Writes the metrics of every step to every logger of a run.

    A logger that raises is dropped with one warning; the run and the other loggers go on. A
    context manager that closes them.

    Args:
        run_dir: The run's directory.
        config: Which loggers, and what hosted ones are told.
        run_config: The resolved configuration, shown by loggers that show one.

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
        classes = {name: REGISTRY.load(name) for name in config.backends if name != "jsonl"}
        self._file = JsonlLogger(context)
        self._loggers: dict[str, MetricLogger] = {
            name: found(context) for name, found in classes.items()
        }

    @property
    def active(self) -> list[str]:
        """Loggers that still take metrics, besides the file."""
        return list(self._loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step.

        Args:
            step: Training steps that are done.
            metrics: Numbers by name, ``group/name``; NaN and infinities are allowed.
        """
        now = time.time()
        numbers = {name: float(value) for name, value in metrics.items()}
        self._file.log(step, numbers, now)
        self._each(lambda target: target.log(step, numbers, now))

    def cursor(self) -> dict[str, int]:
        """Return the place behind the last line, for a checkpoint: bytes and lines."""
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

    def __exit__(self, *exception: object) -> None:
        self.close()
