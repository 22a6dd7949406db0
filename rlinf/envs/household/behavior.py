"""BEHAVIOR-1K: fifty household activities of an R1 Pro robot, in OmniGibson on Isaac Sim."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    BatchStep,
    Observation,
    SimulatorBatch,
    require_known,
    require_package,
)
from rlinf.envs.batches import row_space
from rlinf.envs.requirements import Requirements, source_folder
from rlinf.errors import ConfigError

TASKS = (
    "turning_on_radio", "picking_up_trash", "putting_away_Halloween_decorations",
    "cleaning_up_plates_and_food", "can_meat", "setting_mousetraps", "hiding_Easter_eggs",
    "picking_up_toys", "rearranging_kitchen_furniture", "putting_up_Christmas_decorations_inside",
    "set_up_a_coffee_station_in_your_kitchen", "putting_dishes_away_after_cleaning",
    "preparing_lunch_box", "loading_the_car", "carrying_in_groceries", "bringing_in_wood",
    "moving_boxes_to_storage", "bringing_water", "tidying_bedroom", "outfit_a_basic_toolbox",
    "sorting_vegetables", "collecting_childrens_toys", "putting_shoes_on_rack",
    "boxing_books_up_for_storage", "storing_food", "clearing_food_from_table_into_fridge",
    "assembling_gift_baskets", "sorting_household_items", "getting_organized_for_work",
    "clean_up_your_desk", "setting_the_fire", "clean_boxing_gloves", "wash_a_baseball_cap",
    "wash_dog_toys", "hanging_pictures", "attach_a_camera_to_a_tripod", "clean_a_patio",
    "clean_a_trumpet", "spraying_for_bugs", "spraying_fruit_trees", "make_microwave_popcorn",
    "cook_cabbage", "chop_an_onion", "slicing_vegetables", "chopping_wood", "cook_hot_dogs",
    "cook_bacon", "freeze_pies", "canning_food", "make_pizza",
)  # fmt: skip
"""Activities of the challenge, by their numbers in its data."""

ROBOT = "robot_r1"
CAMERAS = {"main_images": ("zed",), "wrist_images": ("left_realsense", "right_realsense")}
JOINTS = {
    "base": ((-0.75, 0.75), (-0.75, 0.75), (-1.0, 1.0)),
    "trunk": ((-1.1345, 1.8326), (-2.7925, 2.5307), (-1.8326, 1.5708), (-3.0543, 3.0543)),
    "arm_left": (
        (-4.4506, 1.3090), (-0.1745, 3.1416), (-2.3562, 2.3562), (-2.0944, 0.3491),
        (-2.3562, 2.3562), (-1.0472, 1.0472), (-1.5708, 1.5708),
    ),
    "gripper_left": ((-1.0, 1.0),),
    "arm_right": (
        (-4.4506, 1.3090), (-3.1416, 0.1745), (-2.3562, 2.3562), (-2.0944, 0.3491),
        (-2.3562, 2.3562), (-1.0472, 1.0472), (-1.5708, 1.5708),
    ),
    "gripper_right": ((-1.0, 1.0),),
}  # fmt: skip
"""Limits of the 23 dimensions of an action, in their order: velocities of the base (m/s, rad/s),
positions of torso and arms (rad), and how far the grippers open."""

PROPRIOCEPTION = {
    "joint_qpos": 28, "joint_qpos_sin": 28, "joint_qpos_cos": 28, "joint_qvel": 28,
    "joint_qeffort": 28, "robot_pos": 3, "robot_ori_cos": 3, "robot_ori_sin": 3,
    "robot_2d_ori": 1, "robot_2d_ori_cos": 1, "robot_2d_ori_sin": 1, "robot_lin_vel": 3,
    "robot_ang_vel": 3, "arm_left_qpos": 7, "arm_left_qpos_sin": 7, "arm_left_qpos_cos": 7,
    "arm_left_qvel": 7, "eef_left_pos": 3, "eef_left_quat": 4, "gripper_left_qpos": 2,
    "gripper_left_qvel": 2, "arm_right_qpos": 7, "arm_right_qpos_sin": 7,
    "arm_right_qpos_cos": 7, "arm_right_qvel": 7, "eef_right_pos": 3, "eef_right_quat": 4,
    "gripper_right_qpos": 2, "gripper_right_qvel": 2, "trunk_qpos": 4, "trunk_qvel": 4,
    "base_qpos": 3, "base_qpos_sin": 3, "base_qpos_cos": 3, "base_qvel": 3,
}  # fmt: skip
"""What ``states`` [256] are made of, and the width of each."""

CONTROLLED = ("base_qvel", "trunk_qpos", "arm_left_qpos", "arm_right_qpos", "gripper_left_qpos",
              "gripper_right_qpos")  # fmt: skip
"""Parts of proprioception that actions move; of a gripper how far its two fingers are apart."""

_STATES = ("all", "controlled")
_NO_LIMIT = 10**9
"""Time limits belong to the host."""


@dataclass(frozen=True)
class BehaviorOptions:
    """Options of the ``behavior`` env type."""

    task: str
    """Activity of the challenge, for example ``turning_on_radio``."""

    scene: str
    """Scene that it was sampled in, for example ``house_double_floor_lower``."""

    instance: int = 0
    """Which of the sampled instances of the activity is played; all episodes begin in it."""

    images: bool = True
    """Whether observations hold ``main_images`` of the head and ``wrist_images`` of both arms."""

    states: str = "all"
    """What `states` holds: `all` 256 numbers of proprioception, or the 23 of what actions move
    (`controlled`: base, trunk, arms, width of the grippers), as models are trained on them."""

    config: str = ""
    """JSON file that is merged into OmniGibson's configuration, over what is written here: rooms
    to load, resolutions, rewards, macros of a scene."""


class BehaviorEnv(SimulatorBatch):
    """An activity of the challenge, in scenes that one Isaac Sim steps together at 30 Hz.

    ``states`` [256 or 23] are proprioception, actions [23] the base's velocity and absolute
    positions of torso, arms and grippers. The reward is the change of the part of the goal that is
    reached; an episode ends at success, or where another condition of the activity ends it.
    """

    Options = BehaviorOptions
    example: ClassVar[dict[str, Any]] = {
        "task": "turning_on_radio",
        "scene": "house_double_floor_lower",
    }
    requirements = Requirements(
        packages=(
            "torch==2.7.0",
            "gymnasium==0.29.1",
            "numpy==1.26.4",
            "scipy==1.15.3",
            "gitpython==3.1.44",
            "transforms3d==0.4.2",
            "networkx==3.3",
            "pyyaml==6.0.2",
            "addict==2.4.0",
            "trimesh==4.6.8",
            "h5py==3.13.0",
            "opencv-python-headless==4.11.0.86",
            "nest-asyncio==1.6.0",
            "termcolor==3.1.0",
            "tqdm==4.67.1",
        ),
        module="omnigibson",
        python="3.10",
        # Estimated from those of torch with CUDA: it was not installed here.
        download_mb=3500,
        disk_mb=8000,
        licence="MIT; Isaac Sim and the scenes under their own licences",
        source="a checkout of github.com/StanfordVL/BEHAVIOR-1K",
        source_folders=("OmniGibson", "bddl3"),
        assets="Isaac Sim 4.5 from NVIDIA's index and the scenes, by that checkout's setup.sh",
        accelerator=True,
    )

    def __init__(self, options: BehaviorOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        _find_source()
        self._torch: Any = importlib.import_module("torch")
        envs: Any = importlib.import_module("omnigibson.envs")
        self._env: Any = envs.VectorEnvironment(num_envs, configuration(options))
        gc.enable()  # the simulator turns it off, and long runs then fill the memory
        self.task_descriptions = (options.task.replace("_", " "),)
        self._last = np.zeros((num_envs, sum(map(len, JOINTS.values()))), np.float32)
        self._raw: list[Any] = [env.reset()[0] for env in self._env.envs]
        self._seen = self._observations()
        limits = np.array([pair for pairs in JOINTS.values() for pair in pairs], np.float32)
        self.action_space = spaces.Box(limits[:, 0], limits[:, 1], dtype=np.float32)
        self.observation_space = row_space(self._seen)

    @classmethod
    def check(cls, options: BehaviorOptions, max_episode_steps: int) -> None:
        """Refuse unknown activities and a configuration that cannot be read."""
        _find_source()
        require_package("behavior", cls.requirements)
        require_known("task", options.task, TASKS)
        require_known("states", options.states, _STATES)
        if options.config:
            try:
                merged = json.loads(Path(options.config).read_text())
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{options.config} is no JSON file: {error}", key="options.config"
                ) from error
            if not isinstance(merged, dict):
                raise ConfigError(f"{options.config} holds no mapping", key="options.config")

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows; the seeds change nothing, since instances are recorded.

        The scene of a row that is reset takes the others one step of physics further.
        """
        for row in rows.tolist():
            self._raw[row] = self._env.envs[row].reset()[0]
            self._last[row] = 0.0
        self._seen = self._observations()
        return self._seen

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, 23]."""
        # Positions are absolute, and a row at rest is given zeros: it stays where it was told last.
        resting = np.logical_not(np.any(actions, axis=1))
        given = np.where(resting[:, None], self._last, actions)
        given[resting, : len(JOINTS["base"])] = 0.0
        self._last = given
        tensors = [self._torch.as_tensor(row, dtype=self._torch.float32) for row in given]
        self._raw, rewards, terminated, truncated, infos = self._env.step(tensors)
        self._seen = self._observations()
        return BatchStep(
            observations=self._seen,
            rewards=np.array([float(reward) for reward in rewards]),
            terminated=np.array([bool(each) for each in terminated]),
            truncated=np.array([bool(each) for each in truncated]),
            success=np.array([bool(info["done"]["success"]) for info in infos]),
        )

    def render(self, row: int) -> np.ndarray:
        """Return what the head of a row saw last, uint8 [H, W, 3]."""
        return _picture(self._raw[row], CAMERAS["main_images"][0])

    def close(self) -> None:
        """Do nothing: Isaac Sim ends with its process."""
        self._env.close()

    def _observations(self) -> Observation:
        states = np.stack([_numpy(_entry(raw, "proprio")) for raw in self._raw]).astype(np.float32)
        found: Observation = {"states": states}
        if self.options.states == "controlled":
            found["states"] = controlled(states)
        if self.options.images:
            for key, cameras in CAMERAS.items():
                views = [[_picture(raw, camera) for camera in cameras] for raw in self._raw]
                found[key] = np.stack([np.stack(each) for each in views])
            found["main_images"] = found["main_images"][:, 0]
        return found


def controlled(states: np.ndarray) -> np.ndarray:
    """Of proprioception [N, 256] what actions move, [N, 23]."""
    ends = np.cumsum([*PROPRIOCEPTION.values()])[:-1]
    parts = dict(zip(PROPRIOCEPTION, np.split(states, ends, axis=1), strict=True))
    return np.concatenate([
        parts[name].sum(axis=1, keepdims=True) if name.startswith("gripper") else parts[name]
        for name in CONTROLLED
    ], axis=1)  # fmt: skip


def _find_source() -> None:
    """Let the packages of the checkout be imported, if one was given."""
    for folder in ("OmniGibson", "bddl3"):
        path = source_folder() / folder
        if path.is_dir() and str(path) not in sys.path:
            sys.path.insert(0, str(path))


def configuration(options: BehaviorOptions) -> dict[str, Any]:
    """Return OmniGibson's configuration of an activity for an R1 Pro robot."""
    arm = {
        "name": "JointController",
        "motor_type": "position",
        "command_input_limits": None,
        "command_output_limits": None,
        "use_impedances": False,
        "use_delta_commands": False,
    }
    low, high = zip(*JOINTS["base"], strict=True)
    base = {
        "name": "HolonomicBaseJointController",
        "motor_type": "velocity",
        "command_input_limits": [low, high],
        "command_output_limits": [low, high],
        "use_impedances": False,
    }
    gripper = {"name": "MultiFingerGripperController", "mode": "smooth"}
    found: dict[str, Any] = {
        "env": {
            "action_frequency": 30,
            "rendering_frequency": 30,
            "physics_frequency": 120,
            "automatic_reset": False,
            "flatten_obs_space": False,
            "flatten_action_space": True,
        },
        "scene": {
            "type": "InteractiveTraversableScene",
            "scene_model": options.scene,
            "include_robots": False,
        },
        "robots": [
            {
                "type": "R1Pro",
                "name": ROBOT,
                "action_normalize": False,
                "obs_modalities": ["rgb", "proprio"] if options.images else ["proprio"],
                "proprio_obs": list(PROPRIOCEPTION),
                "controller_config": {
                    part: {"b": base, "t": arm, "a": arm, "g": gripper}[part[0]] for part in JOINTS
                },
            }
        ],
        "task": {
            "type": "BehaviorTask",
            "activity_name": options.task,
            "activity_definition_id": 0,
            "activity_instance_id": options.instance,
            "online_object_sampling": False,
            "use_presampled_robot_pose": True,
            "include_obs": False,
            "termination_config": {"max_steps": _NO_LIMIT},
            "reward_config": {"r_potential": 1.0},
        },
    }
    given = json.loads(Path(options.config).read_text()) if options.config else {}
    return merged(found, given)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the entries of ``over``; mappings within are merged as well."""
    both = {
        key: merged(base[key], value)
        if isinstance(value, dict) and isinstance(base.get(key), dict)
        else value
        for key, value in over.items()
    }
    return {**base, **both}


def _entry(raw: Mapping[str, Any], end: str) -> Any:
    """Return what stands at ``end`` in an observation, which is nested or joined by ``::``."""
    for key, value in raw.items():
        if key.endswith(end):
            return value
        if isinstance(value, dict):
            found = _entry(value, end)
            if found is not None:
                return found
    return None


def _picture(raw: Mapping[str, Any], camera: str) -> np.ndarray:
    """Return what a camera saw, uint8 [H, W, 3], without the fourth channel."""
    name = f"{ROBOT}:{camera}_link:Camera:0"
    sensor = _entry(raw, name)
    found = _entry(raw, f"{name}::rgb") if sensor is None else sensor["rgb"]
    return np.ascontiguousarray(_numpy(found)[..., :3], np.uint8)


def _numpy(value: Any) -> np.ndarray:
    """Return a tensor of any device, or an array, as an array."""
    array: np.ndarray = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return array
