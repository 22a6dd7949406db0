"""A loss or gradient that is not finite: skipped and counted, and past the bound the run ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from safetensors.numpy import load_file

from rlinf.cli.main import main

from .reasoning_support import train, untimed, weights, write_recipe

HUGE = """
def reward(sample):
    return 3.0e38 if sample.num_tokens % 2 else -3.0e38
"""


def huge_rewards(directory: Path) -> list[str]:
    """Overrides by which the differences of rewards exceed what float32 can hold."""
    file = directory / "huge.py"
    file.write_text(HUGE, encoding="utf-8")
    return [
        f"reward.functions={{huge: {{type: function, function: '{file}:reward'}}}}",
        "algorithm={type: dr_grpo, loss_agg_length: 12}",
        "runner.total_steps=2",
        "validation={val_check_interval: 0, correct_by: answer}",
    ]


def test_updates_are_skipped_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = train(tmp_path, *huge_rewards(tmp_path), "actor.max_skipped_updates=4")
    lines = [line for line in untimed(run) if "actor/skipped_updates" in line]
    assert [line["actor/skipped_updates"] for line in lines] == [2, 2]
    assert [line["actor/optimizer_steps"] for line in lines] == [0, 0]
    before = load_file(run / "initial_model" / "model.safetensors")
    for name, value in weights(run).items():
        assert np.array_equal(value, before[name]), name


def test_past_the_bound_the_run_ends_and_keeps_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [*huge_rewards(tmp_path), "actor.max_skipped_updates=1"]
    assert main(["train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words]) == 1
    message, *_ = [line for line in capsys.readouterr().err.splitlines() if "failure" in line]
    batch = run / "failures" / "actor_batch_of_step_0.safetensors"
    assert "2 updates of training phase 0 had a loss or gradient that is not finite" in message
    assert str(batch) in message
    # Neither format can hold code.
    tensors = load_file(batch)
    assert tensors["inputs.input_ids"].shape[0] == 8
    assert np.abs(tensors["rewards"]).max() > 1e38
    about = json.loads(batch.with_suffix(".json").read_text(encoding="utf-8"))
    assert about["step"] == 0
    assert about["rows"] == 8


def test_weights_that_explode_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [
        "actor.optim={lr: 1.0e30, max_grad_norm: null}",
        "actor.n_minibatches=1",
        "actor.max_skipped_updates=2",
        "validation.val_check_interval=0",
    ]
    assert main(["train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words]) == 1
    message, *_ = [line for line in capsys.readouterr().err.splitlines() if "failure" in line]
    assert "3 updates in a row, up to training phase 3, had a loss or gradient" in message
