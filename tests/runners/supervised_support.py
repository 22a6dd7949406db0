"""Supervised runs that take seconds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rlinf.cli.tasks import task_of
from rlinf.config.dump import to_yaml
from rlinf.config.load import load_recipe
from rlinf.config.validate import check, validate
from rlinf.data.demonstrations import Demonstration, Demonstrations
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.run import Run

from . import support

FINE_TUNING = """
task: sft
seed: 3
runner: {total_steps: 6}
data: {task: {type: sorting, levels: [3], size: 200, held_out: 20}, max_length: 32}
model:
  architecture:
    {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 48,
     max_position_embeddings: 48}
actor: {global_batch_size: 16, micro_batch_size: 8, optim: {lr: 3.0e-3}}
validation: {interval: 2}
checkpoint: {interval: 1, keep_last: 100}
logger: {backends: []}
"""

CLONING = """
task: behaviour_cloning
seed: 3
runner: {total_steps: 6}
data: {path: DATA, held_out: 2}
model: {type: mlp, hidden_sizes: [16]}
actor: {global_batch_size: 32, micro_batch_size: 8, optim: {lr: 1.0e-2}}
validation: {interval: 2}
env:
  train:
    type: gymnasium
    options: {id: Pendulum-v1}
    max_episode_steps: 25
    processes: 1
evaluation: {episodes: 4, num_envs: 4, video_episodes: 0}
checkpoint: {interval: 1, keep_last: 100}
logger: {backends: []}
"""

PENDULUM = {
    "observation_shapes": {"states": [3]},
    "observation_dtypes": {"states": "float32"},
    "action_kind": "continuous",
    "action_dim": 1,
    "action_low": [-2.0],
    "action_high": [2.0],
    "task_descriptions": [],
    "max_episode_steps": 25,
}


def demonstrations(count: int = 6, length: int = 25) -> Demonstrations:
    """Episodes of a linear controller on states drawn at random."""
    rng = np.random.default_rng(0)
    episodes = []
    for seed in range(count):
        states = rng.normal(size=(length, 3)).astype(np.float32)
        actions = np.clip(states @ np.float32([[0.5], [-1.0], [0.3]]), -2, 2)
        episodes.append(
            Demonstration(
                observations={"states": states},
                actions=actions,
                rewards=np.zeros(length, np.float32),
                seed=seed,
                success=True,
            )
        )
    return Demonstrations.of(episodes, {"spec": PENDULUM})


def write_fine_tuning(directory: Path) -> Path:
    """The small recipe of a language model, as a file."""
    path = directory / "sft.yaml"
    path.write_text(FINE_TUNING)
    return path


def write_cloning(directory: Path) -> Path:
    """The small recipe of a policy, as a file, with the episodes beside it."""
    if not (directory / "episodes").exists():
        demonstrations().save(directory / "episodes")
    path = directory / "cloning.yaml"
    path.write_text(CLONING.replace("DATA", str(directory / "episodes")))
    return path


def run_recipe(
    recipe: Path,
    directory: Path,
    *overrides: str,
    resume: bool = False,
    stop: threading.Event | None = None,
) -> Run:
    """Run a recipe to its end, or until ``stop`` says so."""
    loaded = load_recipe(str(recipe), list(overrides))
    task = task_of(loaded)
    config: Any = validate(task.config_class, loaded.data, loaded)
    check(config, loaded)
    with RunDirectory.create(directory, "run", path=directory) as written:
        written.write_config(to_yaml(config))
        run = Run(task, config, written, stop or threading.Event())
        run.run(resume=resume)
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    """Logged metrics without those that measure time."""
    return [
        {name: value for name, value in line.items() if not name.endswith("_per_second")}
        for line in support.metrics(run)
    ]


def assert_equal_runs(left: Path, right: Path) -> None:
    """Metrics and what was left behind are the same, to the bit."""
    first, second = metrics(left), metrics(right)
    assert first == second
    assert first
    before, after = weights(left), weights(right)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.array_equal(value, after[name]), name


def weights(run: Path) -> dict[str, np.ndarray]:
    """Weights that a run left behind."""
    policy = run / "policy.safetensors"
    return load_file(policy if policy.exists() else run / "model" / "model.safetensors")
