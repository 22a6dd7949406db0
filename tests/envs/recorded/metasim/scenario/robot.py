"""Stand-in: the Franka arm, whose actuators are in the order of the chain."""

from dataclasses import dataclass, field

ARM = [f"panda_joint{number}" for number in range(1, 8)]
FINGERS = ["panda_finger_joint1", "panda_finger_joint2"]


@dataclass
class RobotCfg:
    name: str = "franka"
    num_joints: int = 9
    actuators: dict = field(default_factory=lambda: dict.fromkeys([*ARM, *FINGERS]))
    joint_limits: dict = field(default_factory=lambda: dict.fromkeys([*ARM, *FINGERS], (-3, 3)))
    ee_body_name: str = "panda_hand"
    ee_joint_names: list = field(default_factory=lambda: list(FINGERS))
    gripper_open_q: list = field(default_factory=lambda: [0.04, 0.04])
    gripper_close_q: list = field(default_factory=lambda: [0.0, 0.0])
