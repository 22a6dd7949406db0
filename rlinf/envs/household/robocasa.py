"""RoboCasa365: everyday tasks of a mobile Panda arm in kitchens, in MuJoCo with robosuite."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    INSTRUCTION_KEY,
    INSTRUCTION_SHAPE,
    Observation,
    SimulatorEnv,
    instruction_bytes,
    observation_space,
    package_folder,
    quiet,
    require_known,
    require_package,
    spaced,
)
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

SPLITS = ("pretrain", "target", "all")
CAMERAS = {
    "main_images": "video.robot0_agentview_left",
    "extra_view_images": "video.robot0_agentview_right",
    "wrist_images": "video.robot0_eye_in_hand",
}
ACTIONS = (
    ("action.end_effector_position", 3),
    ("action.end_effector_rotation", 3),
    ("action.gripper_close", 1),
    ("action.base_motion", 4),
    ("action.control_mode", 1),
)
"""How the 12 dimensions of an action are divided."""

BINARY = (6, 11)
"""Dimensions of which the simulator reads no more than whether they are above a half: whether the
gripper closes, and whether the base drives instead of the arm."""

STATES = {
    "gym": (
        ("state.gripper_qpos", 2),
        ("state.base_position", 3),
        ("state.base_rotation", 4),
        ("state.end_effector_position_relative", 3),
        ("state.end_effector_rotation_relative", 4),
    ),
    "robosuite": (
        ("robot0_eef_pos", 3),
        ("robot0_eef_quat", 4),
        ("robot0_gripper_qpos", 2),
        ("robot0_gripper_qvel", 2),
        ("robot0_base_to_eef_pos", 3),
        ("robot0_base_to_eef_quat", 4),
        ("robot0_base_pos", 3),
        ("robot0_base_quat", 4),
    ),
}
"""What ``states`` are made of: of RoboCasa365's own observations, or of robosuite's, in the order
of policies that were trained before there were those."""

ASSETS = ("textures", "objects")


@dataclass(frozen=True)
class RobocasaOptions:
    """Options of the ``robocasa`` env type."""

    task: str
    """Task, for example ``CloseDrawer``."""

    split: str = "pretrain"
    """Kitchens and objects: ``pretrain``, ``target`` for those held out, or ``all``."""

    states: str = "gym"
    """``gym``: states [16] of RoboCasa365's interface; ``robosuite``: [25] of the one before."""

    images: bool = True
    """Whether observations hold ``main_images``, ``extra_view_images`` and ``wrist_images``."""

    image_size: int = 256
    """Height and width of the pictures in pixels."""

    binary_threshold: float = 0.5
    """Above which the two binary dimensions of an action are on; 0 for policies that give -1, 1."""


class RobocasaEnv(SimulatorEnv):
    """A task in a kitchen that the reset seed draws, with its objects and its ``instruction``.

    Actions [12] in [-1, 1] displace and turn the gripper, close it (6), drive the base (3) and
    lift its torso, and choose the base (11). An episode ends at success, with reward 1.
    """

    Options = RobocasaOptions
    example: ClassVar[dict[str, Any]] = {"task": "CloseDrawer", "image_size": 64}
    requirements = Requirements(
        packages=(
            "rlinf-robocasa365==1.0.1",
            "praxis-robosuite==1.5.2.post1",
            "mujoco==3.3.0",
            "gymnasium==1.4.0",
        ),
        # RoboCasa365 counts on robosuite as it is after 1.5.2, which the index has by this name.
        overrides=("robosuite==1.5.2; sys_platform == 'never'",),
        module="robocasa",
        download_mb=400,
        disk_mb=1200,
        licence="MIT; assets CC BY 4.0",
        libraries={"libEGL.so.1": "libegl1", "libGL.so.1": "libgl1"},
        variables={"MUJOCO_GL": "egl"},
        assets="`python -m robocasa.scripts.download_kitchen_assets` of its environment (10 GB)",
    )
    # Until it was tried with the real simulator.
    deterministic = False
    replayable = False

    def __init__(self, options: RobocasaOptions) -> None:
        super().__init__(options)
        with quiet():
            import gymnasium
            import robocasa  # noqa: F401 - registers its tasks

            # Its observations leave the bounds that it declares, of which gymnasium would warn.
            self._env: Any = gymnasium.make(
                f"robocasa/{options.task}",
                disable_env_checker=True,
                split=options.split,
                seed=0,  # of the kitchen that is built before the first reset
                camera_widths=options.image_size,
                camera_heights=options.image_size,
            )
        self.task_descriptions = (spaced(options.task),)
        self._picture = np.zeros((options.image_size, options.image_size, 3), np.uint8)
        size = sum(width for _, width in STATES[options.states])
        shapes: dict[str, tuple[int, ...]] = {"states": (size,), INSTRUCTION_KEY: INSTRUCTION_SHAPE}
        if options.images:
            shape = (options.image_size, options.image_size, 3)
            for key in CAMERAS:
                shapes[key] = (1, *shape) if key == "extra_view_images" else shape
        self.observation_space = observation_space(shapes)
        self.action_space = spaces.Box(-1.0, 1.0, (12,), np.float32)

    @classmethod
    def check(cls, options: RobocasaOptions, max_episode_steps: int) -> None:
        """Refuse what RoboCasa has not, and missing assets."""
        require_package("robocasa", cls.requirements)
        folder = package_folder("robocasa")
        require_known("task", options.task, sorted(horizons(folder)))
        require_known("split", options.split, SPLITS)
        require_known("states", options.states, tuple(STATES))
        if options.image_size < 1:
            raise ConfigError("a picture has pixels; nearest: 1", key="options.image_size")
        missing = [each for each in ASSETS if not (folder / "models/assets" / each).is_dir()]
        if missing:
            raise ConfigError(
                f"no folder {folder / 'models/assets' / missing[0]}; {cls.requirements.assets}",
                key="type",
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Build the kitchen of ``seed`` and start in it."""
        with quiet():
            seen, _ = self._env.reset(seed=seed)
        return self._observation(seen), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute one action [12]."""
        given = np.array(action, np.float32)
        given[list(BINARY)] = given[list(BINARY)] > self.options.binary_threshold
        edges = np.cumsum([width for _, width in ACTIONS])[:-1]
        parts = np.split(given, edges)
        named = {name: part for (name, _), part in zip(ACTIONS, parts, strict=True)}
        # The simulator itself never ends an episode.
        seen, reward, _, _, info = self._env.step(named)
        success = bool(info["success"])
        return self._observation(seen), float(reward), success, False, {"success": success}

    def render(self) -> np.ndarray:
        """Return what the left camera saw last, uint8 [H, W, 3]."""
        return self._picture

    def close(self) -> None:
        """Free model and graphics."""
        self._env.close()

    def _observation(self, seen: dict[str, Any]) -> Observation:
        found: Observation = {
            "states": self._states(seen),
            INSTRUCTION_KEY: instruction_bytes(seen["annotation.human.task_description"]),
        }
        self._picture = seen[CAMERAS["main_images"]]
        if self.options.images:
            found.update({key: seen[camera] for key, camera in CAMERAS.items()})
            found["extra_view_images"] = found["extra_view_images"][None]
        return found

    def _states(self, seen: dict[str, Any]) -> np.ndarray:
        if self.options.states == "robosuite":
            seen = self._env.unwrapped.env._get_observations()  # those of this step, not anew
        parts = [np.asarray(seen[key]) for key, _ in STATES[self.options.states]]
        return np.concatenate(parts).astype(np.float32)


def horizons(folder: Path) -> dict[str, int]:
    """Return the tasks of RoboCasa's package that have data, and the steps of an episode of each.

    They are read from its source: to import it takes seconds and builds graphics.
    """
    source = ast.parse((folder / "utils" / "dataset_registry.py").read_text())
    tables = [
        node.value
        for node in source.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.targets[0]).endswith("_TASK_DATASETS")
    ]
    return {
        str(task.arg): ast.literal_eval(field.value)
        for table in tables
        for task in table.keywords
        if isinstance(task.value, ast.Call)
        for field in task.value.keywords
        if field.arg == "horizon"
    }
