"""MLflow; without a tracking server the run lies in ``mlflow/mlflow.db`` of the run directory."""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlinf.monitor.loggers.base import Ending, LoggerContext, MetricLogger, remembered_id

_MAX_PARAMETER = 500
_MAX_NAME = 240
"""MLflow takes 250; the rest is for what tells names apart."""
_REFUSED = re.compile(r"[^/\w.\- :]")
_STATES: Mapping[Ending, str] = {
    "finished": "FINISHED",
    "interrupted": "KILLED",
    "failed": "FAILED",
}
_CLOSING_SECONDS = 30.0
"""Which the end of a run waits for the server."""
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
"""Each waits twice as long as the one before; with MLflow's own 7 a server that is not there holds
up the beginning and the end of a run for four minutes each."""


class MlflowLogger(MetricLogger):
    """One MLflow run, in the server of ``MLFLOW_TRACKING_URI`` or in a SQLite file.

    MLflow no longer accepts plain directories as a store. ``logger.mode=offline`` uses the file
    even where a server is named. What it refuses in names, as ``@`` of ``eval/pass@1``, is ``_``.
    """

    title = "MLflow"
    packages = ("mlflow", "sqlalchemy", "alembic")
    extra = "mlflow"
    remedy = "to start the server that MLFLOW_TRACKING_URI names"

    def __init__(self, context: LoggerContext) -> None:
        from mlflow import MlflowClient

        os.environ.setdefault(_RETRIES, "4")
        directory = context.run_dir / "mlflow"
        directory.mkdir(parents=True, exist_ok=True)
        store = f"sqlite:///{(directory / 'mlflow.db').resolve()}"
        server = os.environ.get("MLFLOW_TRACKING_URI") if context.mode == "online" else None
        self._client = MlflowClient(tracking_uri=server or store)
        known = directory / "run_id"
        self._run_id = known.read_text() if known.is_file() else self._create(context)
        remembered_id(known, self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._pending: deque[Future[Any]] = deque()
        self._names: dict[str, str] = {}
        """What names of metrics are in MLflow."""

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
            client.log_param(run.info.run_id, _accepted(name), str(value)[:_MAX_PARAMETER])
        run_id: str = run.info.run_id
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Log one step, without waiting for the store; what it refused before is raised."""
        from mlflow.entities import Metric

        self._check_sent()
        milliseconds = int(unix_time * 1000)
        entries = [
            Metric(self._name(name), value, milliseconds, step) for name, value in metrics.items()
        ]
        send = self._client.log_batch
        self._pending.append(
            self._sender.submit(send, self._run_id, metrics=entries, synchronous=True)
        )

    def _check_sent(self) -> None:
        """Raise what became of a batch that has been sent; MLflow refuses all of it for one name.
        The logger is dropped then, so that what waits need not be sent."""
        while self._pending and self._pending[0].done():
            sent = self._pending.popleft()
            if sent.exception() is not None:
                self._sender.shutdown(wait=False, cancel_futures=True)
            sent.result()

    def _name(self, name: str) -> str:
        """What a metric is called in MLflow, no two alike."""
        if name not in self._names:
            found = _accepted(name)
            if found in self._names.values():
                found = f"{found}_{zlib.crc32(name.encode()):08x}"
            self._names[name] = found
        return self._names[name]

    def close(self) -> None:
        """Mark the run as ended.

        Raises:
            TimeoutError: The server does not take what is left.
            Exception: What it refused.
        """
        failed: list[BaseException] = []
        sending = threading.Thread(target=self._end, args=(failed,), daemon=True)
        sending.start()
        sending.join(_CLOSING_SECONDS)
        if sending.is_alive():
            os.environ[_RETRIES] = "0"  # of what is sent before the process ends
            self._sender.shutdown(wait=False, cancel_futures=True)
            raise TimeoutError(f"the server has not answered for {_CLOSING_SECONDS:g} s")
        if failed:
            raise failed[0]

    def _end(self, failed: list[BaseException]) -> None:
        try:
            self._sender.shutdown()
            self._client.set_terminated(self._run_id, status=_STATES[self.ending])
            self._check_sent()
        except Exception as error:  # noqa: BLE001 - it is raised by who waits
            failed.append(error)


def _accepted(name: str) -> str:
    """A name as MLflow takes it, which also refuses what would be another path."""
    parts = _REFUSED.sub("_", name)[:_MAX_NAME].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            entries.extend(_flat(value, f"{prefix}{key}."))
        else:
            entries.append((f"{prefix}{key}", value))
    return entries
