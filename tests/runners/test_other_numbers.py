"""Environments in which the numbers of a policy mean something else, though its weights fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rlinf.checkpoint.weights_file import ENVIRONMENT, read_header
from rlinf.cli.main import main

RECIPE = """
base: embodied/pendulum_ppo
runner: {total_env_steps: 128}
env:
  num_envs: 4
  train:
    options: {id: "tests.runners.odd_envs:Narrow-v0"}
    max_episode_steps: 8
    processes: 1
without: [env.train.options.success_return]
rollout: {steps: 16}
actor: {global_batch_size: 64, micro_batch_size: 64}
evaluation: {episodes: 4, num_envs: 4, interval: 2, periodic_episodes: 4, video_episodes: 0}
checkpoint: {interval: 1}
"""
WIDE = "env.train.options.kwargs={bound: 1.0}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained with actions of ±0.05."""
    root = tmp_path_factory.mktemp("numbers")
    (root / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(["train", str(root / "mine.yaml"), "--run-dir", str(root / "run")]) == 0
    return root / "run"


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command says that refuses."""
    capsys.readouterr()
    assert main([*words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_run_is_not_evaluated_with_actions_of_other_limits(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        "env.train: action dimension 0 goes from -1 to 1 in the environment, from -0.05 to 0.05 "
        "where the policy was trained: its actions would be others"
    ) in refusal(capsys, "eval", str(run), WIDE)
    assert main(["eval", str(run)]) == 0


def test_a_run_is_not_evaluated_on_states_in_another_order(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "env.train.options.kwargs={called: tip}"
    told = "as place [2], speed [1], and are speed [1], tip [2] in the environment"
    learnt = "env.train: the parts of states were learnt by the policy"
    assert f"{learnt} {told}" in refusal(capsys, "eval", str(run), name)
    words = ["train", str(run.parent / "mine.yaml"), name, "--run-dir", str(tmp_path / "run")]
    begun = f"model.path={run / 'policy.safetensors'}"
    assert f"policy.safetensors {told}" in refusal(capsys, *words, begun)
    renamed = "env.train.options.kwargs={called: point}"  # and in its place all the same
    assert main(["eval", str(run), renamed]) == 0


def test_a_run_is_not_resumed_with_actions_of_other_limits(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "env_spec.json"
    written = file.read_text(encoding="utf-8")
    # As if the environment of the same id had taken others before.
    file.write_text(json.dumps({**json.loads(written), "action_high": [2.0, 1.0]}))
    more = "runner.total_env_steps=192"
    told = refusal(capsys, "resume", str(run), more)
    assert "from -0.05 to 0.05 in the environment, from -0.05 to 2 where" in told
    file.write_text(written, encoding="utf-8")
    assert main(["resume", str(run), more]) == 0


def test_weights_of_other_limits_are_not_begun_with_unless_the_units_are_said_to_be_the_same(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "policy.safetensors"
    assert json.loads(read_header(weights)[ENVIRONMENT])["action_high"][1] == 1.0
    words = ["train", str(run.parent / "mine.yaml"), WIDE, f"model.path={weights}"]
    told = refusal(capsys, *words, "--run-dir", str(tmp_path / "refused"))
    assert "model.path: action dimension 0 goes from -1 to 1 in the environment" in told
    assert "policy.safetensors was trained: " in told
    # Files of before say nothing, and the run that left them does.
    save_file(load_file(weights), tmp_path / "policy.safetensors")
    shutil.copy(run / "env_spec.json", tmp_path)
    words[-1] = f"model.path={tmp_path / 'policy.safetensors'}"
    assert "from -1 to 1" in refusal(capsys, *words, "--run-dir", str(tmp_path / "refused"))
    same = ["model.any_action_limits=true", "--run-dir", str(tmp_path / "run")]
    assert main([*words, *same]) == 0
