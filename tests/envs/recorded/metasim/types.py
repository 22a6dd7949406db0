"""Stand-in: states as tensors, refused where their shapes do not belong together."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RobotState:
    root_state: Any
    body_names: list
    body_state: Any
    joint_pos: Any
    joint_vel: Any
    joint_pos_target: Any
    joint_vel_target: Any
    joint_effort_target: Any

    def __post_init__(self):
        rows = len(self.root_state)
        assert self.root_state.shape == (rows, 13)
        assert self.body_state.shape == (rows, len(self.body_names), 13)
        assert self.joint_pos.shape == self.joint_vel.shape == (rows, self.joint_pos.shape[1])


@dataclass
class ObjectState:
    root_state: Any
    body_names: Any = None
    body_state: Any = None
    joint_pos: Any = None
    joint_vel: Any = None


@dataclass
class CameraState:
    rgb: Any
    depth: Any
    pos: Any = None
    quat_world: Any = None
    intrinsics: Any = None

    def __post_init__(self):
        assert self.rgb.ndim == 4
        assert self.rgb.shape[-1] == 3


@dataclass
class TensorState:
    objects: dict
    robots: dict
    cameras: dict
    extras: dict = field(default_factory=dict)
