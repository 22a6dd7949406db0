"""Behaviour cloning from LeRobot sets and mixtures: it learns, and a resumed run is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from rlinf.cli.main import main
from rlinf.data.episode_evaluation import EvaluationResult
from rlinf.data.lerobot.writer import write_lerobot

from .supervised_support import (
    assert_equal_runs,
    demonstrations,
    metrics,
    run_recipe,
    write_cloning,
)

pytest.importorskip("pyarrow")


def write_mixture(directory: Path) -> Path:
    """The small recipe, on a LeRobot set and one of ours."""
    write_lerobot(demonstrations(), directory / "lerobot", fps=20)
    recipe = write_cloning(directory)
    sets = f"sets: [{{path: {directory}/lerobot, weight: 3.0}}, {{path: {directory}/episodes}}]"
    text = recipe.read_text()
    recipe.write_text(text.replace(f"path: {directory}/episodes", sets))
    return recipe


def test_a_policy_learns_from_a_mixture(tmp_path: Path) -> None:
    run = run_recipe(write_mixture(tmp_path), tmp_path / "run", "runner.total_steps=20")
    lines = metrics(run.directory.path)
    validated = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert validated[-1] < validated[0]


def test_a_resumed_mixture_is_the_same_to_the_bit(tmp_path: Path) -> None:
    recipe = write_mixture(tmp_path)
    run_recipe(recipe, tmp_path / "whole")
    run_recipe(recipe, tmp_path / "half", "runner.total_steps=3")
    shutil.copytree(tmp_path / "half", tmp_path / "resumed")
    words = ["resume", str(tmp_path / "resumed"), "runner.total_steps=6"]
    assert main(words) == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "resumed")


def test_what_a_set_lacks_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_mixture(tmp_path)
    words = ["train", str(recipe), "--run-dir"]
    assert main([*words, str(tmp_path / "a"), "env.train.options.id=MountainCarContinuous-v0"]) == 2
    assert "data.sets.0.observations.states: `states` is [3]" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "b"), "data.sets.1.limit=2"]) == 2
    assert "2 of 2 episodes cannot be held out" in capsys.readouterr().err


PICTURES = ["env.train.options.image_size=32", "env.train.max_episode_steps=20"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LeRobot set of an expert, with videos of 32 x 32."""
    pytest.importorskip("metaworld")
    pytest.importorskip("av")
    out = tmp_path_factory.mktemp("sets") / "videos"
    record = ["record", "embodied/drawer_close_pictures_ppo", "env.train.options.states=true"]
    words = [*PICTURES, "--episodes", "3", "--num-envs", "3", "--format", "lerobot"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUJOCO_GL", "egl")
        assert main([*record, *words, "--out", str(out)]) == 0
    return out


SMALL = {
    "sft/window_open_pictures": [
        "model.kernel_sizes=[4,3,3]", "env.train.options.task=drawer-close-v3",
        "actor.global_batch_size=16", "runner.total_steps=20",
    ],
    "vla/drawer_close_pi05_sft": [
        "env.train.options.states=true", "actor.global_batch_size=4", "runner.total_steps=4",
        "actor.micro_batch_size=4", "actor.optim.lr=1.0e-3",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_policies_learn_from_recorded_videos(
    recipe: str, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the recording to the evaluation."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    data = [f"data.path={videos}", "data.only_successful=false", "data.held_out=1"]
    evaluation = ["num_envs=2", "episodes=2", "video_episodes=0"]
    options = [*data, *PICTURES, *(f"evaluation.{each}" for each in evaluation), *SMALL[recipe]]
    assert main(["train", recipe, *options, "--run-dir", str(tmp_path / "run")]) == 0
    losses = [line["train/loss"] for line in metrics(tmp_path / "run")]
    assert np.isfinite(losses).all()
    if recipe.startswith("sft"):
        assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert (tmp_path / "run" / "policy.safetensors").exists()


@pytest.mark.slow
def test_pictures_alone_open_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe as documented, with fewer episodes and steps."""
    pytest.importorskip("metaworld")
    pytest.importorskip("av")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    record = ["record", "embodied/window_open_pictures_ppo"]
    words = ["--episodes", "20", "--noise", "0.3"]
    out, run = tmp_path / "set", tmp_path / "run"
    assert main([*record, *words, "--format", "lerobot", "--out", str(out)]) == 0
    options = [f"data.path={out}", "evaluation.episodes=20", "runner.total_steps=400"]
    assert main(["train", "sft/window_open_pictures", *options, "--run-dir", str(run)]) == 0
    lines = metrics(run)
    losses = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert min(losses) < 0.5 * lines[0]["train/loss"]  # of fresh weights; the first is of step 100
    (held_out,) = (run / "evaluations").glob("held_out_step_*.json")
    assert EvaluationResult.load(held_out).success_rate > 0.3
