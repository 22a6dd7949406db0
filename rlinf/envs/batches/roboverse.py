"""RoboVerse: tasks of MetaSim, on the simulator that is asked for, a whole batch together."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    BatchStep,
    Observation,
    SimulatorBatch,
    require_known,
    require_package,
    require_picture_sizes,
)
from rlinf.envs.batches import require_device, row_space, source_on_path, to_numpy
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

SIMULATORS = ("isaacsim", "isaacgym", "genesis", "mujoco", "mjx", "newton", "pybullet", "sapien3")
SOLVERS = ("pyroki", "curobo", "builtin")
CAMERAS = {"main_images": "camera", "wrist_images": "wrist_camera"}
POSITION_STEP, ROTATION_STEP = 0.02, 0.05


@dataclass(frozen=True)
class RoboVerseOptions:
    """Options of the ``roboverse`` env type."""

    task: str
    """Task as RoboVerse registers it, for example ``libero.pick_butter``."""

    robot: str = "franka"
    """Robot, one arm with a gripper."""

    simulator: str = "mujoco"
    """Simulator that computes: ``mujoco`` and others on the CPU, ``isaacsim`` on a GPU."""

    solver: str = "pyroki"
    """Who finds the joints of a pose: ``pyroki``, ``curobo`` (CUDA), or ``builtin``."""

    device: str = "cpu"
    """Device of the tensors: ``cpu``, or ``cuda:0``."""

    image_size: int = 224
    """Height and width of both cameras in pixels."""

    camera_position: tuple[float, float, float] = (1.5, 0.0, 1.5)
    """Where the camera of ``main_images`` is, in metres."""

    camera_target: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """What it looks at."""


class RoboVerseEnv(SimulatorBatch):
    """Rows of one task, seen by two cameras; success ends an episode and earns 1.

    ``main_images`` and ``wrist_images`` [image_size, image_size, 3]; ``proprioception`` [8] is the
    position of the hand in the world, its axis times angle, and the two fingers. Actions [7] in
    [-1, 1] move the hand by up to 2 cm and turn it by up to 0.05 rad, both along the axes of the
    world, from where it is; a last one above 0 opens the gripper. Of the n recorded starts of a
    task, an episode takes number ``seed % n``.
    """

    Options = RoboVerseOptions
    example: ClassVar[dict[str, Any]] = {"task": "libero.pick_butter"}
    requirements = Requirements(
        packages=(
            "torch==2.13.0",
            "torchvision==0.28.0",
            "gymnasium==1.4.0",
            "dm-control==1.0.50",
            "mujoco==3.17.0",
            "loguru==0.7.3",
            "huggingface-hub==1.33.0",
            "numpy-quaternion==2024.0.13",
            "opencv-python==4.11.0.86",
            "scipy==1.17.1",
            "rootutils==1.0.7",
            "defusedxml==0.7.1",
            "portalocker==3.2.0",
            "imageio==2.37.2",
            "pyyaml==6.0.3",
        ),
        module="metasim",
        download_mb=600,
        disk_mb=2000,
        licence="Apache-2.0; assets their own",
        variables={"MUJOCO_GL": "egl"},
        source="a checkout of github.com/RoboVerseOrg/RoboVerse with metasim and roboverse_data",
        source_folders=("metasim", "roboverse_data"),
    )

    def __init__(self, options: RoboVerseOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        if source := source_on_path():
            os.chdir(source)  # assets are looked up from there
        import torch
        from metasim.task.registry import get_task_class
        from metasim.utils.ik_solver import setup_ik_solver

        self._torch: Any = torch
        try:
            task = get_task_class(options.task)
        except KeyError as error:
            raise ConfigError(str(error.args[0]), key="options.task") from error
        # It belongs to the class; each batch, and what it tells its simulator, has its own.
        scenario = copy.deepcopy(task.scenario).update(
            robots=[options.robot],
            simulator=options.simulator,
            num_envs=num_envs,
            headless=True,
        )
        self._robot: Any = scenario.robots[0]
        if isinstance(self._robot, str):  # one that it knows is a description by now
            raise ConfigError(f"RoboVerse has no robot `{options.robot}`", key="options.robot")
        scenario.update(cameras=_cameras(options, self._robot))
        self._env: Any = task(scenario=scenario, device=options.device)
        self._starts = self._recorded_starts()
        self._solver: Any = setup_ik_solver(self._robot, solver=options.solver)
        names = self._env.handler.get_joint_names(self._robot.name, sort=True)
        # States hold joints by their names' order; the solver counts from the base.
        self._order = [names.index(name) for name in self._robot.actuators]
        self._fingers = [names.index(name) for name in self._robot.ee_joint_names]
        state = self._checked(self._env.reset()[0])
        self._hand = state.robots[self._robot.name].body_names.index(self._robot.ee_body_name)
        self._parts, self._seen = self._arm(state), self._observed(state)
        words = getattr(task, "task_desc", None) or options.task.replace("_", " ")
        self.task_descriptions = (str(words),)
        self.observation_space = row_space(self._seen)
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    @classmethod
    def check(cls, options: RoboVerseOptions, max_episode_steps: int) -> None:
        """Refuse unknown simulators and solvers, and an env process without the source."""
        source_on_path()
        require_package("roboverse", cls.requirements)
        require_known("simulator", options.simulator, SIMULATORS)
        require_known("solver", options.solver, SOLVERS)
        require_device(options.device)
        require_picture_sizes(options)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows."""
        for row, seed in zip(rows.tolist(), seeds.tolist()):  # noqa: B905 - Python 3.8
            # One start for one row: simulators disagree on which of several is whose.
            start = None if self._starts is None else [self._starts[seed % len(self._starts)]]
            state, _ = self._env.reset(states=start, env_ids=[int(row)])
            self._take(state, [int(row)])
        return dict(self._seen)

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A]."""
        state, _, terminated, time_out, _ = self._env.step(self._joint_targets(actions))
        self._take(state, list(range(self.num_envs)))
        success = to_numpy(terminated).astype(bool)
        return BatchStep(
            observations=dict(self._seen),
            rewards=success.astype(np.float32),
            terminated=success,
            truncated=to_numpy(time_out).astype(bool),
            success=success,
        )

    def render(self, row: int) -> np.ndarray:
        """Return the picture of the first camera."""
        frame: np.ndarray = self._seen["main_images"][row]
        return frame

    def close(self) -> None:
        """End the simulation."""
        self._env.close()

    def _recorded_starts(self) -> Any:
        """All that were recorded, so that a seed means the same in batches of every size."""
        env = self._env
        if not getattr(env, "traj_filepath", None):
            return env._initial_states
        from metasim.utils.demo_util import get_traj

        return get_traj(env.traj_filepath, self._robot, env.handler)[0]

    def _take(self, state: Any, rows: list[int]) -> None:
        """Note what rows show; a reset tells of the rows that it was asked for, or of all."""
        parts, seen = self._arm(self._checked(state)), self._observed(state)
        where = rows if len(parts["joints"]) == len(rows) else list(range(self.num_envs))
        self._seen = {key: value.copy() for key, value in self._seen.items()}
        for key, value in seen.items():
            self._seen[key][where] = value
        for key, value in parts.items():
            self._parts[key][where] = value

    def _arm(self, state: Any) -> dict[str, np.ndarray]:
        """Joints [N, J], pose of the hand and of the base [N, 7], in the world, w first."""
        robot = state.robots[self._robot.name]
        return {
            "joints": to_numpy(robot.joint_pos),
            "hand": to_numpy(robot.body_state)[:, self._hand, :7],
            "base": to_numpy(robot.root_state)[:, :7],
        }

    def _checked(self, state: Any) -> Any:
        if not hasattr(state, "robots"):
            raise ConfigError(
                f"the task `{self.options.task}` shows a vector and no cameras; RoboVerse has it "
                "for its own learners",
                key="options.task",
            )
        return state

    def _observed(self, state: Any) -> Observation:
        parts = self._arm(state)
        hand, fingers = parts["hand"], parts["joints"][:, self._fingers]
        pictures = {key: to_numpy(state.cameras[name].rgb) for key, name in CAMERAS.items()}
        own = np.concatenate([hand[:, :3], _axis_angle(hand[:, 3:]), fingers], axis=1)
        return {
            **{key: value.astype(np.uint8) for key, value in pictures.items()},
            "proprioception": own.astype(np.float32),
        }

    def _joint_targets(self, actions: np.ndarray) -> list[dict[str, Any]]:
        """What each robot's joints shall be, by name, for moves of its hand [N, 7]."""
        from metasim.utils.ik_solver import process_gripper_command

        hand, base = self._parts["hand"], self._parts["base"]
        moves = np.clip(actions, -1.0, 1.0)
        position = hand[:, :3] + POSITION_STEP * moves[:, :3]
        turned = _times(_quaternion(ROTATION_STEP * moves[:, 3:6]), hand[:, 3:])
        away = _inverse(base[:, 3:])  # the solver's poses are those in the frame of the base
        joints, _ = self._solver.solve_ik_batch(
            self._tensor(_rotated(away, position - base[:, :3])),
            self._tensor(_times(away, turned)),
            self._tensor(self._parts["joints"][:, self._order]),
        )
        opens = self._tensor(moves[:, 6] > 0)
        fingers = process_gripper_command(opens, self._robot, self._env.device)
        targets: list[dict[str, Any]] = self._solver.compose_joint_action(
            joints, fingers, return_dict=True
        )
        return targets

    def _tensor(self, array: np.ndarray) -> Any:
        torch = self._torch
        return torch.as_tensor(array, dtype=torch.float32, device=self._env.device)


def _cameras(options: RoboVerseOptions, robot: Any) -> list[Any]:
    """One that stands, and one on the hand."""
    from metasim.scenario.cameras import PinholeCameraCfg

    size = {"width": options.image_size, "height": options.image_size, "data_types": ["rgb"]}
    return [
        PinholeCameraCfg(
            name=CAMERAS["main_images"],
            pos=options.camera_position,
            look_at=options.camera_target,
            **size,
        ),
        PinholeCameraCfg(
            name=CAMERAS["wrist_images"],
            mount_to=robot.name,
            mount_link=robot.ee_body_name,
            mount_pos=(0.1, 0.0, 0.04),
            mount_quat=(0.0, 0.7071068, 0.0, 0.7071068),
            **size,
        ),
    ]


def _times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Products of quaternions [N, 4], w first: first ``right``, then ``left``."""
    (w, x, y, z), (a, b, c, d) = left.T, right.T
    return np.stack(
        [
            w * a - x * b - y * c - z * d,
            w * b + x * a + y * d - z * c,
            w * c - x * d + y * a + z * b,
            w * d + x * c - y * b + z * a,
        ],
        axis=1,
    )


def _inverse(quaternions: np.ndarray) -> np.ndarray:
    """Inverses of unit quaternions [N, 4]."""
    inverse: np.ndarray = quaternions * np.array([1.0, -1.0, -1.0, -1.0])
    return inverse


def _rotated(quaternions: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Vectors [N, 3] turned by unit quaternions [N, 4]."""
    pure = np.concatenate([np.zeros((len(vectors), 1)), vectors], axis=1)
    turned: np.ndarray = _times(_times(quaternions, pure), _inverse(quaternions))[:, 1:]
    return turned


def _quaternion(turns: np.ndarray) -> np.ndarray:
    """Unit quaternions [N, 4] of rotation vectors [N, 3], in radians."""
    angle = np.linalg.norm(turns, axis=1, keepdims=True)
    sine = np.sinc(angle / (2 * np.pi)) / 2  # sin(angle / 2) / angle
    return np.concatenate([np.cos(angle / 2), sine * turns], axis=1)


def _axis_angle(quaternions: np.ndarray) -> np.ndarray:
    """Rotation vectors [N, 3] of unit quaternions [N, 4], of at most half a turn."""
    near = np.where(quaternions[:, :1] < 0, -quaternions, quaternions)
    sine = np.linalg.norm(near[:, 1:], axis=1, keepdims=True)
    angle = 2 * np.arctan2(sine, near[:, :1])
    found: np.ndarray = near[:, 1:] * np.where(sine > 1e-8, angle / np.maximum(sine, 1e-8), 2.0)
    return found
