"""robosuite 1.5: manipulation tasks in MuJoCo, with robots of several makers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    Observation,
    SimulatorEnv,
    camera_shapes,
    observation_space,
    require_known,
    require_package,
    require_picture_sizes,
    spaced,
)
from rlinf.envs.requirements import Requirements

TASKS = (
    "Door", "Lift", "NutAssembly", "NutAssemblyRound", "NutAssemblySingle", "NutAssemblySquare",
    "PickPlace", "PickPlaceBread", "PickPlaceCan", "PickPlaceCereal", "PickPlaceMilk",
    "PickPlaceSingle", "Stack", "ToolHang", "TwoArmHandover", "TwoArmLift", "TwoArmPegInHole",
    "TwoArmTransport", "Wipe",
)  # fmt: skip
CAMERAS = (
    "agentview", "frontview", "birdview", "sideview", "robot0_robotview", "robot0_eye_in_hand",
)  # fmt: skip
_SECOND_ROBOT = ("robot1_robotview", "robot1_eye_in_hand")
ROBOTS = ("Panda", "Sawyer", "IIWA", "Jaco", "Kinova3", "UR5e")


@dataclass(frozen=True)
class RobosuiteOptions:
    """Options of the ``robosuite`` env type."""

    only_with: ClassVar = {"image_size": "images: true", "depth": "images: true"}

    task: str
    """Task, for example ``Lift``."""

    robot: str = "Panda"
    """Robot; a task for two arms takes two of them."""

    dense_reward: bool = True
    """Whether rewards say how near success is; false: 1 at success alone."""

    images: bool = False
    """Whether observations hold ``main_images`` and ``wrist_images``."""

    depth: bool = False
    """Whether observations hold ``depth.main`` and ``depth.wrist``, metres."""

    image_size: int = 84
    """Height and width of the pictures in pixels."""

    camera: str = "agentview"
    """Camera of ``main_images`` and of videos."""


class RobosuiteEnv(SimulatorEnv):
    """A task from proprioception and the poses of its objects; success is the task's own criterion.

    ``states`` are robosuite's ``proprio-state`` of every robot and its ``object-state``. Actions
    move the gripper (OSC_POSE at 20 Hz, in [-1, 1]) and close it. An episode ends at success.
    """

    Options = RobosuiteOptions
    example: ClassVar[dict[str, Any]] = {"task": "Lift"}
    # From 3.12 on MuJoCo's enumerations no longer equal their numbers inside a tuple, which
    # robosuite counts on.
    requirements = Requirements(
        packages=("robosuite==1.5.2", "mujoco==3.3.0", "gymnasium==1.4.0"),
        module="robosuite",
        download_mb=340,
        disk_mb=1150,
        licence="MIT",
        libraries={"libEGL.so.1": "libegl1", "libGL.so.1": "libgl1"},
        variables={"MUJOCO_GL": "egl"},
    )
    control_rate = 20.0
    skips_observations = True
    never_black = ("main_images",)

    def __init__(self, options: RobosuiteOptions) -> None:
        from rlinf.envs.mujoco.picture import Painter

        super().__init__(options)
        self._env = _make(options)
        self._painter = Painter(self._env.sim.model._model)
        self.task_descriptions = (spaced(options.task),)
        self._seen = self._env.reset()
        shapes: dict[str, tuple[int, ...]] = {"states": self._states().shape}
        if options.images:
            self._cameras = {"main_images": options.camera, "wrist_images": "robot0_eye_in_hand"}
            size = (options.image_size, options.image_size)
            shapes.update(camera_shapes(dict.fromkeys(self._cameras, size), depth=options.depth))
        self.observation_space = observation_space(shapes)
        low, high = (np.asarray(limit, np.float32) for limit in self._env.action_spec)
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @classmethod
    def check(cls, options: RobosuiteOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks, robots and cameras, and sizes that no picture has."""
        require_package("robosuite", cls.requirements)
        require_known("task", options.task, TASKS)
        require_known("robot", options.robot, ROBOTS)
        cameras = CAMERAS + (_SECOND_ROBOT if _two_arms(options.task) else ())
        if options.task.startswith("PickPlace"):  # the arena with bins has none at its side
            cameras = tuple(camera for camera in cameras if camera != "sideview")
        require_known("camera", options.camera, cameras)
        require_picture_sizes(options)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the episode of ``seed``, on the model that was built."""
        # The samplers of the task hold this generator, so that it is set and not replaced.
        self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        self._env.reset()
        for robot in self._env.robots:
            for gripper in robot.gripper.values():
                # What robosuite's reset leaves: how far the fingers were told to close.
                gripper.current_action = np.zeros(gripper.dof)
        self._seen = self._env._get_observations(force_update=True)
        return self.observe(), {}

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action without drawing a picture."""
        self._seen, reward, _, _ = self._env.step(np.asarray(action, np.float64))
        success = bool(self._env._check_success())
        return float(reward), success, False, {"success": success}

    def observe(self) -> Observation:
        """Return states and pictures of the present state."""
        observation = {"states": self._states()}
        if self.options.images:
            data, options = self._env.sim.data._data, self.options
            seen = self._painter.observations(
                data, self._cameras, options.image_size, depth=options.depth
            )
            observation.update(seen)
        return observation

    def render(self) -> Any:
        """Return a picture, uint8 [256, 256, 3]."""
        return self._painter.paint(self._env.sim.data._data, self.options.camera, 256)

    def get_state(self) -> dict[str, Any]:
        """The simulation, its controllers, and what the task counts."""
        from rlinf.envs.mujoco.robosuite_state import robosuite_state

        return robosuite_state(self._env)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        from rlinf.envs.mujoco.robosuite_state import continue_robosuite

        continue_robosuite(self._env, state)
        self._seen = self._env._get_observations()

    def close(self) -> None:
        """Free model and graphics."""
        self._painter.close()
        self._env.close()

    def _states(self) -> np.ndarray:
        keys = sorted(key for key in self._seen if key.endswith("proprio-state"))
        parts = [self._seen[key] for key in [*keys, "object-state"] if key in self._seen]
        return np.concatenate(parts).astype(np.float32)


def _make(options: RobosuiteOptions) -> Any:
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    import robosuite

    return robosuite.make(
        options.task,
        robots=[options.robot] * 2 if _two_arms(options.task) else options.robot,
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        reward_shaping=options.dense_reward,
        control_freq=RobosuiteEnv.control_rate,
        hard_reset=False,
        ignore_done=True,
        seed=0,  # of what is drawn when the model is built, such as the size of a cube
    )


def _two_arms(task: str) -> bool:
    return task.startswith("TwoArm")
