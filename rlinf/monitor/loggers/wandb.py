"""Weights & Biases; offline runs lie in ``wandb/`` of the run directory for ``wandb sync``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from rlinf.monitor.loggers.base import LoggerContext, MetricLogger, remembered_id


class WandbLogger(MetricLogger):
    """One W&B run; a resumed run goes on under the same id."""

    title = "Weights & Biases"
    packages = ("wandb",)
    extra = "wandb"
    remedy = "to log in with `wandb login`"

    def __init__(self, context: LoggerContext) -> None:
        import wandb

        run_id = remembered_id(context.run_dir / "wandb" / "run_id", secrets.token_hex(4))
        self._run = wandb.init(
            project=context.project,
            name=context.name,
            id=run_id,
            resume="allow",
            dir=str(context.run_dir),
            mode=context.mode,
            config=dict(context.config),
            settings=wandb.Settings(console="off", quiet=True),
        )

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Log one step. W&B itself ignores a step below one that it has already."""
        self._run.log({**metrics, "unix_time": unix_time}, step=step)

    def close(self) -> None:
        """Finish the run; the service shows one that did not come to its end as failed."""
        self._run.finish(exit_code=int(self.ending != "finished"))
