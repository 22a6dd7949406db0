"""The numbers arrive in the file and in the loggers, and a resumed run continues them exactly."""

import json
import logging
import math
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import wait
from contextlib import suppress
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from rlinf.errors import CheckpointError, ConfigError, MissingPackageError, RunFailure
from rlinf.monitor.loggers.base import (
    LOGGERS,
    REGISTRY,
    LoggerConfig,
    LoggerContext,
    MetricLogger,
)
from rlinf.monitor.loggers.mlflow import MlflowLogger
from rlinf.monitor.metrics_log import JsonlLogger, MetricsLog, read_metrics

FILE_ONLY = LoggerConfig(backends=())


def scalars(run_dir, name):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_file_and_tensorboard_hold_every_step(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"env/return": 0.1 * step, "env/steps": 100 * step})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2]["env/return"] == 0.1 * 3
    assert [step for step, _ in scalars(tmp_path, "env/return")] == [1, 2, 3]


def test_a_line_is_on_disk_when_the_step_ends_and_odd_numbers_survive(tmp_path):
    metrics = MetricsLog(tmp_path, FILE_ONLY)
    metrics.log(1, {"nan": math.nan, "inf": -math.inf, "tiny": 5e-324})
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["nan"])
    assert line["inf"] == -math.inf
    assert line["tiny"] == 5e-324
    metrics.close()


@pytest.mark.parametrize("value", [np.ones(2), torch.ones(2), None, "many", [1.0]], ids=type)
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    with MetricsLog(tmp_path) as log:
        log.log(1, {"train/loss": np.float32(0.5), "train/rate": torch.ones(1)})
        with pytest.raises(RunFailure, match=r"the metric `train/each` is no number, but a "):
            log.log(2, {"train/loss": 0.5, "train/each": value})


@pytest.mark.parametrize("files", [0, 9])
def test_resume_continues_as_if_never_stopped(tmp_path, monkeypatch, files):
    """However many files the process has begun: TensorBoard reads them in the order of names."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    monkeypatch.setattr(event_file_writer, "_global_uid", AtomicCounter(files - 1))
    with MetricsLog(straight) as metrics:
        for step in range(1, 7):
            metrics.log(step, {"value": step / 3})
    metrics = MetricsLog(broken)
    for step in range(1, 6):
        metrics.log(step, {"value": step / 3 if step < 4 else -1})
        if step == 3:
            cursor = json.loads(json.dumps(metrics.cursor()))
    with open(broken / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "val')
    metrics.close()
    with MetricsLog(broken) as metrics:
        assert metrics.cursor()["lines"] == 5
        metrics.truncate(cursor)
        assert metrics.cursor() == cursor
        for step in range(4, 7):
            metrics.log(step, {"value": step / 3})

    def values(run_dir):
        lines = read_metrics(run_dir / "metrics.jsonl")
        return [(line["step"], line["value"]) for line in lines]

    assert values(broken) == values(straight)
    assert scalars(broken, "value") == scalars(straight, "value")


def test_resume_from_the_beginning_and_after_lost_lines(tmp_path, caplog):
    with MetricsLog(tmp_path, FILE_ONLY) as metrics:
        start = metrics.cursor()
        metrics.log(1, {"a": 1})
        end = metrics.cursor()
        metrics.truncate(None)
        assert metrics.cursor() == start == {"bytes": 0, "lines": 0}
        metrics.truncate(end)
        assert "lost" in caplog.text
        metrics.log(2, {"a": 2})
        assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2]
        with pytest.raises(CheckpointError, match="cursor"):
            metrics.truncate({"offset": 3})


def test_a_line_that_a_loss_of_power_spoilt_is_passed_over(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, FILE_ONLY) as metrics:
        metrics.log(1, {"a": 1})
        path.write_bytes(path.read_bytes() + bytes(20) + b"\n3\n")
    with MetricsLog(tmp_path, FILE_ONLY) as metrics:
        metrics.truncate(metrics.cursor())
        metrics.log(2, {"a": 2})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert "Line 2 of" in caplog.text
    assert "Line 3 of" in caplog.text


ON_A_FULL_DISK = """
    import resource, sys
    from rlinf.monitor.loggers.base import LoggerConfig
    from rlinf.monitor.metrics_log import MetricsLog
    from rlinf.monitor.timeline import Timeline, TimelineFile

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    timeline = TimelineFile(sys.argv[1] + "/timeline.json")
    with MetricsLog(sys.argv[1], LoggerConfig(backends=())) as metrics:
        limit(100)
        for step in range(1, 7):
            if step == 5:
                limit(resource.RLIM_INFINITY)
            metrics.log(step, {"value": step / 3})
            for _ in range(9):
                recorder = Timeline()
                with recorder.span("x"):
                    pass
                timeline.write(recorder.drain())
            print(metrics.cursor()["lines"], metrics.cursor()["bytes"])
    timeline.close()
"""


def test_a_full_disk_costs_no_line_and_does_not_stop_the_run(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(ON_A_FULL_DISK), str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("The disk is full") == 1
    assert ran.stderr.count("timeline.json is not continued") == 1
    path = tmp_path / "metrics.jsonl"
    assert [line["value"] for line in read_metrics(path)] == [step / 3 for step in range(1, 7)]
    ends = [sum(map(len, path.read_bytes().splitlines(keepends=True)[: i + 1])) for i in range(6)]
    assert ran.stdout == "".join(f"{i + 1} {end}\n" for i, end in enumerate(ends))


def test_a_file_that_can_no_longer_be_written_is_named(tmp_path):
    log = JsonlLogger(LoggerContext(tmp_path))
    with log.path.open("rb") as read_only:
        os.dup2(read_only.fileno(), log._file.fileno())
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        log.log(1, {"a": 1.0}, 0.0)


class Flaky(MetricLogger):
    title = "Flaky"

    def __init__(self, context):
        self.context = context

    def log(self, step, metrics, unix_time):
        if step == 2:
            raise ConnectionError("server gone")

    def rewind(self, step): ...

    def close(self): ...


class Refusing(Flaky):
    title = "Refusing"
    remedy = "to log in"

    def __init__(self, context):
        raise RuntimeError("\nno such user\nand so on")


class Ending(Flaky):
    title = "Ending"
    seen: ClassVar = []

    def close(self):
        self.seen.append(self.ending)


class Absent(Flaky):
    title = "Absent"
    packages = ("json", "no_such_package_at_all")
    extra = "absent"


def add_outside_logger(monkeypatch, name):
    entry = EntryPoint(name.lower(), f"{__name__}:{name}", REGISTRY.group)
    monkeypatch.setattr("rlinf.config.registry._entry_points", lambda *_: [entry])


def test_a_failing_logger_of_another_package_is_dropped_with_one_warning(
    tmp_path, monkeypatch, caplog
):
    add_outside_logger(monkeypatch, "Flaky")
    with MetricsLog(tmp_path, LoggerConfig(backends=("flaky", "jsonl"))) as metrics:
        assert metrics.active == ["flaky"]
        for step in (1, 2, 3):
            metrics.log(step, {"a": step})
        assert metrics.active == []
    assert [line["a"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [record.message for record in caplog.records if "dropped" in record.message] == [
        "The logger Flaky failed and is dropped (ConnectionError: server gone). "
        f"The numbers are in {tmp_path / 'metrics.jsonl'}."
    ]


@pytest.mark.parametrize(
    ("mode", "instead"), [("online", "logger.mode=offline"), ("offline", "no refusing")]
)
def test_a_service_that_refuses_a_run_is_a_mistake_of_the_user(
    tmp_path, monkeypatch, mode, instead
):
    add_outside_logger(monkeypatch, "Refusing")
    config = LoggerConfig(backends=("refusing",), mode=mode)
    told = f"Refusing refused the run: no such user; nearest: to log in, or {instead}$"
    with pytest.raises(ConfigError, match=told):
        MetricsLog(tmp_path, config)
    monkeypatch.setattr(Refusing, "remedy", "")
    with pytest.raises(RuntimeError):
        MetricsLog(tmp_path, config)


@pytest.mark.parametrize(
    ("raised", "ending"),
    [(None, "finished"), (KeyboardInterrupt, "interrupted"), (RunFailure, "failed")],
)
def test_loggers_are_told_how_a_run_ended(tmp_path, monkeypatch, raised, ending):
    add_outside_logger(monkeypatch, "Ending")
    monkeypatch.setattr(Ending, "seen", [])
    metrics = MetricsLog(tmp_path, LoggerConfig(backends=("ending",)))
    with suppress(KeyboardInterrupt, RunFailure), metrics:
        if raised is not None:
            raise raised
    assert Ending.seen == [ending]


def test_a_missing_package_is_named_before_the_run_starts(tmp_path, monkeypatch):
    add_outside_logger(monkeypatch, "Absent")
    with pytest.raises(MissingPackageError, match=r"no_such_package_at_all.*\[absent\]"):
        MetricsLog(tmp_path, LoggerConfig(backends=("absent",)))


def test_unknown_loggers_are_refused():
    with pytest.raises(ValidationError, match=r"unknown logger `tensorbord`.*tensorboard"):
        LoggerConfig(backends=("tensorbord",))
    with pytest.raises(ConfigError, match="unknown logger"):
        REGISTRY.load("nothing")


@pytest.mark.parametrize("name", list(LOGGERS))
def test_every_adapter_imports_without_its_package(name):
    assert issubclass(REGISTRY.load(name), MetricLogger)


def log_twice(run_dir, name):
    """Log with a real service in its offline form, stop, and go on from step 2."""
    config = LoggerConfig(backends=(name,), mode="offline", project="tests")
    with MetricsLog(run_dir, config, run_config={"model": {"type": "mlp"}}) as metrics:
        metrics.log(1, {"env/return": 0.5, "eval/pass@1": 0.25})
        metrics.log(2, {"env/return": 1.5})
        cursor = metrics.cursor()
        metrics.log(3, {"env/return": -1})
        assert metrics.active == [name]
    with MetricsLog(run_dir, config) as metrics:
        metrics.truncate(cursor)
        metrics.log(3, {"env/return": 2.5})
        assert metrics.active == [name]


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    log_twice(tmp_path, "wandb")
    run_id = (tmp_path / "wandb" / "run_id").read_text()
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert files
    assert b"env/return" in b"".join(file.read_bytes() for file in files)


def test_swanlab_offline(tmp_path):
    pytest.importorskip("swanlab")
    log_twice(tmp_path, "swanlab")
    files = list((tmp_path / "swanlab").glob("run-*/*.swanlab"))
    assert b"env/return" in b"".join(file.read_bytes() for file in files)


@pytest.mark.slow
def test_mlflow_in_a_file(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    log_twice(tmp_path, "mlflow")
    assert not list(elsewhere.iterdir())
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        rows = database.execute(
            "select step, value from metrics where key = 'env/return' order by step, timestamp"
        )
        assert rows.fetchall() == [(1, 0.5), (2, 1.5), (3, -1), (3, 2.5)]
        others = database.execute("select key, value from metrics where key != 'env/return'")
        assert others.fetchall() == [("eval/pass_1", 0.25)]
        assert database.execute("select key, value from params").fetchall() == [
            ("model.type", "mlp")
        ]
        # Building its tables must not have silenced our own logging.
        assert not logging.getLogger("rlinf.monitor.metrics_log").disabled
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]


class MlflowClient:
    """Takes what MLflow takes, and refuses all of a batch over one name."""

    def __init__(self, tracking_uri):
        self.batches, self.ended, self.refuses = [], [], False

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="0")

    def create_run(self, experiment_id, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id="a run"))

    def update_run(self, run_id, status): ...

    def set_terminated(self, run_id, status):
        self.ended.append(status)

    def log_batch(self, run_id, *, metrics, synchronous):
        if self.refuses or any(re.search(r"[^/\w.\- :]", name) for name, *_ in metrics):
            raise ValueError("a name is refused")
        self.batches.append({name: value for name, value, *_ in metrics})


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=MlflowClient))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return MlflowLogger(LoggerContext(tmp_path))


def test_mlflow_is_given_names_that_it_takes_and_that_stay_apart(mlflow):
    step = {"eval/pass@1": 1.0, "env/success/put (a)": 2.0, "env/success/put 'a'": 3.0, "a//b": 4.0}
    mlflow.log(1, step, 0.0)
    mlflow.log(2, {"env/success/put 'a'": 5.0}, 0.0)
    mlflow.close()
    first, second = mlflow._client.batches
    assert list(first.values()) == [1.0, 2.0, 3.0, 4.0]
    other = list(first)[2]
    assert list(first) == ["eval/pass_1", "env/success/put _a_", other, "a/_/b"]
    assert re.fullmatch(r"env/success/put _a__[0-9a-f]{8}", other)
    assert second == {other: 5.0}
    assert mlflow._client.ended == ["FINISHED"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_mlflow_refuses_is_told_by_the_next_or_in_the_end(mlflow, ends):
    mlflow._client.refuses = True
    mlflow.log(1, {"actor/loss": 1.0}, 0.0)
    wait(mlflow._pending)
    mlflow._client.refuses = False
    with pytest.raises(ValueError, match="a name is refused"):
        mlflow.close() if ends else mlflow.log(2, {"actor/loss": 1.0}, 0.0)
    assert mlflow._client.ended == ["FINISHED"] * ends


@pytest.mark.slow
def test_mlflow_without_its_server(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        MetricsLog(tmp_path, LoggerConfig(backends=("mlflow",)))
