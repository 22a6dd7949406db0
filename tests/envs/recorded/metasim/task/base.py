"""Stand-in: a task env over a handler."""

import torch

from metasim.sim import Handler


class BaseTaskEnv:
    max_episode_steps = 100
    traj_filepath = None
    scenario = None

    def __init__(self, scenario=None, device=None):
        self.scenario = scenario
        self.num_envs = scenario.num_envs
        self.handler = Handler(scenario, {})
        self._initial_states = self._get_initial_states()
        self.device = self.handler.device
        self._episode_steps = torch.zeros(self.num_envs, dtype=torch.int32)

    def _get_initial_states(self):
        return None

    def _observation(self, env_states):
        return env_states

    def _terminated(self, env_states):
        return torch.zeros(self.num_envs, dtype=torch.bool)

    def step(self, actions):
        self.handler.set_dof_targets(actions)
        self.handler.simulate()
        states = self.handler.get_states(mode="tensor")
        self._episode_steps = self._episode_steps + 1
        return (
            self._observation(states),
            torch.zeros(self.num_envs),
            self._terminated(states),
            self._episode_steps >= self.max_episode_steps,
            {"privileged_observation": states},
        )

    def reset(self, states=None, env_ids=None):
        env_ids = list(range(self.num_envs)) if env_ids is None else env_ids
        self.handler.set_states(
            states=self._initial_states if states is None else states, env_ids=env_ids
        )
        self.handler.refresh_render()
        found = self.handler.get_states(env_ids=env_ids, mode="tensor")
        self._episode_steps[torch.tensor(env_ids)] = 0
        return self._observation(found), {"privileged_observation": found}

    def close(self):
        self.handler.close()
