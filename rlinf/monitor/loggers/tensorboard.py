"""TensorBoard event files, in ``tensorboard/`` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf.monitor.loggers.base import LoggerContext, MetricLogger


class TensorBoardLogger(MetricLogger):
    """Writes scalars; ``tensorboard --logdir RUN`` shows them."""

    title = "TensorBoard"

    def __init__(self, context: LoggerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._directory = str(context.run_dir / "tensorboard")
        self._writer = SummaryWriter(self._directory)

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=unix_time)

    def rewind(self, step: int) -> None:
        """Begin a new event file that tells TensorBoard to forget the steps behind ``step``."""
        self._writer.close()
        self._writer = self._open(self._directory, purge_step=step + 1)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()
