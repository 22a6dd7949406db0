"""Whole runs on prompts with pictures, and recipes that are refused before they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import torch

from rlinf.data.pictures import SETTINGS
from rlinf.engines.config import VLLMEngineConfig
from rlinf.errors import ConfigError, UserError
from rlinf.models.language import build_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.workers.config.language import picture_problems, rollout_problems

from .reasoning_support import assert_equal_runs, resume, small_config, train, untimed
from .supervised_support import run_recipe
from .support import metrics
from .test_reasoning import StopAfter

SEEING = (
    "data.task={type: squares, levels: [2], size: 40, held_out: 8}",
    "model.architecture={type: qwen3_vl, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, "
    "intermediate_size: 48, max_position_embeddings: 48, vision: {hidden_size: 16, heads: 2, "
    "layers: 1, intermediate_size: 32, patch_size: 8}}",
    "warm_start={steps: 4, batch_size: 16}",
    "rollout.engine={type: hf}",
    "runner.total_steps=2",
    "checkpoint.interval=0",
    # The run stops where engine and trainer disagree about what was sampled.
    "actor.first_update_kl_bound=1e-6",
)


def test_a_model_learns_from_answers_about_pictures(tmp_path):
    run = train(tmp_path, *SEEING, "rollout.partial={oversample: 1.5}", "algorithm.type=grpo")
    found = metrics(run)
    assert [row for row in found if "actor/approx_kl" in row]
    assert max(abs(row.get("actor/approx_kl", 0)) for row in found) < 1e-2
    for folder in (run / "initial_model", run / "model"):
        assert json.loads((folder / SETTINGS).read_text())["patch_size"] == 8
        build_language_model(LanguageModelConfig(path=folder), seed=0)


@pytest.mark.slow
def test_groups_that_are_unfinished_at_the_stop_keep_their_pictures(tmp_path):
    recipe = (
        *SEEING, "runner.total_steps=3", "checkpoint.interval=1", "model.architecture.layers=1",
        "rollout.partial={oversample: 1.5, schedule: longest_first}",
        "rollout.engine={type: hf, deterministic: true, block_size: 4, max_running_requests: 10}",
    )  # fmt: skip
    whole = train(tmp_path / "whole", *recipe)
    assert max(line.get("rollout/interrupted", 0) for line in untimed(whole)) >= 1
    run = train(tmp_path / "cut", *recipe, stop=StopAfter(1))
    assert len(untimed(run)) < len(untimed(whole))
    resume(run, small_config(tmp_path / "cut", *recipe))
    assert_equal_runs(whole, run)


def apart(trainers: str) -> tuple[str, ...]:
    """Every component in a process of its own."""
    place = f"cluster.component_placement={{rollout: 0, reward: 0, {trainers}}}"
    return "cluster.runtime=ray", "cluster.cpu_devices_per_node=2", place


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.type=ppo", "critic={}", "actor.lora={rank: 2}"),
        ("rollout.engine={type: hf, process: true}",),
        ("algorithm.type=ppo", "critic={}", *apart("actor: 1, critic: 1")),
        apart("actor: 0-1"),
    ],
    ids=["critic, adapter", "engine in a process", "critic in a process", "two ranks"],
)
def test_pictures_reach_whoever_computes(tmp_path, overrides):
    train(tmp_path, *SEEING, *overrides)


SFT = """
task: sft
runner: {total_steps: 3}
data: {task: {type: squares, levels: [2], size: 32, held_out: 8}, max_length: 32}
model:
  freeze_vision: true
  architecture: {type: qwen2_5_vl, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1,
    intermediate_size: 32, max_position_embeddings: 48, vision: {hidden_size: 16, layers: 1,
    intermediate_size: 32, patch_size: 8}}
actor: {global_batch_size: 8, optim: {lr: 1.0e-2}}
validation: {interval: 3}
logger: {backends: []}
"""


def test_examples_with_pictures_are_learnt_and_frozen_parts_stay(tmp_path):
    (tmp_path / "sft.yaml").write_text(SFT)
    run_recipe(tmp_path / "sft.yaml", tmp_path / "run")
    before, after = (
        build_language_model(LanguageModelConfig(path=tmp_path / "run" / name), seed=0)[0]
        for name in ("initial_model", "model")
    )
    after = dict(after.named_parameters())
    for name, value in before.named_parameters():
        assert torch.equal(value, after[name]) == ("visual" in name), name


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "tools": (
        ("rollout.agent={tools: {calc: {type: calculator}}, max_turns: 2}",),
        "conversations with tools have no pictures",
    ),
    "cut": (("data.long_prompts=truncate",), "could lose a part of a picture"),
    "text": (
        ("model.architecture.type=qwen2", "model.architecture.vision=null"),
        "qwen2 reads text only, and prompts have pictures",
    ),
    "vision": (("model.architecture.vision=null",), "qwen3_vl has one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_read_pictures_is_refused_before_anything_starts(tmp_path, case):
    overrides, reason = REFUSED[case]
    with pytest.raises(UserError, match=reason):
        small_config(tmp_path, *SEEING, *overrides)


def test_other_engines_and_tensor_parallelism_are_refused(tmp_path):
    config = small_config(tmp_path, *SEEING)
    rollout = config.rollout.model_copy(update={"engine": VLLMEngineConfig()})
    (problem,) = rollout_problems(rollout)
    assert "the engine vllm is given no pictures here" in str(problem)
    divided = config.actor.model_copy(update={"tensor_parallel_size": 2})
    (problem,) = picture_problems(config.model, {"actor": divided, "critic": None})
    assert "reads pictures is not divided so" in str(problem)


def test_the_files_of_a_model_are_looked_at_before_anything_starts(tmp_path: Path):
    for name in ("tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    record = {"prompt": "1", "solutions": "1", "images": ["1.png"]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(record))
    overrides = (
        "data.task=null",
        f"data.files={{train: [{tmp_path}/prompts.jsonl], image_key: images}}",
        f"model.path={tmp_path}",
        "model.architecture=null",
        "warm_start=null",
        "validation.val_check_interval=0",
    )
    config: ReasoningConfig = small_config(tmp_path / "recipe", *overrides)
    cases: dict[str, Any] = {
        "model.path: the model in .* reads text only": {"model_type": "qwen2"},
        r"model.path: .* holds no preprocessor_config\.json": {
            "model_type": "qwen2_5_vl",
            "vision_config": {},
        },
    }
    for reason, content in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=reason):
            config.check()
