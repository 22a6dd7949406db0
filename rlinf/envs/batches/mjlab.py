"""mjlab: Isaac Lab's tasks and interface on MuJoCo Warp, a whole batch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlinf.envs.base import BatchStep, Observation, require_known, require_package
from rlinf.envs.batches import require_device, to_numpy
from rlinf.envs.batches.manager_based import (
    NO_TIME_LIMIT,
    ManagerBasedBatch,
    ManagerBasedOptions,
)
from rlinf.envs.requirements import Requirements

TASKS = (
    "Mjlab-Cartpole-Balance", "Mjlab-Cartpole-Swingup", "Mjlab-Lift-Cube-Yam",
    "Mjlab-Velocity-Flat-Unitree-G1", "Mjlab-Velocity-Flat-Unitree-Go1",
    "Mjlab-Velocity-Rough-Unitree-G1", "Mjlab-Velocity-Rough-Unitree-Go1",
)  # fmt: skip


@dataclass(frozen=True)
class MjlabOptions(ManagerBasedOptions):
    """Options of the ``mjlab`` env type; a task is for example ``Mjlab-Lift-Cube-Yam``."""


class MjlabEnv(ManagerBasedBatch):
    """Rows of one task; ``states`` are what its actor sees."""

    Options = MjlabOptions
    example: ClassVar[dict[str, Any]] = {"task": "Mjlab-Cartpole-Balance"}
    requirements = Requirements(
        packages=("mjlab==1.6.0", "torch==2.13.0", "gymnasium==1.4.0"),
        module="mjlab",
        download_mb=650,
        disk_mb=1950,
        licence="Apache-2.0",
    )

    @classmethod
    def check(cls, options: MjlabOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks, and a device that is not there."""
        require_package("mjlab", cls.requirements)
        require_known("task", options.task, TASKS)
        require_device(options.device)

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A]."""
        waiting = self._env._manual_reset_pending.nonzero().flatten().tolist()
        if waiting:  # rows whose episode has ended, up to the end of the chunk
            self._reset_rows(waiting, seed=0)
        return super().step(actions)

    def _make(self) -> Any:
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import load_env_cfg

        config = load_env_cfg(self.options.task)
        config.scene.num_envs = self.num_envs
        config.seed = 0  # of what is drawn once, when the scene is built
        config.auto_reset = False
        config.episode_length_s = NO_TIME_LIMIT
        return ManagerBasedRlEnv(config, device=self.options.device)

    def _observed(self, seen: Any) -> Observation:
        return {"states": to_numpy(seen["actor"])}

    def _reset_rows(self, rows: list[int], seed: int) -> Any:
        seen = super()._reset_rows(rows, seed)
        self._env._manual_reset_pending[rows] = False
        return seen
