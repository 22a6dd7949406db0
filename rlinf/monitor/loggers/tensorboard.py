"""TensorBoard event files, in ``tensorboard/`` of the run directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rlinf.monitor.loggers.base import LoggerContext, MetricLogger


class TensorBoardLogger(MetricLogger):
    """Writes scalars; ``tensorboard --logdir RUN`` shows them."""

    title = "TensorBoard"

    def __init__(self, context: LoggerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._directory = context.run_dir / "tensorboard"

    @cached_property
    def _writer(self) -> Any:
        return self._open(str(self._directory))

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=unix_time)

    def rewind(self, step: int) -> None:
        """Begin a new event file that tells TensorBoard to forget the steps behind ``step``."""
        self.close()
        _pass_second_of_files(self._directory)
        self._writer = self._open(str(self._directory), purge_step=step + 1)

    def close(self) -> None:
        """Write what is buffered."""
        if "_writer" in vars(self):
            self._writer.close()


def _pass_second_of_files(directory: Path) -> None:
    """Wait while a new event file would have the second of another in its name.

    TensorBoard reads files in the order of their names, in which a number follows the second that
    is 10 after 9, so that the new one might be read first.
    """
    while any(directory.glob(f"events.out.tfevents.{int(time.time())}.*")):
        time.sleep(0.02)
