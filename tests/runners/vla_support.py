"""Runs of small vision-language-action models that take seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlinf.data.demonstrations import Demonstration, Demonstrations

from . import supervised_support
from .pictures import SIZE, Dot

ENV = """
env:
  train:
    type: gymnasium
    options: {id: "tests.runners.pictures:Dot-v0", instruction: move the dot to the middle}
    max_episode_steps: 8
    processes: 1
"""
LEFT_BEHIND = """
checkpoint: {interval: 1, keep_last: 100}
logger: {backends: []}
"""
REINFORCED = f"""
task: embodied
seed: 7
runner: {{total_env_steps: 32}}
{ENV}  num_envs: 4
rollout: {{steps: 8}}
model: {{type: pi05, preset: tiny, num_action_chunks: 4, denoising_steps: 2, value_head: [8]}}
algorithm: {{type: ppo, gamma: 0.9}}
actor: {{global_batch_size: 8, micro_batch_size: 4, optim: {{lr: 1.0e-3}}}}
evaluation: {{interval: 0, episodes: 2, num_envs: 2, video_episodes: 0}}
{LEFT_BEHIND}"""
IMITATING = f"""
task: behaviour_cloning
seed: 3
runner: {{total_steps: 1}}
data: {{path: DATA, held_out: 2}}
model: {{type: pi05, preset: tiny, num_action_chunks: 4, denoising_steps: 2}}
objective: model
actor: {{global_batch_size: 8, micro_batch_size: 4, optim: {{lr: 1.0e-3}}}}
validation: {{interval: 1}}
{ENV}
evaluation: {{episodes: 2, num_envs: 2, video_episodes: 0}}
{LEFT_BEHIND}"""
SPEC = {
    "observation_shapes": {"main_images": [SIZE, SIZE, 3], "states": [2]},
    "observation_dtypes": {"main_images": "uint8", "states": "float32"},
    "action_kind": "continuous",
    "action_dim": 2,
    "action_low": [-1.0, -1.0],
    "action_high": [1.0, 1.0],
    "task_descriptions": ["move the dot to the middle"],
    "max_episode_steps": 8,
}
OFT = ("model.type=openvla_oft", "algorithm.type=grpo", "env.train.group_size=2")
"""GRPO of OpenVLA-OFT in place of PPO of π₀.₅."""
NFT = ("algorithm.type=nft", "env.train.group_size=2", "model.method=ode")
"""NFT of π₀.₅ in place of PPO."""
_OWN = {
    "model.type": (", denoising_steps: 2",),
    "algorithm.type": (", gamma: 0.9", ", value_head: [8]"),
}
"""Keys of what the recipe has, by what overrides put something else in their place."""


def demonstrations(count: int = 5, length: int = 8) -> Demonstrations:
    """Episodes of a controller that goes straight to the middle."""
    episodes = []
    for seed in range(count):
        env = Dot()
        seen, _ = env.reset(seed=seed)
        frames, actions = [], []
        for _ in range(length):
            actions.append(np.clip(-5 * seen["position"], -1, 1))
            frames.append(seen)
            seen = env.step(actions[-1])[0]
        episodes.append(
            Demonstration(
                observations={
                    "main_images": np.stack([each["picture"] for each in frames]),
                    "states": np.stack([each["position"] for each in frames]),
                },
                actions=np.stack(actions),
                rewards=np.zeros(length, np.float32),
                seed=seed,
                success=True,
            )
        )
    return Demonstrations.of(episodes, {"spec": SPEC})


def write_recipe(directory: Path, *overrides: str) -> Path:
    """The small recipe of reinforcement learning, as a file, without keys that another model or
    algorithm of the overrides would not have."""
    path, text = directory / "vla.yaml", REINFORCED
    for key in {each.partition("=")[0] for each in overrides} & _OWN.keys():
        for own in _OWN[key]:
            text = text.replace(own, "")
    path.write_text(text)
    return path


def write_imitation(directory: Path) -> Path:
    """The small recipe of imitation, as a file, with the episodes beside it."""
    if not (directory / "episodes").exists():
        demonstrations().save(directory / "episodes")
    path = directory / "imitation.yaml"
    path.write_text(IMITATING.replace("DATA", str(directory / "episodes")))
    return path


def train(directory: Path, *overrides: str, resume: bool = False) -> Path:
    """Run the recipe of reinforcement learning to its end; its run directory."""
    directory.mkdir(exist_ok=True)
    supervised_support.run_recipe(
        write_recipe(directory, *overrides),
        directory / "run",
        *overrides,
        resume=resume,
    )
    return directory / "run"


def imitate(directory: Path, *overrides: str) -> Path:
    """Run the recipe of imitation to its end; its run directory."""
    directory.mkdir(exist_ok=True)
    supervised_support.run_recipe(write_imitation(directory), directory / "run", *overrides)
    return directory / "run"
