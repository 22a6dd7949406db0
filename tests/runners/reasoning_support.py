"""A reasoning run that takes seconds."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from rlinf.config.dump import to_yaml
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.run import Run

from .support import metrics

SMALL = """
task: reasoning
seed: 3
runner: {total_steps: 4}
data:
  task: {type: sorting, levels: [3], size: 200, held_out: 20}
  max_prompt_length: 16
model:
  architecture:
    {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 48,
     max_position_embeddings: 48}
warm_start: {steps: 30, batch_size: 32, optim: {lr: 3.0e-3}}
rollout:
  prompts: 4
  group_size: 4
  sampling: {max_new_tokens: 12}
  engine: {type: hf, deterministic: true, block_size: 4}
reward:
  processes: 1
  functions: {answer: {type: exact_match, found_value: 0.2}}
algorithm: {type: grpo}
actor: {type: fsdp, n_minibatches: 2, optim: {lr: 1.0e-3}}
validation: {prompts: 8, val_check_interval: 2}
checkpoint: {interval: 1, keep_last: 100}
logger: {backends: []}
"""

CALLING = (
    "data.task={type: arithmetic, levels: [2], size: 400, held_out: 30, calls: calc}",
    "rollout.agent={tools: {calc: {type: calculator}}, max_turns: 3}",
    "rollout.sampling.max_new_tokens=30",
    "warm_start.steps=60",
    # The run stops where engine and trainer disagree about what was sampled behind a reply.
    "actor.first_update_kl_bound=1e-6",
)
"""Overrides by which its answers call a calculator."""


def write_recipe(directory: Path) -> Path:
    """The small recipe as a file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "small.yaml"
    path.write_text(SMALL)
    return path


def small_config(directory: Path, *overrides: str) -> ReasoningConfig:
    """The small recipe with overrides."""
    recipe = load_recipe(str(write_recipe(directory)), list(overrides))
    return validate(ReasoningConfig, recipe.data, recipe)


def train(directory: Path, *overrides: str, stop: threading.Event | None = None) -> Path:
    """Run the small recipe and return its run directory."""
    config = small_config(directory, *overrides)
    with RunDirectory.create(directory, "small", path=directory / "run") as run:
        run.write_config(to_yaml(config))
        Run(Reasoning, config, run, stop or threading.Event()).run()
    return run.path


def resume(run: Path, config: ReasoningConfig) -> None:
    """Go on with a run."""
    with RunDirectory.open(run) as directory:
        Run(Reasoning, config, directory, threading.Event()).run(resume=True)


def weights(run: Path) -> dict[str, np.ndarray]:
    """Weights of the trained model."""
    return load_file(run / "model" / "model.safetensors")


def untimed(run: Path) -> list[dict[str, float]]:
    """Logged metrics without those that measure time."""
    return [
        {k: v for k, v in line.items() if not k.endswith("_per_second")} for line in metrics(run)
    ]


def completions(run: Path) -> dict[str, str]:
    """The files of completions of a run, by name."""
    return {file.name: file.read_text() for file in (run / "completions").glob("*")}


def assert_equal_runs(left: Path, right: Path) -> None:
    """Metrics, completions that are kept and final weights of two runs are the same, to the bit."""
    first, second = untimed(left), untimed(right)
    assert first == second
    assert len(first) > 0
    assert completions(left) == completions(right)
    before, after = weights(left), weights(right)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.array_equal(value, after[name]), name
