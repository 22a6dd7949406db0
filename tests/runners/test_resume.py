"""A run that was killed and resumed equals one that was not, to the bit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from rlinf.cli.main import main
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners import groups
from rlinf.runners.embodied import Embodied
from rlinf.runners.groups import Groups
from rlinf.runners.run import Run
from rlinf.scheduler import Cluster
from rlinf.scheduler.cpu_slots import OVERSUBSCRIBE_VARIABLE
from rlinf.scheduler.runtime import local
from rlinf.workers.env import EnvWorker

from . import reasoning_support, supervised_support, support
from .killing import Task, ended, finish, kill_and_resume, start, wait_for_lines
from .reasoning_support import CALLING
from .support import metrics, write_recipe
from .test_equality import needs_two_cores

APART = "{env: '0', 'rollout,actor': '1'}"
KEPT = ["checkpoint.keep_last=3", "checkpoint.keep_best=0"]


def overrides(runtime: str, steps: int) -> list[str]:
    return [f"cluster.runtime={runtime}", f"runner.total_env_steps={steps * 128}", *KEPT]


def reasoning_overrides(runtime: str, steps: int) -> list[str]:
    return [f"cluster.runtime={runtime}", f"runner.total_steps={steps}", *KEPT]


EMBODIED = Task(
    write_recipe=support.write_recipe,
    overrides=overrides,
    workers=("EnvW", "RolloutW", "ActorW"),
    pause=0.15,
    compare=support.assert_equal_runs,
)
DIVIDED = replace(
    EMBODIED,
    overrides=lambda runtime, steps: [
        *overrides(runtime, steps),
        "actor.type=fsdp",
        "rollout.block_size=4",
        "cluster.cpu_devices_per_node=2",
        "cluster.component_placement={env: '0', rollout: '1', actor: '0-1'}",
    ],
    pause=0.3,
)
AGENT = Task(
    write_recipe=reasoning_support.write_recipe,
    overrides=lambda runtime, steps: [*reasoning_overrides(runtime, steps), *CALLING],
    workers=("GenerationW", "RewardW", "LanguageActorW"),
    pause=0.5,
    compare=reasoning_support.assert_equal_runs,
)
REASONING = Task(
    write_recipe=reasoning_support.write_recipe,
    overrides=reasoning_overrides,
    workers=("GenerationW", "RewardW", "LanguageActorW"),
    pause=0.5,
    compare=reasoning_support.assert_equal_runs,
)


FINE_TUNING = Task(
    write_recipe=supervised_support.write_fine_tuning,
    overrides=reasoning_overrides,
    workers=("SourceW", "FineTuningW"),
    pause=0.1,
    compare=supervised_support.assert_equal_runs,
)
CLONING = Task(
    write_recipe=supervised_support.write_cloning,
    overrides=reasoning_overrides,
    workers=("SourceW", "CloningW"),
    pause=0.02,
    compare=supervised_support.assert_equal_runs,
)


def test_killed_driver_local(tmp_path: Path) -> None:
    kill_and_resume(EMBODIED, tmp_path, "local", kills=1, steps=6, victim="driver")


@pytest.mark.parametrize("task", [EMBODIED, CLONING], ids=["embodied", "behaviour_cloning"])
def test_killed_driver_of_a_run_that_trains_an_adapter(tmp_path: Path, task: Task) -> None:
    def overrides(runtime: str, steps: int) -> list[str]:
        return [*task.overrides(runtime, steps), "actor.lora.rank=2"]

    adapted = replace(task, overrides=overrides)
    kill_and_resume(adapted, tmp_path, "local", kills=1, steps=6, victim="driver")


def test_killed_driver_of_a_reasoning_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kill_and_resume(REASONING, tmp_path, "local", kills=1, steps=4, victim="driver")


@pytest.mark.parametrize("task", [FINE_TUNING, CLONING], ids=["sft", "behaviour_cloning"])
def test_killed_driver_of_a_supervised_run(tmp_path: Path, task: Task) -> None:
    pytest.importorskip("transformers")
    kill_and_resume(task, tmp_path, "local", kills=1, steps=12, victim="driver")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver", "worker"])
@pytest.mark.parametrize("task", [FINE_TUNING, CLONING], ids=["sft", "behaviour_cloning"])
def test_killed_supervised_run_on_ray(tmp_path: Path, task: Task, victim: str) -> None:
    pytest.importorskip("transformers")
    kill_and_resume(task, tmp_path, "ray", kills=2, steps=24, victim=victim)


@pytest.mark.slow
def test_killed_driver_of_a_robot_run_whose_parameters_are_divided(tmp_path: Path) -> None:
    kill_and_resume(DIVIDED, tmp_path, "ray", kills=2, steps=12, victim="driver")


@pytest.mark.slow
def test_killed_driver_of_a_run_that_calls_tools(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kill_and_resume(AGENT, tmp_path, "local", kills=3, steps=8, victim="driver")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("runtime", "victim"), [("local", "driver"), ("ray", "driver"), ("ray", "worker")]
)
@pytest.mark.parametrize("task", [EMBODIED, REASONING], ids=["embodied", "reasoning"])
def test_killed_at_twenty_moments(tmp_path: Path, task: Task, runtime: str, victim: str) -> None:
    kill_and_resume(task, tmp_path, runtime, kills=20, steps=56, victim=victim)


@pytest.mark.parametrize(
    ("runtime", "number"),
    [
        ("local", signal.SIGINT),
        pytest.param("ray", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_the_first_interrupt_commits_and_ends_cleanly(
    tmp_path: Path, runtime: str, number: signal.Signals
) -> None:
    recipe = str(write_recipe(tmp_path))
    options = overrides(runtime, 400)
    run = tmp_path / "run"
    process = start("train", recipe, *options, "--run-dir", str(run))
    with ended(process):
        assert wait_for_lines(process, run, 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output.decode()
        assert b"rlinf resume" in output
    assert newest(run) == f"step_{len(metrics(run)):08d}"


def test_who_asks_for_the_end_waits_for_no_workers_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, whole, run = str(write_recipe(tmp_path)), tmp_path / "whole", tmp_path / "run"
    finish("train", recipe, "--run-dir", str(whole))
    released, begin = threading.Event(), EnvWorker.start

    def interrupted(worker: EnvWorker) -> EnvSpec:
        os.kill(os.getpid(), signal.SIGINT)
        assert released.wait(60)
        return begin(worker)

    monkeypatch.setattr(EnvWorker, "start", interrupted)
    monkeypatch.setattr(groups, "_PATIENCE_SECONDS", 0.1)  # it ends for nobody
    monkeypatch.setattr(local, "_JOIN_SECONDS", 0.1)
    try:
        assert main(["train", recipe, "--run-dir", str(run)]) == 130
    finally:
        released.set()
    assert f"interrupted; continue with: rlinf resume {run}" in capsys.readouterr().out
    assert not list((run / "checkpoints").iterdir())
    monkeypatch.setattr(EnvWorker, "start", begin)
    finish("resume", str(run))
    support.assert_equal_runs(whole, run)


def test_a_mistake_that_the_first_rollout_shows_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the directory is taken, and the corrected recipe can neither begin nor go on there."""
    recipe, run = str(write_recipe(tmp_path)), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(EnvWorker, "interact", Mock(side_effect=ConfigError("no such key")))
        assert main(["train", recipe, "--run-dir", str(run)]) == 2
    assert "left nothing behind" in capsys.readouterr().out
    assert not run.exists()


@needs_two_cores
def test_a_run_goes_on_and_is_evaluated_where_it_is_placed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, whole, run = str(write_recipe(tmp_path)), tmp_path / "whole", tmp_path / "run"
    ends, apart = "runner.total_env_steps=512", f"cluster.component_placement={APART}"
    finish("train", recipe, "rollout.block_size=4", "--run-dir", str(whole))
    two = ("cluster.cpu_devices_per_node=2", "rollout.block_size=4")
    finish("train", recipe, *two, apart, ends, "--run-dir", str(run))
    monkeypatch.delenv(OVERSUBSCRIBE_VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    kept = {name: (run / name).read_bytes() for name in ("config.yaml", "origin.json", "plan.yaml")}
    elsewhere = ["cluster.runtime=ray", "cluster.num_nodes=3", "cluster.cpu_devices_per_node=1"]
    for words in (["resume", str(run)], ["eval", str(run)], ["resume", str(run), *elsewhere]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert ("cpu_devices_per_node is 2" in told) == (len(words) == 2)
        assert "Error" not in told
        assert kept == {name: (run / name).read_bytes() for name in kept}
    here = ["cluster.cpu_devices_per_node=1", "cluster.component_placement={}"]
    finish("resume", str(run), "runner.total_env_steps=1024", *here)
    support.assert_equal_runs(whole, run)
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    monkeypatch.undo()
    assert main(["eval", str(run), "--episodes", "2", two[0], apart]) == 0
    assert capsys.readouterr().out.count("run step 8: success rate") == 2


def test_a_run_that_is_to_end_while_workers_are_launched_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stop, launch = support.small_config(tmp_path), threading.Event(), Groups._launch
    launched, started = [], []
    monkeypatch.setattr(EnvWorker, "start", started.append)

    def asked_meanwhile(groups: Groups) -> None:
        launched.append(groups)
        launch(groups)
        stop.set()

    monkeypatch.setattr(Groups, "_launch", asked_meanwhile)
    with RunDirectory.create(tmp_path, "small", path=tmp_path / "run") as directory:
        run = Run(Embodied, config, directory, stop)
        for _ in range(2):  # the second time it was asked for before
            with pytest.raises(KeyboardInterrupt):
                run.run()
    assert len(launched) == 1
    assert not started
    assert not Cluster.has_initialized()


def newest(run: Path) -> str:
    return (run / "checkpoints" / "latest").resolve().name


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_signal_to_the_whole_group_is_no_loss(
    tmp_path: Path, runtime: str, number: signal.Signals
) -> None:
    """So does a terminal that hangs up, and `timeout` when the time of a program is over."""
    recipe, run = str(write_recipe(tmp_path)), tmp_path / "run"
    process = start("train", recipe, *overrides(runtime, 4000), "--run-dir", str(run))
    with ended(process):
        assert wait_for_lines(process, run, 2)
        os.killpg(os.getpgid(process.pid), number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    assert newest(run) == f"step_{len(metrics(run)):08d}"


@pytest.mark.slow
def test_a_run_whose_ray_is_lost_commits_before_ray_ends_it(tmp_path: Path) -> None:
    recipe, run = str(write_recipe(tmp_path)), tmp_path / "run"
    process = start("train", recipe, *overrides("ray", 4000), "--run-dir", str(run))
    with ended(process):
        assert wait_for_lines(process, run, 2)
        children = psutil.Process(process.pid).children()
        (control,) = (each for each in children if "gcs_server" in each.name())
        control.kill()
        output, _ = process.communicate(timeout=40)
    assert process.returncode == 130, output.decode()
    assert b"the control process of Ray" in output
    assert f"interrupted; continue with: rlinf resume {run}".encode() in output
    assert newest(run) == f"step_{len(metrics(run)):08d}"


def test_a_run_that_succeeded_often_enough_goes_on_without_that_rule(tmp_path: Path) -> None:
    recipe, run = str(write_recipe(tmp_path)), tmp_path / "run"
    rule = ["evaluation.stop_at_success=0.5", "env.train.options.success_return=-1.0e6"]
    finish("train", recipe, *rule, "runner.total_env_steps=640", "--run-dir", str(run))
    assert len(metrics(run)) == 3
    finish("resume", str(run))
    assert len(metrics(run)) == 3
    finish("resume", str(run), "evaluation.stop_at_success=null")
    assert len(metrics(run)) == 5


def test_a_run_that_goes_on_from_an_earlier_step_has_no_evaluations_of_later_ones(
    tmp_path: Path,
) -> None:
    recipe, run = str(write_recipe(tmp_path)), tmp_path / "run"

    def evaluated(kind: str) -> list[int]:
        found = (run / "evaluations").glob(f"{kind}_step_*.json")
        return sorted(int(path.stem.rpartition("_")[2]) for path in found)

    finish(
        "train",
        recipe,
        "runner.total_env_steps=384",
        "--run-dir",
        str(run),
        "evaluation.interval=1",
    )
    assert evaluated("periodic") == [1, 2, 3]
    assert evaluated("held_out") == [3]
    checkpoints, by_user = run / "checkpoints", run / "evaluations" / "spec_0_step_00000002.json"
    by_user.touch()
    shutil.rmtree(checkpoints / "step_00000003")
    finish("resume", str(run), "runner.total_env_steps=256")
    assert evaluated("periodic") == [1, 2]
    assert evaluated("held_out") == [2]
    assert by_user.exists()
    for path in checkpoints.glob("step_*"):
        shutil.rmtree(path)
    (run / "end.json").unlink()
    finish("resume", str(run), "runner.total_env_steps=128")
    assert evaluated("periodic") == evaluated("held_out") == [1]
    assert not by_user.exists()
