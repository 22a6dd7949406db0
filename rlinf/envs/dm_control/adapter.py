"""dm_control: the control suite's tasks, and manipulation by a Jaco arm, in MuJoCo."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    Observation,
    SimulatorEnv,
    camera_shapes,
    observation_space,
    package_folder,
    require_known,
    require_package,
    require_picture_sizes,
)
from rlinf.envs.mujoco.models import shared_models
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

SUITE = {
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}
"""Domains of the suite, and the tasks of each."""

_KEEP_MODEL = ("cartpole", "cheetah", "hopper", "humanoid", "pendulum", "walker")
"""Domains whose tasks never change their model, which the envs of a process then share."""

_FEATURES = (
    "stack_2_bricks", "stack_2_bricks_moveable_base", "stack_3_bricks",
    "stack_3_bricks_random_order", "stack_2_of_3_bricks_random_order",
    "reassemble_3_bricks_fixed_order", "reassemble_5_bricks_random_order", "lift_brick",
    "lift_large_box", "place_brick", "place_cradle", "reach_duplo", "reach_site",
)  # fmt: skip
MANIPULATION = tuple(
    f"{name}_{seen}"
    for name in _FEATURES
    for seen in ("features", "vision")
    if (name, seen) != ("stack_3_bricks_random_order", "vision")
)
"""Tasks of the arm; where ``_features`` see the poses of the objects, ``_vision`` has a picture."""

TASKS = (
    *(f"{domain}-{task}" for domain, tasks in SUITE.items() for task in tasks.split()),
    *MANIPULATION,
)


@dataclass(frozen=True)
class DmControlOptions:
    """Options of the ``dm_control`` env type."""

    only_with: ClassVar = {"image_size": "images: true", "depth": "images: true"}

    task: str
    """Task: ``walker-walk``, ``lift_brick_features``."""

    success_reward: float | None = None
    """Reward of a step, in [0, 1], from which on the task counts as solved at that step; by
    default no step does: dm_control has rewards and no success."""

    images: bool = False
    """Whether observations hold ``main_images`` [image_size, image_size, 3]."""

    depth: bool = False
    """Whether observations hold ``depth.main`` [image_size, image_size], metres."""

    image_size: int = 84
    """Height and width of ``main_images`` in pixels."""

    camera: str = ""
    """Camera of ``main_images`` and of videos, by its name in the model; the model's first one by
    default."""


class DmControlEnv(SimulatorEnv):
    """A task from its observations, flattened and joined in the order in which it lists them.

    An episode ends where the task ends it, which few do. The reward is the task's, in [0, 1] but
    for ``lqr``, whose actions are not bounded either; other actions have the bounds of the model.
    """

    Options = DmControlOptions
    example: ClassVar[dict[str, Any]] = {"task": "walker-walk"}
    # MuJoCo 4 has dropped fields of a model that dm_control reads.
    requirements = Requirements(
        packages=("dm-control==1.0.50", "mujoco==3.17.0", "gymnasium==1.4.0"),
        module="dm_control",
        download_mb=145,
        disk_mb=400,
        licence="Apache-2.0",
        libraries={"libEGL.so.1": "libegl1"},
        variables={"MUJOCO_GL": "egl"},
    )
    skips_observations = True

    def __init__(self, options: DmControlOptions) -> None:
        from rlinf.envs.dm_control.quick import use_quick_versions

        super().__init__(options)
        use_quick_versions()
        arm = options.task in MANIPULATION
        self._env = _arm_task(options.task) if arm else _suite_task(options.task)
        self.control_rate = 1.0 / self._env.control_timestep()
        self._random = self._env.random_state if arm else self._env.task.random
        self._painter: Any = None
        if options.camera:
            model = self._env.physics.model.ptr
            cameras = [model.camera(number).name for number in range(model.ncam)]
            require_known("camera", options.camera, cameras)
        self.task_descriptions = (options.task.replace("-", " ").replace("_", " "),)
        first, _ = self.reset(seed=0)
        shapes: dict[str, tuple[int, ...]] = {"states": first["states"].shape}
        if options.images:
            size = (options.image_size, options.image_size)
            shapes.update(camera_shapes({"main_images": size}, depth=options.depth))
        self.observation_space = observation_space(shapes)
        limits = self._env.action_spec()
        low, high = (
            np.broadcast_to(limit, limits.shape).astype(np.float32)
            for limit in (limits.minimum, limits.maximum)
        )
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @classmethod
    def check(cls, options: DmControlOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks, and tasks of pictures without them."""
        require_package("dm_control", cls.requirements)
        require_known("task", options.task, TASKS)
        if options.camera and (cameras := _cameras(options.task)):
            require_known("camera", options.camera, cameras)
        require_picture_sizes(options)
        if options.task.endswith("_vision") and not options.images:
            raise ConfigError(
                f"{options.task} shows its objects in pictures alone; set `images: true`",
                key="options.images",
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the episode of ``seed``."""
        self._random.seed(seed)
        order = getattr(self._env.task, "_initial_order", None)
        if order is not None:  # shuffled in place: what the last episode left must not show
            order.sort()
        self._seen = self._env.reset().observation
        if _changes(self.options.task):
            self._forget_picture()
        return self.observe(), {}

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action without drawing a picture."""
        now = self._env.step(np.asarray(action, np.float64))
        self._seen = now.observation
        wanted = self.options.success_reward
        success = wanted is not None and now.reward >= wanted
        return float(now.reward), now.last(), False, {"success": bool(success)}

    def observe(self) -> Observation:
        """Return states and picture of the present state."""
        flat = [
            value if getattr(value, "ndim", 0) == 1 else np.ravel(value)
            for value in self._seen.values()
        ]
        observation = {"states": np.concatenate(flat, dtype=np.float32, casting="same_kind")}
        if self.options.images:
            physics, options = self._env.physics, self.options
            cameras, size = {"main_images": self._camera}, options.image_size
            observation.update(
                self._drawer.observations(physics.data.ptr, cameras, size, depth=options.depth)
            )
        return observation

    def render(self) -> Any:
        """Return a picture, uint8 [256, 256, 3]."""
        return self._drawer.paint(self._env.physics.data.ptr, self._camera, 256)

    def get_state(self) -> dict[str, Any] | None:
        """Of a task of the suite the simulation: its own attributes are those of its reset. Those
        of the arm keep what they observed, and are replayed."""
        if self.options.task in MANIPULATION:
            return None
        from rlinf.envs.mujoco.state import simulation_state

        physics = self._env.physics
        return simulation_state(physics.model.ptr, physics.data.ptr)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        from rlinf.envs.mujoco.state import continue_simulation

        physics = self._env.physics
        continue_simulation(physics.model.ptr, physics.data.ptr, state)
        self._seen = self._env.task.get_observation(physics)

    def close(self) -> None:
        """Free model and graphics."""
        self._forget_picture()
        self._env.close()

    @property
    def _camera(self) -> str:
        return self.options.camera or str(self._env.physics.model.ptr.camera(0).name)

    @property
    def _drawer(self) -> Any:
        """Who draws the present model."""
        from rlinf.envs.mujoco.picture import Painter

        if self._painter is None:
            self._painter = Painter(self._env.physics.model.ptr)
        return self._painter

    def _forget_picture(self) -> None:
        if self._painter is not None:
            self._painter.close()
            self._painter = None


def _cameras(task: str) -> list[str]:
    """The cameras of a task, read from the file of its model, of which a task may leave out some;
    empty where there is no such file."""
    if task in MANIPULATION:
        return ["front_close"]
    file = package_folder("dm_control") / "suite" / f"{task.partition('-')[0]}.xml"
    return re.findall(r'<camera[^>]*name="([^"]*)"', file.read_text()) if file.exists() else []


def _changes(task: str) -> bool:
    """Whether a reset makes another model or terrain: bricks are fixed in another order."""
    return "bricks" in task or task == "quadruped-escape"


def _suite_task(name: str) -> Any:
    """A task of the suite, without its time limit."""
    from dm_control import suite

    domain, task = name.split("-")
    with shared_models() if domain in _KEEP_MODEL else contextlib.nullcontext():
        # The seed is of what a model draws when it is built: how stiff the joints of lqr are.
        return suite.load(domain, task, task_kwargs={"random": 0, "time_limit": float("inf")})


def _arm_task(name: str) -> Any:
    """A task of the arm, without its time limit and its own pictures."""
    from dm_control import composer, manipulation  # noqa: F401 - registers the tasks
    from dm_control.composer.observation.observable import MJCFCamera
    from dm_control.manipulation.shared import registry

    task = registry.get_constructor(name)()
    for seen in task.observables.values():
        if isinstance(seen, MJCFCamera):
            seen.enabled = False
    return composer.Environment(
        task,
        random_state=0,
        max_reset_attempts=10,  # objects are drawn until they fit; after this many it is a fault
        recompile_mjcf_every_episode=_changes(name),
    )
