"""An off-policy run that takes seconds."""

from __future__ import annotations

import threading
from pathlib import Path

from rlinf.config.dump import to_yaml
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.off_policy import OffPolicy
from rlinf.runners.run import Run
from rlinf.workers.config.off_policy import OffPolicyConfig

SMALL = """
task: off_policy
seed: 7
runner: {total_env_steps: 1024}
env:
  num_envs: 8
  train:
    type: gymnasium
    options: {id: Pendulum-v1}
    max_episode_steps: 25
    processes: 1
rollout: {steps: 16, block_size: 4}
model: {type: squashed_mlp, hidden_sizes: [16, 16], q_hidden_sizes: [16, 16]}
algorithm: {type: sac, gamma: 0.9, update_to_data: 0.05}
replay: {capacity: 600, start_steps: 200}
actor: {global_batch_size: 32, micro_batch_size: 16}
evaluation: {interval: 3, periodic_episodes: 4, episodes: 4, num_envs: 4, video_episodes: 0}
checkpoint: {interval: 1, keep_last: 100}
logger: {backends: []}
"""


def write_recipe(directory: Path) -> Path:
    """The small recipe as a file."""
    path = directory / "small.yaml"
    path.write_text(SMALL)
    return path


def small_config(directory: Path, *overrides: str) -> OffPolicyConfig:
    """The small recipe with overrides."""
    recipe = load_recipe(str(write_recipe(directory)), list(overrides))
    return validate(OffPolicyConfig, recipe.data, recipe)


def train(directory: Path, *overrides: str, stop: threading.Event | None = None) -> Path:
    """Run the small recipe to its end, or until ``stop`` says so; its run directory."""
    directory.mkdir(exist_ok=True)
    config = small_config(directory, *overrides)
    run = RunDirectory.create(config.runner.output_dir, "small", path=directory / "run")
    with run:
        run.write_config(to_yaml(config))
        Run(OffPolicy, config, run, stop or threading.Event()).run()
    return run.path


def resume(directory: Path, *overrides: str) -> None:
    """Go on with what :func:`train` left."""
    config = small_config(directory, *overrides)
    with RunDirectory.open(directory / "run") as run:
        Run(OffPolicy, config, run, threading.Event()).run(resume=True)
