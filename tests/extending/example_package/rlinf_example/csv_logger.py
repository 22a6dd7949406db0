"""Metrics as one CSV file: step, name, value."""

from __future__ import annotations

import csv
from collections.abc import Mapping

from rlinf.monitor.loggers.base import LoggerContext, MetricLogger


class CSVLogger(MetricLogger):
    """Appends to ``metrics.csv`` of the run directory."""

    title = "CSV"

    def __init__(self, context: LoggerContext) -> None:
        self._path = context.run_dir / "metrics.csv"
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Append one line per metric."""
        csv.writer(self._file).writerows([step, name, value] for name, value in metrics.items())
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drop what lies behind ``step``; a resumed run logs it again."""
        self._file.close()
        with self._path.open(newline="", encoding="utf-8") as file:
            kept = [line for line in csv.reader(file) if int(line[0]) <= step]
        self._file = self._path.open("w", newline="", encoding="utf-8")
        csv.writer(self._file).writerows(kept)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
