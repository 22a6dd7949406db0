"""Genesis: a Franka arm that picks up a cube, a whole batch of scenes on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    BatchStep,
    Observation,
    SimulatorBatch,
    observation_space,
    require_known,
    require_package,
)
from rlinf.envs.requirements import Requirements

TASKS = ("pick_cube",)
_HOME = (0.0, -0.4, 0.0, -2.2, 0.0, 1.8, 0.785, 0.04, 0.04)
# Gains and largest forces of joints (N m/rad, N m s/rad, N m) and fingers (N/m, N s/m, N). In the
# model the fingers are one tendon, which Genesis does not have.
_STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 100.0, 100.0)
_DAMPING = (450.0, 450.0, 350.0, 350.0, 200.0, 200.0, 200.0, 10.0, 10.0)
_FORCE = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 100.0, 100.0)
_CUBE = 0.04
"""Edge of the cube in metres."""
_FROM, _TO = np.array([0.45, -0.25]), np.array([0.65, 0.25])
"""Corners of the rectangle on the floor in which the cube lies, in metres from the arm."""
_REACH = np.array([0.05] * 7 + [0.01] * 2)
"""How far an action moves a joint's target: radians, and metres of a finger."""


@dataclass(frozen=True)
class GenesisOptions:
    """Options of the ``genesis`` env type."""

    task: str = "pick_cube"
    """Task; there is one."""

    device: str = "cpu"
    """Device that simulates: ``cpu`` or ``cuda``."""

    success_height: float = 0.1
    """Metres above the floor to which the cube must be lifted."""


class GenesisEnv(SimulatorBatch):
    """Rows of one scene: an arm, a cube that lies anywhere before it, and the floor.

    ``states`` [16] are position and orientation of the hand [3 + 4], the fingers [2], position and
    orientation of the cube [3 + 4], in metres and as quaternions (w, x, y, z). Actions [9] in
    [-1, 1] move the targets of the seven joints by up to 0.05 rad and of the fingers by up to
    1 cm, 50 times a second. The reward is at most 1 for a hand near the cube, at most 1 for a
    cube that is lifted, and 5 at success, where an episode ends: ``success_height`` is reached.

    The first start of a machine compiles kernels for minutes, later ones find them in a cache and
    still take a minute: ``start_deadline`` must allow for it.
    """

    Options = GenesisOptions
    requirements = Requirements(
        packages=("genesis-world==1.4.5", "torch==2.13.0", "gymnasium==1.4.0"),
        module="genesis",
        download_mb=1100,
        disk_mb=3700,
        licence="Apache-2.0; assets under their own licences",
    )

    def __init__(self, options: GenesisOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        import genesis
        import torch

        self._torch: Any = torch
        if not genesis._initialized:  # once in a process, which may hold several batches
            backend = genesis.cpu if options.device == "cpu" else genesis.cuda
            genesis.init(backend=backend, logging_level="error", seed=0)
        self._device = genesis.device
        self._scene = genesis.Scene(
            show_viewer=False, sim_options=genesis.options.SimOptions(dt=0.02, substeps=2)
        )
        self._scene.add_entity(genesis.morphs.Plane())
        box = genesis.morphs.Box(size=(_CUBE,) * 3, pos=(0.5, 0.0, _CUBE / 2))
        self._cube = self._scene.add_entity(box)
        arm = genesis.morphs.MJCF(file="xml/franka_emika_panda/panda.xml")
        self._arm = self._scene.add_entity(arm)
        self._scene.build(n_envs=num_envs)
        self._arm.set_dofs_kp(_STIFFNESS)
        self._arm.set_dofs_kv(_DAMPING)
        self._arm.set_dofs_force_range([-force for force in _FORCE], _FORCE)
        self._hand = self._arm.get_link("hand")
        low, high = self._arm.get_dofs_limit()
        self._low, self._high = low.reshape(-1, 9)[:1], high.reshape(-1, 9)[:1]
        self._reach = self._tensor(_REACH)
        self._home = self._tensor(np.array(_HOME))
        self._targets = self._home.repeat(num_envs, 1)
        # Kernels are compiled here, under the deadline of the start.
        self.reset(np.arange(num_envs), np.arange(num_envs))
        self.step(np.zeros((num_envs, 9), np.float32))
        self.task_descriptions = ("pick up the cube",)
        self.observation_space = observation_space({"states": (16,)})
        self.action_space = spaces.Box(-1.0, 1.0, (9,), np.float32)

    @classmethod
    def check(cls, options: GenesisOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks and devices."""
        require_package("genesis", cls.requirements)
        require_known("task", options.task, TASKS)
        require_known("device", options.device, ("cpu", "cuda"))

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows: the arm at rest, the cube where the seed puts it."""
        ids = self._torch.as_tensor(rows, device=self._device)
        self._scene.reset(envs_idx=ids)
        places, turns = np.empty((len(rows), 3)), np.zeros((len(rows), 4))
        for place, turn, seed in zip(places, turns, seeds.tolist()):  # noqa: B905 - Python 3.8
            random = np.random.default_rng(seed)
            place[:] = (*random.uniform(_FROM, _TO), _CUBE / 2)
            angle = random.uniform(-np.pi / 4, np.pi / 4) / 2
            turn[[0, 3]] = np.cos(angle), np.sin(angle)
        self._cube.set_pos(self._tensor(places), envs_idx=ids)
        self._cube.set_quat(self._tensor(turns), envs_idx=ids)
        self._targets[ids] = self._home
        self._arm.set_dofs_position(self._targets[ids], envs_idx=ids)
        return {"states": self._states()}

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, 9]."""
        moved = self._targets + self._reach * self._tensor(actions).clamp(-1.0, 1.0)
        self._targets = self._torch.clamp(moved, self._low, self._high)
        self._arm.control_dofs_position(self._targets)
        self._scene.step()
        states = self._states()
        # The fingers close 10 cm before the hand.
        rotation = states[:, 3:7].astype(np.float64)
        grip = states[:, :3] + 0.1 * _third_axis(rotation)
        distance = np.linalg.norm(grip - states[:, 9:12], axis=1)
        height = states[:, 11] - _CUBE / 2
        success = height >= self.options.success_height
        lifted = np.clip(height / self.options.success_height, 0.0, 1.0)
        rewards = 1.0 - np.tanh(5.0 * distance) + lifted + 5.0 * success
        return BatchStep(
            observations={"states": states},
            rewards=rewards,
            terminated=success,
            truncated=np.zeros(self.num_envs, bool),
            success=success,
        )

    def close(self) -> None:
        """End the simulation."""
        self._scene.destroy()

    def _states(self) -> np.ndarray:
        parts = [
            self._hand.get_pos(), self._hand.get_quat(), self._arm.get_dofs_position()[:, 7:],
            self._cube.get_pos(), self._cube.get_quat(),
        ]  # fmt: skip
        states: np.ndarray = self._torch.cat(parts, dim=-1).cpu().numpy()
        return states.astype(np.float32)

    def _tensor(self, values: np.ndarray) -> Any:
        return self._torch.as_tensor(values, dtype=self._torch.float32, device=self._device)


def _third_axis(quaternions: np.ndarray) -> np.ndarray:
    """Where the z axis points [N, 3] after rotations [N, 4] (w, x, y, z)."""
    w, x, y, z = quaternions.T
    return np.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], axis=1)
