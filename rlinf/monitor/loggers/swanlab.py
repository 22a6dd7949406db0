"""SwanLab; offline runs lie in ``swanlab/`` of the run directory for ``swanlab sync``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from rlinf.monitor.loggers.base import Ending, LoggerContext, MetricLogger, remembered_id

_STATES: Mapping[Ending, str] = {
    "finished": "success",
    "interrupted": "aborted",
    "failed": "crashed",
}


class SwanLabLogger(MetricLogger):
    """One SwanLab run; a resumed run goes on under the same id."""

    title = "SwanLab"
    packages = ("swanlab",)
    extra = "swanlab"
    remedy = "to log in with `swanlab login`"

    def __init__(self, context: LoggerContext) -> None:
        import swanlab

        directory = context.run_dir / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        run_id = remembered_id(directory / "run_id", secrets.token_hex(8))
        self._run = swanlab.init(
            project=context.project,
            name=context.name,
            id=run_id,
            resume="allow",
            log_dir=str(directory),
            mode=context.mode,
            config=dict(context.config),
        )

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Log one step. SwanLab itself ignores a step that it has already."""
        self._run.log({**metrics, "unix_time": unix_time}, step=step)

    def close(self) -> None:
        """Finish the run."""
        reason = "see the log of the run" if self.ending == "failed" else None
        self._run.finish(state=_STATES[self.ending], error=reason)
