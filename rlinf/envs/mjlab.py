"""mjlab: Isaac Lab's tasks and interface on MuJoCo Warp, a whole batch on a device."""

from __future__ import annotations

import contextlib
import io
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
from rlinf.envs.requirements import Requirements

TASKS = (
    "Mjlab-Cartpole-Balance", "Mjlab-Cartpole-Swingup", "Mjlab-Lift-Cube-Yam",
    "Mjlab-Velocity-Flat-Unitree-G1", "Mjlab-Velocity-Flat-Unitree-Go1",
    "Mjlab-Velocity-Rough-Unitree-G1", "Mjlab-Velocity-Rough-Unitree-Go1",
)  # fmt: skip


@dataclass(frozen=True)
class MjlabOptions:
    """Options of the ``mjlab`` env type."""

    task: str
    """Task, for example ``Mjlab-Lift-Cube-Yam``."""

    device: str = "cpu"
    """Device that simulates: ``cpu``, or ``cuda:0``."""

    own_seeds: bool = True
    """Whether every row is reset by its own seed, one after another, which groups of equal starts
    need; false: those that begin together share the first one's, which is quicker."""

    success_return: float | None = None
    """Return from which on an episode of a task without a goal counts as a success."""


class MjlabEnv(SimulatorBatch):
    """Rows of one task; ``states`` are what its actor sees.

    Success is a task's own goal where its commands have one (the cube is where it was asked for),
    else a return. Kernels are compiled at the first reset, which takes minutes and is cached by
    Warp: ``start_deadline`` and ``step_deadline`` must allow for it.
    """

    Options = MjlabOptions
    requirements = Requirements(
        packages=("mjlab==1.6.0", "torch==2.13.0", "gymnasium==1.4.0"),
        module="mjlab",
        download_mb=650,
        disk_mb=1950,
        licence="Apache-2.0",
    )

    def __init__(self, options: MjlabOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        import torch
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import load_env_cfg

        self._torch: Any = torch
        with _quiet():
            config = load_env_cfg(options.task)
            config.scene.num_envs = num_envs
            config.seed = 0  # of what is drawn once, when the scene is built
            config.auto_reset = False
            config.episode_length_s = 1e9  # time limits belong to the host
            self._env: Any = ManagerBasedRlEnv(config, device=options.device)
            # Kernels are compiled here, under the deadline of the start.
            seen, _ = self._env.reset(seed=0)
            size = self._env.action_manager.total_action_dim
            self._env.step(torch.zeros(num_envs, size, device=options.device))
        self.task_descriptions = (options.task.replace("Mjlab-", "").replace("-", " ").lower(),)
        self._return = np.zeros(num_envs)
        shape = tuple(seen["actor"].shape[1:])
        self.observation_space = spaces.Dict(
            {"states": spaces.Box(-np.inf, np.inf, shape, np.float32)}
        )
        self.action_space = spaces.Box(-1.0, 1.0, (size,), np.float32)

    @classmethod
    def check(cls, options: MjlabOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks, and a device that is not there."""
        require_package("mjlab", cls.requirements)
        require_known("task", options.task, TASKS)
        if options.device != "cpu":
            import torch

            there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
            require_known("device", options.device, there)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows."""
        self._return[rows] = 0.0
        if self.options.own_seeds:
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                seen = self._reset(rows=[int(row)], seed=int(seed))
        else:
            seen = self._reset(rows=rows.tolist(), seed=int(seeds[0]))
        return {"states": self._numpy(seen["actor"])}

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A]."""
        env = self._env
        waiting = env._manual_reset_pending.nonzero().flatten().tolist()
        if waiting:  # rows whose episode has ended, up to the end of the chunk
            self._reset(rows=waiting, seed=0)
        given = self._torch.as_tensor(actions, device=env.device)
        seen, reward, terminated, _, _ = env.step(given)
        rewards = self._numpy(reward)
        self._return += rewards
        return BatchStep(
            observations={"states": self._numpy(seen["actor"])},
            rewards=rewards,
            terminated=self._numpy(terminated).astype(bool),
            truncated=np.zeros(self.num_envs, bool),
            success=self._success(),
        )

    def close(self) -> None:
        """End the simulation."""
        self._env.close()

    def _reset(self, rows: list[int], seed: int) -> Any:
        env = self._env
        ids = self._torch.tensor(rows, device=env.device)
        with _quiet():
            seen, _ = env.reset(seed=seed, env_ids=ids)
        env._manual_reset_pending[ids] = False
        return seen

    def _success(self) -> np.ndarray:
        manager = self._env.command_manager
        for name in getattr(manager, "active_terms", ()):
            metrics = manager.get_term(name).metrics
            if "at_goal" in metrics:
                return self._numpy(metrics["at_goal"]) > 0
        limit = self.options.success_return
        return np.full(self.num_envs, False) if limit is None else self._return >= limit

    @staticmethod
    def _numpy(tensor: Any) -> np.ndarray:
        array: np.ndarray = tensor.detach().cpu().numpy()
        return array.copy()


@contextlib.contextmanager
def _quiet() -> Any:
    """mjlab prints tables of its settings, and every seed."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
