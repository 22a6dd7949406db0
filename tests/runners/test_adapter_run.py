"""A whole reasoning run that trains an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.numpy import load_file

from .reasoning_support import train, untimed, weights

STEPS = ("runner.total_steps=3", "actor.lora={rank: 2}", "actor.optim.lr=1.0e-2")


def test_an_adapter_is_trained_sampled_with_and_written(tmp_path: Path) -> None:
    run = train(tmp_path, *STEPS)
    trained = [line for line in untimed(run) if "actor/optimizer_steps" in line]
    # The first update of each step compares the log-probs of engine and trainer, so that merged
    # weights that had not arrived would have ended the run.
    assert [line["actor/optimizer_steps"] for line in trained] == [2.0, 2.0, 2.0]
    begun = load_file(run / "initial_model" / "model.safetensors")
    changed = {name for name, value in weights(run).items() if (begun[name] != value).any()}
    adapted = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert changed
    assert all(name.split(".")[-2] in adapted for name in changed), changed
    adapter = load_file(run / "model" / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in adapter} == {"lora_A", "lora_B"}
