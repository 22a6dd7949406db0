"""MLflow; without a tracking server the run lies in ``mlflow/mlflow.db`` of the run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlinf.monitor.loggers.base import LoggerContext, MetricLogger, remembered_id

if TYPE_CHECKING:
    from mlflow.utils.async_logging.run_operations import RunOperations

_MAX_PARAMETER = 500


class MlflowLogger(MetricLogger):
    """One MLflow run, in the server of ``MLFLOW_TRACKING_URI`` or in a SQLite file.

    MLflow no longer accepts plain directories as a store. ``logger.mode=offline`` uses the file
    even where a server is named.
    """

    title = "MLflow"
    packages = ("mlflow", "sqlalchemy", "alembic")
    extra = "mlflow"

    def __init__(self, context: LoggerContext) -> None:
        from mlflow import MlflowClient

        directory = context.run_dir / "mlflow"
        directory.mkdir(parents=True, exist_ok=True)
        store = f"sqlite:///{(directory / 'mlflow.db').resolve()}"
        server = os.environ.get("MLFLOW_TRACKING_URI") if context.mode == "online" else None
        self._client = MlflowClient(tracking_uri=server or store)
        known = directory / "run_id"
        self._run_id = known.read_text() if known.is_file() else self._create(context)
        remembered_id(known, self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        self._pending: RunOperations | None = None

    def _create(self, context: LoggerContext) -> str:
        client = self._client
        experiment = client.get_experiment_by_name(context.project)
        directory = (context.run_dir / "mlflow" / "artifacts").resolve()
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(context.project, artifact_location=directory.as_uri())
        )
        run = client.create_run(experiment_id, run_name=context.name)
        for name, value in _flat(context.config):
            client.log_param(run.info.run_id, name, str(value)[:_MAX_PARAMETER])
        run_id: str = run.info.run_id
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Log one step, without waiting for the store."""
        from mlflow.entities import Metric

        milliseconds = int(unix_time * 1000)
        entries = [Metric(name, value, milliseconds, step) for name, value in metrics.items()]
        self._pending = self._client.log_batch(self._run_id, metrics=entries, synchronous=False)

    def close(self) -> None:
        """Mark the run as finished."""
        if self._pending is not None:
            self._pending.wait()  # batches are sent in order, so the last one is enough
        self._client.set_terminated(self._run_id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            entries.extend(_flat(value, f"{prefix}{key}."))
        else:
            entries.append((f"{prefix}{key}", value))
    return entries
