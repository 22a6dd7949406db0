"""Stand-in for ManiSkill-GS: registers its task, a cube that is put on a plate."""

import gymnasium as gym
import numpy as np
import torch

LOW, HIGH = [-0.1] * 6 + [-0.01], [0.1] * 6 + [0.04]
STEPS = 100


class PutCubeOnPlate(gym.Env):
    """The gripper is a point, the cube hangs on it; success is within 7 cm of the plate.

    It follows the pose that was asked for last by half of the way in each step.
    """

    def __init__(self, robot_uids, num_envs, obs_mode, control_mode, render_mode, reward_mode):
        assert (robot_uids, obs_mode, reward_mode) == ("my_franka", "state", "none")
        assert control_mode == "pd_ee_target_delta_pose"
        self.num_envs, self.device = num_envs, torch.device("cpu")
        low, high = np.array(LOW, np.float32), np.array(HIGH, np.float32)
        self.single_action_space = gym.spaces.Box(low, high)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (num_envs, 18), np.float32)
        self.target, self.gripper, self.plate = (torch.zeros(num_envs, 3) for _ in range(3))
        self.elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self.qpos = torch.zeros(num_envs, 9)

    def get_language_instruction(self):
        return ["pick up the cube and put it on the plate"] * self.num_envs

    def reset(self, seed=None, options=None):
        rows = (options or {}).get("env_idx", torch.arange(self.num_envs))
        seeds = seed if np.iterable(seed) else [seed]
        # Of several seeds the first one draws the starts of all rows.
        noise = np.random.RandomState(seeds[0]).normal(0, 0.02, (len(rows), 9))
        self.qpos[rows] = torch.from_numpy(noise).float()
        self.qpos[rows, -2:] = 0.04
        with torch.random.fork_rng():
            torch.manual_seed(seeds[0])
            self.gripper[rows] = 0.1 * (torch.rand(len(rows), 3) * 2 - 1)
            self.plate[rows] = 0.4 + 0.1 * torch.rand(len(rows), 3)
        self.target[rows] = self.gripper[rows]
        self.elapsed_steps[rows] = 0
        return torch.zeros(self.num_envs, 18), {"reconfigure": False}

    def step(self, action):
        assert action.shape == (self.num_envs, 7)
        low, high = torch.tensor(LOW), torch.tensor(HIGH)
        action = action.clamp(low, high)
        self.target += action[:, :3]
        self.gripper += 0.5 * (self.target - self.gripper)
        self.qpos[:, :3] = self.gripper
        self.qpos[:, -2:] = action[:, 6:]
        self.elapsed_steps += 1
        success = (self.gripper - self.plate).norm(dim=1) < 0.07
        info = {"success": success, "elapsed_steps": self.elapsed_steps.clone()}
        zeros = torch.zeros(self.num_envs)
        return torch.zeros(self.num_envs, 18), zeros, success.clone(), zeros.bool(), info


class TimeLimitWrapper(gym.Wrapper):
    def step(self, action):
        observation, reward, terminated, _, info = self.env.step(action)
        truncated = self.env.unwrapped.elapsed_steps >= STEPS
        return observation, reward, terminated, truncated, info


class GSRenderWrapper(gym.Wrapper):
    """Draws the rows; ``drawn`` counts how often."""

    def __init__(self, env, render_interface, cache_table=True, render_bs=None, device="cuda"):
        super().__init__(env)
        assert render_interface == "gs_rlinf"
        self.drawn = 0

    def render(self):
        self.drawn += 1
        scene = self.env.unwrapped
        shade = (100 + 200 * scene.gripper[:, 0]).clamp(1, 255).to(torch.uint8)
        return shade.view(-1, 1, 1, 1).expand(scene.num_envs, 480, 640, 3).clone()

    def get_obs_dict(self):
        scene = self.env.unwrapped
        return {
            "agent": {"qpos": scene.qpos.clone(), "qvel": torch.zeros_like(scene.qpos)},
            "extra": {},
            "sensor_param": {},
            "sensor_data": {"3rd_view_camera": {"rgb": self.render()}},
        }

    def step(self, action):
        _, reward, terminated, truncations, info = super().step(action)
        return self.get_obs_dict(), reward, terminated, truncations, info

    def reset(self, seed=None, options=None):
        _, info = super().reset(seed=seed, options=options)
        return self.get_obs_dict(), info


def _make(**kwargs):
    gs_kwargs = kwargs.pop("gs_kwargs")
    return GSRenderWrapper(TimeLimitWrapper(PutCubeOnPlate(**kwargs)), **gs_kwargs)


gym.register(id="GSEnv-PutCubeOnPlate-v0", entry_point=_make)
