"""MetaWorld: fifty manipulation tasks of a Sawyer arm, one at a time or many together."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    Observation,
    SimulatorEnv,
    camera_shapes,
    observation_space,
    require_known,
    require_picture_sizes,
)
from rlinf.envs.metaworld.sentences import SENTENCES
from rlinf.envs.requirements import Requirements
from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError, MissingPackageError

CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
STATE_SIZE = 39
ROBOT_STATE_SIZE = 4
MT10 = (
    "reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3",
    "button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3",
)  # fmt: skip
ML45_TEST = ("bin-picking-v3", "box-close-v3", "hand-insert-v3", "door-lock-v3", "door-unlock-v3")
BENCHMARKS = ("MT10", "MT50", "ML45-train", "ML45-test")
REWARDS = ("dense", "sparse")
INSTRUCTIONS = ("name", "sentence")
_MAX_STEPS = 500


@dataclass(frozen=True)
class MetaWorldOptions:
    """Options of the ``metaworld`` env type."""

    only_with: ClassVar = {
        "depth": "images: true",
        "image_size": "images: true",
        "effects": "images: true",
        "partially_observable": "states: true",
        "robot_states": "states: true",
    }

    task: str
    """Task of MT50, for example ``reach-v3``."""

    reward: str = "dense"
    """``dense``, MetaWorld's own, from 0 to 10 at every step; or ``sparse``: success earns 1 and
    ends the episode, nothing else earns anything, as in published runs of large models."""

    instructions: str = "name"
    """How a policy that reads words is told its task: by the ``name`` (`pick place`), or by the
    ``sentence`` that published sets and models have (`Pick and place a puck to a goal`)."""

    states: bool = True
    """Whether observations hold ``states`` [39]: two frames of arm and objects, then the goal."""

    robot_states: bool = False
    """Whether ``states`` is [4], as in published sets and models of MetaWorld: what the robot knows
    of itself, the position of the gripper and how far it is open."""

    images: bool = False
    """Whether observations hold ``main_images`` [image_size, image_size, 3]."""

    depth: bool = False
    """Whether observations hold ``depth.main`` [image_size, image_size], metres."""

    image_size: int = 128
    """Height and width of ``main_images`` in pixels."""

    camera: str = "corner2"
    """Camera of ``main_images`` and of videos."""

    render_size: int = 320
    """Height and width of the pictures of a video."""

    effects: bool = False
    """Whether shadows, reflections, sky and multisampling are drawn, as MetaWorld draws them and
    published models saw them: several times slower on a CPU."""

    partially_observable: bool = False
    """Whether the goal is hidden from ``states`` (its three entries are 0)."""


class MetaWorldEnv(SimulatorEnv):
    """One or several tasks with a goal and objects placed at random, by the reset seed alone.

    ``task`` is one of MT50 or a set: ``MT10``, ``MT50``, ``ML45-train``, ``ML45-test``. Of n tasks
    an episode plays number ``seed % n``. Positions are drawn as MetaWorld draws its own
    tasks, afresh for every seed instead of from a list of fifty. ``info["success"]`` is the task's
    own criterion; it ends an episode where the reward is ``sparse``. The simulator gives its state.
    """

    Options = MetaWorldOptions
    example: ClassVar[dict[str, Any]] = {"task": "MT10"}
    imported = ("rlinf.envs.metaworld.task",)
    # gymnasium's part for MuJoCo imports `packaging` without saying so; 3.1.1 is written against
    # MuJoCo 3.3.0.
    requirements = Requirements(
        packages=("metaworld==3.1.1", "mujoco==3.3.0", "gymnasium==1.4.0", "packaging==26.3"),
        module="metaworld",
        extra="metaworld",
        download_mb=95,
        disk_mb=350,
        licence="MIT",
        variables={"MUJOCO_GL": "egl"},
    )
    skips_observations = True
    control_rate = 80.0  # five steps of 2.5 ms

    def __init__(self, options: MetaWorldOptions) -> None:
        super().__init__(options)
        self._names = tasks_of(options.task)
        self._tasks: dict[int, Any] = {}
        self._task = self._task_of(0)
        self._states = np.zeros(STATE_SIZE)
        words = tuple(name.removesuffix("-v3").replace("-", " ") for name in self._names)
        told = options.instructions == "sentence"
        self.task_descriptions = tuple(map(SENTENCES.__getitem__, words)) if told else words
        self._sparse = options.reward == "sparse"
        if options.camera != "gripperPOV":  # which may be shut in between the fingers
            self.never_black = ("main_images",)
        shapes: dict[str, tuple[int, ...]] = {}
        self._shown = ROBOT_STATE_SIZE if options.robot_states else STATE_SIZE
        if options.states:
            shapes["states"] = (self._shown,)
        if options.images:
            size = (options.image_size, options.image_size)
            shapes.update(camera_shapes({"main_images": size}, depth=options.depth))
        self.observation_space = observation_space(shapes)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    @classmethod
    def check(cls, options: MetaWorldOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks and cameras, and episodes longer than the simulator's limit."""
        names = (*task_names(), *BENCHMARKS)
        require_known("task", options.task, names)
        require_known("reward", options.reward, REWARDS)
        require_known("instructions", options.instructions, INSTRUCTIONS)
        if max_episode_steps > _MAX_STEPS:
            raise ConfigError(
                f"{max_episode_steps} is beyond the limit of MetaWorld episodes; "
                f"nearest: {_MAX_STEPS}",
                key="max_episode_steps",
            )
        _check_pictures(options)

    @classmethod
    def expert(cls, options: MetaWorldOptions) -> Callable[[Observation], np.ndarray] | None:
        """MetaWorld's own scripted policy of the task; it reads the whole state."""
        if not options.states or options.robot_states or options.partially_observable:
            return None
        from metaworld.policies import ENV_POLICY_MAP

        policies = [ENV_POLICY_MAP[name]() for name in tasks_of(options.task)]
        # They ask for more than the box holds, and say so each time; it is clipped below.
        warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")

        def act(observation: Observation) -> np.ndarray:
            policy = policies[int(observation.get(TASK_IDS, np.zeros(())))]
            action: np.ndarray = policy.get_action(observation["states"].astype(np.float64))
            clipped: np.ndarray = np.clip(action, -1.0, 1.0).astype(np.float32)
            return clipped

        return act

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the episode of ``seed``."""
        seed = seed or 0
        self.task_id = seed % len(self._names)
        self._task = self._task_of(self.task_id)
        self._states = self._task.reset(seed)
        return self.observe(), {}

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action [4], without drawing a picture: displacement of the gripper x, y, z
        and closing effort."""
        self._states, reward, info = self._task.step(action)
        success = info["success"] = bool(info["success"])
        if self._sparse:
            return float(success), success, False, info
        return reward, False, False, info

    def observe(self) -> Observation:
        """Return states and picture of the present state."""
        observation: Observation = {}
        options = self.options
        if options.states:
            observation["states"] = self._states[: self._shown].astype(np.float32)
        if options.images:
            observation.update(
                self._task.observations(
                    options.camera, options.image_size, effects=options.effects, depth=options.depth
                )
            )
        return observation

    def render(self) -> Any:
        """Return a picture, uint8 [render_size, render_size, 3]."""
        options = self.options
        return self._task.picture(options.camera, options.render_size, effects=options.effects)

    def get_state(self) -> dict[str, Any]:
        """Return physics, placements and the attributes that rewards depend on."""
        return {**self._task.get_state(), "states": self._states}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._states = state["states"]
        self._task.set_state(state)

    def close(self) -> None:
        """Release the simulation."""
        for task in self._tasks.values():
            task.close()

    def discard(self) -> None:
        """See :meth:`SimulatorEnv.discard`."""
        for task in self._tasks.values():
            task.discard()

    def _task_of(self, index: int) -> Any:
        """The task of a number, built when it is first played."""
        from rlinf.envs.metaworld.task import MetaWorldTask

        if index not in self._tasks:
            self._tasks[index] = MetaWorldTask(
                self._names[index], partially_observable=self.options.partially_observable
            )
        return self._tasks[index]


@cache
def task_names() -> tuple[str, ...]:
    """The tasks of the installed MetaWorld, read from its source without importing it."""
    for package in ("metaworld", "mujoco"):
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise MissingPackageError(package, "metaworld", "the env type `metaworld`")
        if package == "metaworld":
            source = Path(found.submodule_search_locations[0]) / "env_dict.py"
    return tuple(dict.fromkeys(re.findall(r'"([a-z-]+-v3)": envs\.', source.read_text())))


def tasks_of(name: str) -> tuple[str, ...]:
    """Return the tasks of a benchmark, or the one task of this name.

    MT10, MT50 and the division of ML45 are those of Yu et al. 2019 (arXiv:1910.10897), figure 3.
    """
    every = task_names()
    sets = {"MT10": MT10, "MT50": every, "ML45-test": ML45_TEST}
    if name == "ML45-train":
        return tuple(task for task in every if task not in ML45_TEST)
    return sets.get(name, (name,))


def _check_pictures(options: MetaWorldOptions) -> None:
    if not (options.states or options.images):
        raise ConfigError("`states` or `images` must be true, else nothing is seen", key="options")
    if options.robot_states and not options.images:
        raise ConfigError(
            "the robot knows of itself only, and nothing shows where the objects are; nearest: "
            "options.images=true, or options.robot_states=false",
            key="options.robot_states",
        )
    if options.robot_states and options.partially_observable:
        raise ConfigError(
            "has no effect with robot_states: true, which holds no goal; leave it out",
            key="options.partially_observable",
        )
    require_known("camera", options.camera, CAMERAS)
    require_picture_sizes(options)
