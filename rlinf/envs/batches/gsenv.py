"""GSEnv: ManiSkill whose pictures are Gaussian splats of real places, a whole batch on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    BatchStep,
    Observation,
    SimulatorBatch,
    require_known,
    require_package,
)
from rlinf.envs.batches import row_space, source_on_path, to_numpy
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

TASKS = ("GSEnv-PutCubeOnPlate-v0",)
STEPS = 100
"""The simulator itself ends an episode after these."""


@dataclass(frozen=True)
class GSEnvOptions:
    """Options of the ``gsenv`` env type."""

    task: str = "GSEnv-PutCubeOnPlate-v0"
    """Task."""

    robot: str = "my_franka"
    """Robot, a Franka FR3."""

    control_mode: str = "pd_ee_target_delta_pose"
    """How actions move the robot: from the pose that was asked for last, not from where it is."""

    render_batch: int = 1
    """Rows that are drawn together; more take more memory of the GPU."""

    device: str = "cuda"
    """Device that draws."""


class GSEnv(SimulatorBatch):
    """A cube is put on a plate, seen by one camera; success ends an episode and earns 1.

    ``main_images`` [480, 640, 3], ``proprioception`` [9] the joints of arm and gripper. Actions [7]
    move the pose that was asked for last by up to 0.1 m and 0.1 rad, and say where the fingers
    shall be, in metres; their limits are the robot's. An episode has at most 100 steps.
    """

    Options = GSEnvOptions
    requirements = Requirements(
        packages=(
            "mani-skill==3.0.0b21",
            "gymnasium==0.29.1",
            "gsplat==1.4.0",
            "nerfstudio==1.1.5",
            "e3nn==0.5.9",
            "urdfpy==0.0.22",
            "einops==0.8.1",
            "networkx==3.4.2",
        ),
        overrides=("networkx==3.4.2", "protobuf==6.33.2", "timm==0.9.10", "pyopengl==3.1.10"),
        module="mani_skill_gs",
        download_mb=4500,
        disk_mb=9500,
        licence="MIT; ManiSkill Apache-2.0; assets their own",
        source="a checkout of github.com/chenkang455/ManiSkill-GS with its folder assets",
        source_folders=("assets",),
        accelerator=True,
    )

    def __init__(self, options: GSEnvOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        if source := source_on_path():
            os.chdir(source)  # assets are looked up from there
        import gymnasium
        import mani_skill_gs  # noqa: F401 - registers the tasks
        import torch

        self._torch: Any = torch
        self._env: Any = gymnasium.make(
            options.task,
            robot_uids=options.robot,
            num_envs=num_envs,
            obs_mode="state",
            control_mode=options.control_mode,
            render_mode="rgb_array",
            reward_mode="none",
            disable_env_checker=True,
            gs_kwargs={
                "render_interface": "gs_rlinf",
                "cache_table": True,
                "render_bs": options.render_batch,
                "device": options.device,
            },
        )
        scene: Any = self._env.unwrapped
        self._scene = scene
        words = scene.get_language_instruction()
        self.task_descriptions = (str(words[0]),)
        seen = self._observed(self._env.reset(seed=0)[0])
        self.observation_space = row_space(seen)
        limits = scene.single_action_space
        self.action_space = spaces.Box(
            np.asarray(limits.low, np.float32), np.asarray(limits.high, np.float32)
        )

    @classmethod
    def check(cls, options: GSEnvOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks, and episodes that are longer than the simulator's."""
        source_on_path()
        require_package("gsenv", cls.requirements)
        require_known("task", options.task, TASKS)
        if options.render_batch < 1:
            why = f"{options.render_batch} is not a number of rows; nearest: 1"
            raise ConfigError(why, key="options.render_batch")
        if max_episode_steps > STEPS:
            raise ConfigError(
                f"`{options.task}` itself ends an episode after {STEPS} steps; nearest: {STEPS}",
                key="max_episode_steps",
            )

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows."""
        # One row at a time: of several, the first one's seed would draw the starts of all. They
        # are drawn once, at the last one.
        last = len(rows) - 1
        for number, (row, seed) in enumerate(zip(rows.tolist(), seeds.tolist())):  # noqa: B905
            ids = self._torch.tensor([int(row)], device=self._scene.device)
            target = self._env if number == last else self._scene
            seen, _ = target.reset(seed=int(seed), options={"env_idx": ids})
        return self._observed(seen)

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A]."""
        given = self._torch.as_tensor(actions, device=self._scene.device)
        seen, _, _, truncated, info = self._env.step(given)
        success = to_numpy(info["success"]).astype(bool)
        return BatchStep(
            observations=lambda: self._observed(seen),
            rewards=success.astype(np.float32),
            terminated=success,
            truncated=to_numpy(truncated).astype(bool),
            success=success,
        )

    def render(self, row: int) -> np.ndarray:
        """Return the picture that the policy sees."""
        frame: np.ndarray = to_numpy(self._env.render())[row]
        return frame

    def close(self) -> None:
        """End the simulation."""
        self._env.close()

    def _observed(self, seen: Any) -> Observation:
        return {
            "main_images": to_numpy(seen["sensor_data"]["3rd_view_camera"]["rgb"]),
            "proprioception": to_numpy(seen["agent"]["qpos"]).astype(np.float32),
        }
