"""Stand-in: tasks by name. A hand is brought within 6 cm of a cube."""

import torch

from metasim.scenario.scenario import ScenarioCfg
from metasim.task.base import BaseTaskEnv
from metasim.utils.demo_util import get_traj


class PickButter(BaseTaskEnv):
    scenario = ScenarioCfg(robots=["franka"])
    max_episode_steps = 250
    task_desc = "Pick up the butter and place it in the basket"
    traj_filepath = "roboverse_data/trajs/libero/pick_up_the_butter/v2/franka_v2.pkl.gz"

    def _get_initial_states(self):
        starts, _, _ = get_traj(self.traj_filepath, self.scenario.robots[0], self.handler)
        return (starts * self.num_envs)[: self.num_envs]

    def _terminated(self, env_states):
        hand = env_states.robots["franka"].body_state[:, 0, :3]
        return (hand - env_states.objects["cube"].root_state[:, :3]).norm(dim=1) < 0.06


class Walk(PickButter):
    """A task of MetaSim's own learners: a vector instead of a state."""

    def _observation(self, env_states):
        return torch.cat([robot.joint_pos for robot in env_states.robots.values()], dim=1)


TASK_REGISTRY = {"libero.pick_butter": PickButter, "humanoid.walk": Walk}


def get_task_class(name):
    try:
        return TASK_REGISTRY[name.strip().lower()]
    except KeyError as error:
        available = ", ".join(sorted(TASK_REGISTRY))
        raise KeyError(f"Unknown task '{name}'. Registered tasks: {available}") from error
