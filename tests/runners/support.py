"""A run that takes seconds, and how two runs are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.runners.embodied_config import EmbodiedConfig

SMALL = """
task: embodied
seed: 7
runner: {total_env_steps: 1024}
env:
  num_envs: 8
  train:
    type: gymnasium
    options: {id: Pendulum-v1}
    max_episode_steps: 25
    processes: 1
rollout: {steps: 16}
model: {type: mlp, hidden_sizes: [16, 16]}
algorithm: {type: ppo, gamma: 0.9, normalize_rewards: true}
actor: {global_batch_size: 64, micro_batch_size: 32, update_epoch: 2}
evaluation: {interval: 3, periodic_episodes: 4, episodes: 4, num_envs: 4, video_episodes: 0}
checkpoint: {interval: 1, keep_last: 100}
logger: {backends: []}
"""


divided = pytest.mark.parametrize(
    "overrides",
    [
        [
            "cluster.cpu_devices_per_node=2",
            "cluster.component_placement={env: '0-1', rollout: '1', actor: '0'}",
        ],
        ["rollout.pipeline_stage_num=2"],
    ],
    ids=["two env workers", "two pipeline stages"],
)
"""Ways in which the environments of a run are divided, by which nothing changes."""


def write_recipe(directory: Path) -> Path:
    """The small recipe as a file."""
    path = directory / "small.yaml"
    path.write_text(SMALL)
    return path


def small_config(directory: Path, *overrides: str) -> EmbodiedConfig:
    """The small recipe with overrides."""
    recipe = load_recipe(str(write_recipe(directory)), list(overrides))
    return validate(EmbodiedConfig, recipe.data, recipe)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Logged metrics without those that measure time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "time/", "env/steps_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def weights(run: Path) -> dict[str, np.ndarray]:
    """Weights of the trained policy."""
    return load_file(run / "policy.safetensors")


def assert_equal_runs(left: Path, right: Path) -> None:
    """Metrics and final weights of two runs are the same, to the bit."""
    first, second = metrics(left), metrics(right)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one == other
    before, after = weights(left), weights(right)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.array_equal(value, after[name], equal_nan=True), name
