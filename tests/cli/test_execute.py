"""What surrounds a runner: interruption, log, exit code, keys that a resumed run may change."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import typer

from rlinf.cli.failure import reporting
from rlinf.cli.run_paths import find_run, find_run_or_checkpoint
from rlinf.cli.tasks import read_config
from rlinf.cli.train import execute
from rlinf.config.explain import explain
from rlinf.errors import ConfigError
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.run_origin import Origin
from rlinf.runners.run import Run
from rlinf.runners.task import REGISTRY


def test_an_interrupted_run_ends_with_130_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _, config = read_config("quickstart", [])

    def train(run: Run, *, resume: bool) -> None:
        assert run.task.config is config
        assert not resume
        logging.getLogger("rlinf.test").info("step done")
        os.kill(os.getpid(), signal.SIGINT)
        assert run._stop.wait(10)

    monkeypatch.setattr(Run, "run", train)
    with (
        RunDirectory.create(tmp_path, "quickstart") as directory,
        pytest.raises(typer.Exit) as end,
    ):
        execute(task, config, directory, resume=False)
    assert end.value.exit_code == 130
    assert f"rlinf resume {directory.path}" in capsys.readouterr().out
    assert "step done" in directory.log.read_text(encoding="utf-8")
    assert reporting.log == directory.log


def test_a_run_is_found_by_its_path_by_its_name_and_by_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create("runs", "quickstart") as directory:
        directory.write_config("seed: 1\n")
    assert find_run(str(directory.path)) == directory.path
    assert find_run(f"quickstart/{directory.name}") == directory.path
    assert find_run("quickstart/latest") == directory.path
    with pytest.raises(ConfigError, match="did you mean"):
        find_run(f"quickstart/{directory.name}x")
    checkpoint = directory.checkpoints / "step_00000001"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}", encoding="utf-8")
    assert find_run_or_checkpoint(str(checkpoint)) == checkpoint


@pytest.mark.parametrize("name", REGISTRY.names())
def test_changeable_keys_exist(name: str) -> None:
    task = REGISTRY.load(name)
    for key in task.changeable:
        assert explain(task.config_class, key)


def test_a_resumed_run_may_become_longer_but_not_another() -> None:
    task, _, before = read_config("quickstart", [])
    _, _, longer = read_config("quickstart", ["runner.total_env_steps=1000000"])
    _, _, other = read_config("quickstart", ["seed=9", "algorithm.gamma=0.5"])
    origin = Origin.of(before)
    origin.refuse_other_config(longer, task.changeable, why="a resumed run")
    with pytest.raises(ConfigError, match=r"seed = 9 \(it was 0\), algorithm\.gamma = 0\.5"):
        origin.refuse_other_config(other, task.changeable, why="a resumed run")
