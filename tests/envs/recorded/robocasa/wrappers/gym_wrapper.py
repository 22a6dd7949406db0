"""A toy drawer behind the interface of RoboCasa's gymnasium wrapper.

Its oddities are the real one's: actions and observations are dictionaries, two dimensions of an
action are read as above or below a half, observations leave the bounds that are declared, an
episode never ends by itself, the default split is refused, and it prints.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register

CAMERAS = ("robot0_agentview_left", "robot0_agentview_right", "robot0_eye_in_hand")


class Kitchen:
    """Stand-in for the robosuite env within."""

    def __init__(self, split: str | None = None, seed: int | None = None) -> None:
        if split not in (None, "all", "pretrain", "target"):
            raise ValueError('split must be either {None, "all", "pretrain", "target"}')
        self.rng = np.random.default_rng(seed)
        self.gripper, self.mode = -1.0, -1.0
        self.reset()

    def reset(self) -> None:
        self.left = float(self.rng.uniform(0.1, 0.3))
        self.lang = f"close the {self.rng.choice(['left', 'right'])} drawer"
        self.position = self.rng.uniform(1.0, 3.0, 3)  # of the base, beyond what is declared

    def get_ep_meta(self) -> dict[str, Any]:
        return {"lang": self.lang}

    def step(self, action: dict[str, Any]) -> None:
        self.gripper = action["robot0_right_gripper"]
        self.mode = action["robot0_base_mode"]
        self.left = max(0.0, self.left - 0.05 * float(action["robot0_right"][0]))

    def _check_success(self) -> bool:
        return self.left < 0.02

    def _get_observations(self, force_update: bool = False) -> dict[str, np.ndarray]:
        place, turn = np.full(3, self.left), np.array([0.0, 0.0, 0.0, 1.0])
        return {
            "robot0_eef_pos": place + 1.0,
            "robot0_eef_quat": turn,
            "robot0_gripper_qpos": np.array([self.gripper, -self.gripper]),
            "robot0_gripper_qvel": np.zeros(2),
            "robot0_base_to_eef_pos": place,
            "robot0_base_to_eef_quat": turn,
            "robot0_base_pos": self.position,
            "robot0_base_quat": turn,
        }

    def close(self) -> None:
        pass


class PandaOmronKeyConverter:
    @classmethod
    def map_obs(cls, input_obs: dict[str, Any]) -> dict[str, Any]:
        return {
            "hand.gripper_qpos": input_obs["robot0_gripper_qpos"],
            "body.base_position": input_obs["robot0_base_pos"],
            "body.base_rotation": input_obs["robot0_base_quat"],
            "body.end_effector_position_relative": input_obs["robot0_base_to_eef_pos"],
            "body.end_effector_rotation_relative": input_obs["robot0_base_to_eef_quat"],
        }

    @classmethod
    def unmap_action(cls, input_action: dict[str, Any]) -> dict[str, Any]:
        return {
            "robot0_right_gripper": -1.0 if input_action["action.gripper_close"] < 0.5 else 1.0,
            "robot0_right": np.concatenate(
                (
                    input_action["action.end_effector_position"],
                    input_action["action.end_effector_rotation"],
                ),
                axis=-1,
            ),
            "robot0_base": input_action["action.base_motion"][..., 0:3],
            "robot0_torso": input_action["action.base_motion"][..., 3:4],
            "robot0_base_mode": -1.0 if input_action["action.control_mode"] < 0.5 else 1.0,
        }


class RoboCasaGymEnv(gym.Env):
    def __init__(
        self,
        env_name: str | None = None,
        camera_names: Any = None,
        camera_widths: int | None = None,
        camera_heights: int | None = None,
        enable_render: bool = True,
        split: str = "test",
        **kwargs: Any,
    ) -> None:
        self.key_converter = PandaOmronKeyConverter
        print(f"Creating {env_name} with split={split}")
        self.env = Kitchen(split=split, **kwargs)
        self.size = (camera_heights or 256, camera_widths or 256, 3)
        state = {"state." + k[5:]: v for k, v in self._mapped().items()}
        parts: dict[str, spaces.Space[Any]] = {
            key: spaces.Box(-1, 1, value.shape, np.float32) for key, value in state.items()
        }
        for camera in CAMERAS:
            parts[f"video.{camera}"] = spaces.Box(0, 255, self.size, np.uint8)
        parts["annotation.human.task_description"] = spaces.Text(256)
        self.observation_space = spaces.Dict(parts)
        widths = {
            "action.gripper_close": 1,
            "action.end_effector_position": 3,
            "action.end_effector_rotation": 3,
            "action.base_motion": 4,
            "action.control_mode": 1,
        }
        self.action_space = spaces.Dict(
            {key: spaces.Box(-1, 1, (width,), np.float32) for key, width in widths.items()}
        )

    def _mapped(self) -> dict[str, Any]:
        return self.key_converter.map_obs(self.env._get_observations(force_update=True))

    def get_observation(self, raw_obs: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "state." + key[5:]: value.astype(np.float32) for key, value in self._mapped().items()
        }
        for number, camera in enumerate(CAMERAS):
            found[f"video.{camera}"] = np.full(self.size, 50 * (number + 1), np.uint8)
        found["annotation.human.task_description"] = self.env.get_ep_meta().get("lang", "")
        return found

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], Any]:
        if seed is not None:
            self.env.rng = np.random.default_rng(seed)
        self.env.reset()
        return self.get_observation(), {"success": False}

    def step(self, action_dict: dict[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        action = self.key_converter.unmap_action(action_dict)
        shapes = {key: np.shape(value) for key, value in action.items()}
        assert shapes["robot0_right"] == (6,)
        assert shapes["robot0_base"] == (3,)
        assert shapes["robot0_torso"] == (1,)
        self.env.step(action)
        success = self.env._check_success()
        return self.get_observation(), float(success), False, False, {"success": success}

    def render(self) -> Any:
        return self.get_observation()[f"video.{CAMERAS[0]}"]

    def close(self) -> None:
        self.env.close()


def create_robocasa_gym_env_class(env: str) -> None:
    made = type(
        env,
        (RoboCasaGymEnv,),
        {"__init__": lambda self, **kwargs: RoboCasaGymEnv.__init__(self, env_name=env, **kwargs)},
    )
    setattr(sys.modules[__name__], env, made)
    register(id=f"robocasa/{env}", entry_point=f"{__name__}:{env}")


for each in ("CloseDrawer", "OpenDrawer", "AddIceCubes"):
    create_robocasa_gym_env_class(each)
