import gymnasium as gym
import numpy as np
import torch


class BaseEnv(gym.Env):
    """Of several rows, those of ``env_idx`` are reset; all are evaluated, and all controllers
    forget what was asked of them."""

    SUPPORTED_OBS_MODES = ("state",)
    SUPPORTED_REWARD_MODES = ("none",)

    def __init__(
        self,
        num_envs=1,
        obs_mode=None,
        reward_mode=None,
        control_mode=None,
        render_mode=None,
        sensor_configs=None,
        robot_uids=None,
        sim_backend="auto",
    ):
        assert obs_mode in self.SUPPORTED_OBS_MODES
        assert (reward_mode, sim_backend) == (None, "gpu")  # of physics on the CPU there is one row
        self.num_envs, self.control_mode, self.sensor_configs = (
            num_envs,
            control_mode,
            sensor_configs,
        )
        self.device = torch.device("cpu")
        self._elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self._reset_mask = torch.ones(num_envs, dtype=torch.bool)
        low = np.array([-1.0] * 3 + [-np.pi / 2] * 3 + [-1.0], np.float32)
        self.single_action_space = gym.spaces.Box(low, -low)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gym.spaces.Dict()
        self.reset(seed=2022, options={"reconfigure": True})

    @property
    def elapsed_steps(self):
        return self._elapsed_steps

    def reset(self, seed=None, options=None):
        options = {} if options is None else options
        env_idx = options.get("env_idx", torch.arange(self.num_envs))
        self._reset_mask[:] = False
        self._reset_mask[env_idx] = True
        self._elapsed_steps[env_idx] = 0
        self._initialize_episode(env_idx, options)
        self._reset_mask[:] = True
        self._reset_controllers()
        info = self.get_info()
        return self.get_obs(info), {**info, "reconfigure": options.get("reconfigure", False)}

    def step(self, action):
        assert action.shape == (self.num_envs, 7)
        self._act(action)
        self._elapsed_steps += 1
        info = self.get_info()
        none = torch.zeros(self.num_envs)
        return self.get_obs(info), none, info["success"].clone(), none.bool(), info

    def get_info(self):
        return {"elapsed_steps": self._elapsed_steps.clone(), **self.evaluate()}

    def set_pose(self, where, poses):
        """Of the rows that are being reset; as many poses as those, or one for all."""
        where[self._reset_mask] = poses
