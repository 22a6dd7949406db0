"""Stand-in: the environment of a manager-based task, rows of Franka arms that stack cubes.

A hand is a point, moved by half of an action's first three values times a tenth. The cubes are
stacked when the hand is within 0.3 m of the first cube.
"""

import gymnasium as gym
import numpy as np
import torch

from isaaclab.sim import SimulationContext

TERMS = {
    "actions": 7, "joint_pos": 9, "joint_vel": 9, "object": 39, "cube_positions": 9,
    "cube_orientations": 12, "eef_pos": 3, "eef_quat": 4, "gripper_pos": 2,
}  # fmt: skip


class _Terms:
    """A manager, as far as its terms are asked for."""

    def __init__(self, names, values=None):
        self.active_terms = list(names)
        self._values = values or {}

    def get_term(self, name):
        return self._values[name]


class ManagerBasedRLEnv(gym.Env):
    def __init__(self, cfg, render_mode=None, **kwargs):
        if SimulationContext._instance is not None:
            raise RuntimeError("A SimulationContext already exists.")
        SimulationContext._instance = self
        self.cfg, self.num_envs = cfg, cfg.scene.num_envs
        self.device = torch.device(cfg.sim.device)
        self.seed(cfg.seed)
        zeros = torch.zeros(self.num_envs, dtype=torch.bool)
        self.command_manager = _Terms([])
        self.termination_manager = _Terms(
            ["time_out", "cube_1_dropping", "cube_2_dropping", "cube_3_dropping", "success"],
            {"success": zeros},
        )
        self.reward_manager = _Terms([])  # the task has none
        self.action_manager = _Terms(["arm_action", "gripper_action"])
        self.action_manager.total_action_dim = 7
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.max_episode_length = int(np.ceil(cfg.episode_length_s / 0.05))
        self.extras = {}
        self._hand = torch.zeros(self.num_envs, 3)
        self._cube = torch.zeros(self.num_envs, 3)
        self._action = torch.zeros(self.num_envs, 7)
        self.resets = 0
        print("[INFO]: Completed setting up the environment...")

    @staticmethod
    def seed(seed=-1):
        np.random.seed(seed)
        torch.manual_seed(seed)
        return seed

    def reset(self, env_ids=slice(None), *, seed=None, options=None):
        if seed is not None:
            self.seed(seed)
        self._reset_idx(env_ids)
        return self._observations(), self.extras

    def step(self, action):
        assert action.shape == (self.num_envs, 7)
        self.resets = 0
        self._action = action
        self._hand += 0.05 * action[:, :3].clamp(-1, 1)
        self.episode_length_buf += 1
        success = (self._hand - self._cube).norm(dim=1) < 0.3
        self.termination_manager._values["success"] = success
        dropped = self._hand[:, 2] < -1.0
        terminated = success | dropped
        time_outs = self.episode_length_buf >= self.max_episode_length
        ended = (terminated | time_outs).nonzero().squeeze(-1)
        if len(ended):
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = self._observations()
            self._reset_idx(ended)
            self.resets = len(ended)
        return self._observations(), torch.zeros(self.num_envs), terminated, time_outs, self.extras

    def close(self):
        SimulationContext._instance = None

    def _reset_idx(self, env_ids):
        count = len(self._hand[env_ids])
        self._hand[env_ids] = 0.3 * torch.rand(count, 3)
        self._cube[env_ids] = 0.5 + 0.3 * torch.rand(count, 3)
        self.episode_length_buf[env_ids] = 0
        self.extras["log"] = {}

    def _observations(self):
        count = self.num_envs
        terms = {name: torch.zeros(count, size) for name, size in TERMS.items()}
        terms["actions"] = self._action.clone()
        terms["cube_positions"] = self._cube.repeat(1, 3)
        terms["object"][:, :3] = self._cube
        terms["eef_pos"] = self._hand.clone()
        terms["eef_quat"][:, 3] = 1.0  # x, y, z, w
        terms["gripper_pos"] = torch.tensor([[0.04, -0.04]]).repeat(count, 1)
        for number, name in enumerate(("table_cam", "wrist_cam")):
            camera = getattr(self.cfg.scene, name)
            shade = 50 + 100 * number + 50 * self._hand[:, 0].clamp(0, 1)
            shape = (count, camera.height, camera.width, 3)
            terms[name] = shade.to(torch.uint8).view(-1, 1, 1, 1).expand(shape).clone()
        subtasks = {name: torch.zeros(count, dtype=torch.bool) for name in ("grasp_1", "stack_1")}
        return {"policy": terms, "subtask_terms": subtasks}
