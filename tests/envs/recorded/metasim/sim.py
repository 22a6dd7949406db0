"""Stand-in: an arm without dynamics, in the two dialects that simulators have.

Its first three joints are where the hand is in the frame of the base, the next three its rotation
vector. The base stands at (0.1, 0.2, 0) and is turned by a quarter about z.

`mujoco` runs one process per row: a state is set for each row that is named, or one for all, and
the rows that are named are told. `isaacsim` wants one state or one of every row, and tells all.
"""

import math

import torch

from metasim.types import CameraState, ObjectState, RobotState, TensorState
from metasim.utils.ik_solver import quaternion, rotate, times

BASE = [0.1, 0.2, 0.0, math.sqrt(0.5), 0.0, 0.0, math.sqrt(0.5)]


class Handler:
    def __init__(self, scenario, optional_queries=None):
        self.scenario = scenario
        self.robots, self.cameras = scenario.robots, scenario.cameras
        self.num_envs, self.device = scenario.num_envs, torch.device("cpu")
        self.joints = torch.zeros(self.num_envs, 9)  # in the order of their names
        self.cube = torch.zeros(self.num_envs, 3)
        self._targets = self.joints.clone()
        self.given = None

    def get_joint_names(self, obj_name, sort=True):
        names = list(self.robots[0].actuators)
        return sorted(names) if sort else names

    def set_states(self, states, env_ids=None):
        env_ids = list(range(self.num_envs)) if env_ids is None else env_ids
        if self.scenario.simulator == "mujoco":
            if len(states) not in (1, len(env_ids)):
                raise ValueError(
                    f"states nums {len(states)} and env_ids nums {len(env_ids)} are inconsistent, "
                    "in parallel mode, it must be one-to-one or single broadcast"
                )
            chosen = states * len(env_ids) if len(states) == 1 else states
        else:
            if len(states) not in (1, self.num_envs):
                raise ValueError(f"States list length ({len(states)}) must be either 1 or num_envs")
            chosen = states * len(env_ids) if len(states) == 1 else [states[i] for i in env_ids]
        names = self.get_joint_names("franka")
        for row, state in zip(env_ids, chosen, strict=True):
            joints = state["robots"]["franka"]["dof_pos"]
            self.joints[row] = torch.tensor([joints[name] for name in names])
            self.cube[row] = state["objects"]["cube"]["pos"]
        self._targets = self.joints.clone()

    def set_dof_targets(self, actions):
        self.given = actions
        names = self.get_joint_names("franka")
        for row, action in enumerate(actions):
            targets = action["franka"]["dof_pos_target"]
            self._targets[row] = torch.tensor([targets[name] for name in names])

    def simulate(self):
        self.joints = self._targets.clone()

    def refresh_render(self):
        pass

    def hand(self):
        base = torch.tensor(BASE).repeat(self.num_envs, 1)
        position = base[:, :3] + rotate(base[:, 3:], self.joints[:, 2:5])
        return torch.cat([position, times(base[:, 3:], quaternion(self.joints[:, 5:8]))], dim=1)

    def get_states(self, env_ids=None, mode="dict"):
        assert mode == "tensor"
        rows = slice(None)
        if env_ids is not None and self.scenario.simulator == "mujoco":
            rows = env_ids
        still = torch.zeros(self.num_envs, 6)
        base = torch.cat([torch.tensor(BASE).repeat(self.num_envs, 1), still], dim=1)
        hand = torch.cat([self.hand(), still], dim=1)
        robot = RobotState(
            root_state=base[rows].clone(),
            body_names=["panda_hand", "panda_link0"],
            body_state=torch.stack([hand, base], dim=1)[rows].clone(),
            joint_pos=self.joints[rows].clone(),
            joint_vel=torch.zeros_like(self.joints[rows]),
            joint_pos_target=None,
            joint_vel_target=None,
            joint_effort_target=None,
        )
        cube = torch.cat([self.cube, torch.zeros(self.num_envs, 10)], dim=1)[rows]
        shade = (80 + 100 * hand[rows, 0].clamp(0, 1)).to(torch.uint8).view(-1, 1, 1, 1)
        cameras = {
            camera.name: CameraState(
                rgb=(shade + 5 * ("wrist" in camera.name))
                .expand(len(shade), camera.height, camera.width, 3)
                .clone(),
                depth=None,
            )
            for camera in self.cameras
        }
        return TensorState({"cube": ObjectState(cube)}, {"franka": robot}, cameras)

    def close(self):
        self.closed = True
