import gymnasium as gym


class TimeLimitWrapper(gym.Wrapper):
    def __init__(self, env, max_episode_steps):
        super().__init__(env)
        self._max_episode_steps = max_episode_steps

    def step(self, action):
        observation, reward, terminated, _, info = self.env.step(action)
        truncated = self.env.unwrapped.elapsed_steps >= self._max_episode_steps
        return observation, reward, terminated, truncated, info


def register_env(uid, max_episode_steps=None, override=False, asset_download_ids=(), **kwargs):
    def register(cls):
        def make(max_episode_steps=max_episode_steps, **given):
            return TimeLimitWrapper(cls(**{**kwargs, **given}), max_episode_steps)

        gym.register(uid, entry_point=make, disable_env_checker=True)
        return cls

    return register
