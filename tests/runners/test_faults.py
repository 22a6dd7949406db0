"""A simulator that dies costs its episode, not the run."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from rlinf.checkpoint.records import from_tree, to_tree
from rlinf.checkpoint.weights import export_weights
from rlinf.cli.main import main
from rlinf.envs.gymnasium_env import GymnasiumEnv
from rlinf.envs.results import EnvFault, EpisodeRecord, FaultReason
from rlinf.envs.spec import EnvSpec, spec_of
from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY, MLPConfig
from rlinf.runners.embodied import Embodied
from rlinf.runners.embodied_evaluation import EpisodeEvaluator, PlayingTask
from rlinf.runners.groups import Groups
from rlinf.workers.env import EnvWorker, EvaluationReport, RolloutReport

from . import odd_envs
from .killing import finish, train_without_a_simulator
from .support import assert_equal_runs, metrics, small_config, weights, write_recipe
from .test_resume import overrides


def test_a_killed_simulator_is_rebuilt_and_counted(tmp_path):
    run = tmp_path / "run"
    train_without_a_simulator(write_recipe(tmp_path), run, overrides("local", 12))
    lines = metrics(run)
    assert len(lines) == 12
    assert sum(line.get("env/faults/crash", 0) for line in lines) >= 1
    updates = {line["actor/optimizer_steps"] for line in lines}
    assert updates == {4.0}, "every training phase had all of its samples"


def test_a_checkpoint_is_written_for_the_time_that_has_passed(tmp_path):
    words = ["checkpoint={interval: 0, minutes: 1.0e-6, keep_last: null}", "evaluation.interval=0"]
    run = tmp_path / "run"
    finish("train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words)
    assert len({path.name for path in run.glob("checkpoints/step_*")}) == len(metrics(run))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_video_lasts_as_long_as_its_episodes(tmp_path, stages):
    words = [
        f"rollout.pipeline_stage_num={stages}",
        "env.train.options={id: 'tests.runners.odd_envs:Seen-v0', render_mode: rgb_array}",
        "runner.total_env_steps=128",
        "model.num_action_chunks=2",
        "evaluation.video_episodes=2",
    ]
    recipe = str(write_recipe(tmp_path))
    finish("train", recipe, f"runner.output_dir={tmp_path}", *words)
    (video,) = tmp_path.rglob("*.mp4")
    told, *frames = imageio_ffmpeg.read_frames(str(video))
    assert told["fps"] == 5  # a picture for each chunk
    assert len(frames) == 13  # 25 steps in chunks of two actions, two episodes side by side


def test_what_cannot_be_drawn_has_no_video_and_one_line_says_why(tmp_path, caplog):
    recipe = write_recipe(tmp_path)
    words = [
        "env.train.options={id: 'tests.runners.odd_envs:Unseen-v0'}",
        "runner.total_env_steps=128",
        "evaluation.video_episodes=1",
    ]
    finish("train", str(recipe), f"runner.output_dir={tmp_path}", *words)
    said = [record.message for record in caplog.records if "no video" in record.message]
    assert len(said) == 1
    place = f"({odd_envs.__file__} line "
    assert said[0].startswith(f"no video: no graphics card was found {place}")
    assert said[0].endswith("; `rlinf doctor` says what rendering needs.")
    assert "\n" not in said[0]
    assert not list(tmp_path.rglob("*.mp4"))


def test_the_video_of_a_specification_shows_its_episodes(tmp_path, monkeypatch):
    evaluator, played = EpisodeEvaluator(small_config(tmp_path)), []

    def play(groups, episodes, *, frames):
        played.append((list(episodes), frames))
        return EvaluationReport(frames=[[np.zeros((32, 32, 3), np.uint8)]] * frames)

    monkeypatch.setattr("rlinf.runners.embodied_evaluation.play_episodes", play)
    listed = [(number, 70 + number) for number in range(6)]
    for episodes, frames in ((listed, 3), (listed[:2], 2)):
        spec = replace(evaluator.spec("held_out"), episodes=tuple(episodes))
        assert evaluator.film(None, spec, tmp_path / "v.mp4", at_least=3) == tmp_path / "v.mp4"
        assert played.pop() == (episodes[:4], frames)  # four environments
    assert evaluator.film(None, spec, tmp_path / "none.mp4") is None


def alone(tmp_path, *words):
    """Words of a run with one environment, and those that make it one beside which none may be."""
    port = f"{{id: 'tests.runners.odd_envs:Alone-v0', kwargs: {{port: {tmp_path / 'port'}}}}}"
    sizes = ("env.num_envs=1", "evaluation.num_envs=1", "runner.total_env_steps=256",
             "rollout.steps=64", "evaluation.periodic_episodes=2", *words)  # fmt: skip
    return sizes, (f"env.train.options={port}",)


def test_one_environment_at_a_time_is_trained_as_if_others_might_be_open(tmp_path):
    words, busy = alone(tmp_path, "evaluation.interval=1")
    seen = "env.train.options={id: 'tests.runners.odd_envs:Seen-v0'}"
    runs = [tmp_path / "plain", tmp_path / "alone"]
    recipe = str(write_recipe(tmp_path))
    finish("train", recipe, "--run-dir", str(runs[0]), *words, seen)
    finish("train", recipe, "--run-dir", str(runs[1]), *words, *busy,
           "env.train.one_at_a_time=true")  # fmt: skip
    assert_equal_runs(*runs)


def test_an_evaluation_that_fails_leaves_the_policy_and_a_way_to_go_on(tmp_path, capsys):
    words, busy = alone(tmp_path, "evaluation.interval=0")
    run = tmp_path / "run"
    assert main(["train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words, *busy]) == 1
    assert "the port is busy" in capsys.readouterr().err
    trained = weights(run)
    finish("resume", str(run), "env.train.one_at_a_time=true")
    for name, value in weights(run).items():
        assert np.array_equal(value, trained[name]), name


def test_environments_are_as_few_as_may_be_open(tmp_path):
    words, busy = alone(tmp_path, "env.train.one_at_a_time=true", "env.num_envs=2")
    with pytest.raises(ConfigError, match=r"env\.num_envs = 2 .* more than one .* nearest: 1"):
        small_config(tmp_path, *words, *busy)
    words, busy = alone(tmp_path, "env.train.one_at_a_time=true", "evaluation.num_envs=2")
    with pytest.raises(ConfigError, match=r"evaluation\.num_envs = 2 .* one .* nearest: 1"):
        small_config(tmp_path, *words, *busy)


def test_failures_are_told_once_and_counted_and_so_is_a_box_out_of_reach(tmp_path, caplog, capsys):
    words = [
        "env.train.options={id: 'tests.runners.odd_envs:Breaks-v0'}",
        "env.train.max_fault_rate=1.0",
        "runner.total_env_steps=384",
        "evaluation.interval=0",
    ]
    run = tmp_path / "run"
    finish("train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words)
    warned = [record.getMessage() for record in caplog.records]
    (told,) = (line for line in warned if "is not trained on" in line)
    assert "(exception)" in told
    assert "RuntimeError: the gripper broke" in told
    (far,) = (line for line in warned if line.startswith("Action 0 goes from"))
    assert "from 100 to 200, and the policy begins with 0 ± 1:" in far
    count = int(sum(line.get("env/faults/exception", 0) for line in metrics(run)))
    assert count > 1
    said = capsys.readouterr().out
    assert f"faults of the simulator: exception {count}; " in said
    (lost,) = (line for line in warned if "failed (exception) in an evaluation" in line)
    assert "RuntimeError: the gripper broke" in lost
    assert "the simulator did not finish" in said


def test_a_process_that_is_lost_with_no_env_at_work_is_told_as_such(tmp_path, caplog):
    rewards, lost = np.zeros((1, 1)), "it ended with signal SIGKILL; the end of its output:\nbye"
    reports = []
    for env in (-1, 3):
        faults = (EnvFault(env, FaultReason.CRASH, lost, -1),)
        reports.append(EvaluationReport())
        reports[-1].add(SimpleNamespace(episodes=(), faults=faults, rewards=rewards))
        Embodied(small_config(tmp_path), tmp_path)._tell_of_faults(reports[-1:])
    what = "it ended with signal SIGKILL; it printed last: bye"
    failed = "A simulator failed (crash), "
    assert [record.getMessage() for record in caplog.records] == [
        f"{failed}with no env at work, and its process is replaced: {what}",
        f"{failed}and its episode is not trained on: env 3: {what}",
    ]


def test_steps_under_way_of_a_run_that_was_begun_earlier_are_read(tmp_path, caplog):
    good = EpisodeRecord(0, 0, 7, True, True, False, 1.0, 5, 0.2, valid=True)
    now = RolloutReport(episodes=[replace(good, valid=False), good, good])
    tree = to_tree(now)
    told = {"crash": "env -1: it ended: badly", "exception": "env 12: RuntimeError: (a.py line 3)"}
    tree["fields"]["first_faults"] = told  # as they were kept
    del tree["fields"]["ended"]
    found = from_tree(tree, EnvWorker.records)
    wanted = {"crash": (-1, "it ended: badly"), "exception": (12, "RuntimeError: (a.py line 3)")}
    assert found.first_faults == wanted
    assert found.ended == 2
    assert from_tree(to_tree(found), EnvWorker.records) == found
    Embodied(small_config(tmp_path), tmp_path)._tell_of_faults([found])
    assert "env 12: RuntimeError: (a.py line 3)" in caplog.text


def test_an_evaluation_tells_of_a_fault_whose_episodes_were_played_again(
    tmp_path, caplog, monkeypatch
):
    evaluator = EpisodeEvaluator(small_config(tmp_path))
    spec = replace(evaluator.spec("held_out"), episodes=((0, 7),))
    good = EpisodeRecord(0, 0, 7, True, True, False, 1.0, 5, 0.2, valid=True)
    for env, where in ((2, "env 2"), (-1, "no env was at work")):
        report = EvaluationReport(
            episodes=[replace(good, valid=False), good], first_faults={"crash": (env, "SIGKILL")}
        )
        path = "rlinf.runners.embodied_evaluation.play_episodes"
        monkeypatch.setattr(path, lambda groups, episodes, kept, report=report: report)
        caplog.clear()
        assert evaluator.play(None, spec, "it").success_rate == 1.0
        (told,) = (record.getMessage() for record in caplog.records)
        assert told == f"A simulator failed (crash) in an evaluation: {where}: SIGKILL"


def test_pictures_that_the_policy_does_not_read_are_told_of_once(tmp_path, caplog):
    words = ["env.train.options={id: 'tests.runners.pictures:Dot-v0'}",
             "runner.total_env_steps=128", "evaluation.interval=0"]  # fmt: skip
    finish("train", str(write_recipe(tmp_path)), "--run-dir", str(tmp_path / "run"), *words)
    told = [each.getMessage() for each in caplog.records if "not read by" in each.getMessage()]
    assert told == ["main_images: not read by mlp; nearest: cnn"]


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ({"type": "mlp"}, "main_images, depth.main: not read by mlp; nearest: cnn"),
        ({"type": "cnn"}, "depth.main: not read by cnn; nearest: model.depth_range"),
        ({"type": "cnn", "depth_range": 2.0}, None),
        ({"type": "act", "path": "."}, "depth.main: not read by act; nearest: cnn"),
    ],
)
def test_depth_that_the_policy_does_not_read_is_told_of(caplog, model, hint):
    config = REGISTRY.load(model["type"]).model_construct(**model)
    shapes = {"main_images": (8, 8, 3), "depth.main": (8, 8)}
    types = {"main_images": "uint8", "depth.main": "float32"}
    bounds = {"action_low": (-1.0,), "action_high": (1.0,)}
    spec = EnvSpec(shapes, types, "continuous", 1, **bounds, task_descriptions=(),
                   max_episode_steps=5)  # fmt: skip
    task = SimpleNamespace(config=SimpleNamespace(model=config))
    PlayingTask._warn_of_unread_pictures(task, spec)
    assert [each.getMessage() for each in caplog.records] == ([hint] if hint else [])


@pytest.mark.parametrize(
    ("interval", "start", "nearest"),
    [(50, 0, "8 and 0"), (2, 9, "2 and 8"), (3, 7, "3 and 6"), (8, 8, None), (0, 0, None)],
)
def test_evaluations_that_are_never_due_are_told_of(tmp_path, caplog, interval, start, nearest):
    words = [f"evaluation.interval={interval}", f"evaluation.start={start}"]
    Embodied(small_config(tmp_path, *(words if interval else words[:1])), tmp_path).begin(None)
    told = f"none of the 8 steps of the run is evaluated; nearest: {nearest}"
    assert (told in caplog.text) == (nearest is not None)
    assert len(caplog.records) == (nearest is not None)


def test_a_device_that_is_not_there_ends_no_run_that_had_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLINF_DEVICE", "bogus")
    words = [str(write_recipe(tmp_path)), "--run-dir", str(tmp_path / "run")]
    assert main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert "the run did not begin, and left nothing behind" in captured.out
    assert "RLINF_DEVICE is 'bogus', on which torch cannot compute here: " in captured.err


def test_what_a_simulator_raises_while_it_is_built_is_said_first(tmp_path, capsys):
    options = "options={id: 'tests.runners.odd_envs:Unmade-v0'}"
    assert main(["train", str(write_recipe(tmp_path)), f"env.train.{options}"]) == 1
    told, _ = capsys.readouterr().err.splitlines()[-2:]
    raised = "an env process failed: ImportError: libsimulator.so is missing"
    assert f"{raised} ({odd_envs.__file__} line " in told


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        (
            np.nan,
            2,
            "holds numbers that are not finite, first in actor.layers.2.weight: it was damaged",
        ),
        (
            3e38,
            1,
            "of 8 rows: what it saw and its weights are finite, so it is the model that computes",
        ),
    ],
)
def test_a_model_that_computes_no_numbers_is_named_and_not_the_simulator(
    value, code, message, tmp_path, capsys
):
    spec = spec_of(GymnasiumEnv(GymnasiumEnv.Options(id="Pendulum-v1")), 25)
    policy = MLPConfig(hidden_sizes=(16, 16)).build(spec)
    with torch.no_grad():
        policy.actor.layers[1].bias.fill_(9.0)  # the 16 hidden units are nearly 1
        policy.actor.layers[2].weight.fill_(value)
        policy.log_std.fill_(100.0)  # an infinite mean and an infinite deviation
    path = tmp_path / "policy.safetensors"
    export_weights(path, policy.state_dict(), {})
    run = ["train", str(write_recipe(tmp_path)), f"runner.output_dir={tmp_path}"]
    assert main([*run, f"model.path={path}"]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_after_an_interrupt_nobody_waits_for_what_is_at_work(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("rlinf.runners.groups._PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr("rlinf.runners.groups._INTERRUPT_SECONDS", 0.1)
    close = EnvWorker.close
    monkeypatch.setattr(EnvWorker, "close", lambda worker: (released.wait(), close(worker)))

    def begin_and_interrupt():
        with Groups(Embodied(small_config(tmp_path), tmp_path)) as groups:
            assert groups.started["env"]
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            begin_and_interrupt()
        assert not released.is_set()
    finally:
        released.set()


def test_a_run_that_is_moved_ends_and_is_not_made_again_at_its_old_place(
    tmp_path, monkeypatch, capsys
):
    run, moved = tmp_path / "run", tmp_path / "moved"
    steps = iter(range(1, 100))

    def move(task, reports):
        if next(steps) == 3:  # which is evaluated, before it is committed
            run.rename(moved)

    monkeypatch.setattr(Embodied, "rolled_out", move)
    assert main(["train", str(write_recipe(tmp_path)), "--run-dir", str(run)]) == 2
    assert "run is no longer there: a run that is moved" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not run.exists()
    assert main(["resume", str(moved)]) == 0
