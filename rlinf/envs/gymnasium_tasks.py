"""Simulators that speak gymnasium's interface: what each is called, needs, and calls success.

Each is the ``gymnasium`` adapter with a table of tasks: states are flattened, a picture becomes
``main_images``, and time limits are those of the recipe.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from dataclasses import dataclass
from inspect import isbuiltin
from typing import Any, ClassVar

import numpy as np

from rlinf.envs.base import (
    Observation,
    observation_space,
    require_known,
    require_package,
    require_picture_sizes,
)
from rlinf.envs.gymnasium_env import GymnasiumEnv, GymnasiumOptions
from rlinf.envs.mujoco.models import shared_models
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

_GYMNASIUM = "gymnasium==1.4.0"


@dataclass(frozen=True)
class TaskOptions:
    """Options of an env type whose tasks are registered with gymnasium."""

    task: str
    """Task, as the simulator's package registers it."""


class GymnasiumTask(GymnasiumEnv):
    """A task of one package."""

    Options: ClassVar[type[Any]] = TaskOptions
    tasks: ClassVar[tuple[str, ...]]
    """Tasks that can be built from what the package brings."""

    name: ClassVar[str]
    """The env type."""

    requirements: ClassVar[Requirements]

    def __init__(self, options: TaskOptions) -> None:
        with shared_models() if self.keeps_model(options.task) else contextlib.nullcontext():
            super().__init__(
                GymnasiumOptions(
                    id=f"{self.requirements.module}:{options.task}",
                    success_key=self.success_key(options.task),
                    kwargs={"max_episode_steps": -1, **self.arguments(options)},
                )
            )
        name = re.sub(r"-v\d+$", "", options.task.rpartition("/")[2])
        self.task_descriptions = (re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower(),)

    @classmethod
    def draws_by_mujoco(cls, options: Any) -> bool:
        """The requirements say it."""
        del options
        return False

    @classmethod
    def success_key(cls, task: str) -> str:
        """Entry of ``info`` that says whether a task is solved."""
        return "is_success"

    @classmethod
    def keeps_model(cls, task: str) -> bool:
        """Whether a task never changes its MuJoCo model, which the envs of a process then share."""
        return False

    @classmethod
    def arguments(cls, options: Any) -> dict[str, Any]:
        """Further arguments of ``gymnasium.make``."""
        return {}

    @classmethod
    def check(cls, options: Any, max_episode_steps: int) -> None:
        """Refuse unknown tasks."""
        require_package(cls.name, cls.requirements)
        require_known("task", options.task, cls.tasks)


class DrawingTask(GymnasiumTask):
    """A task that draws its observations, of which those within a chunk of actions are left out."""

    Options: ClassVar[type[Any]] = TaskOptions
    skips_observations = True
    _looks = True
    """Whether an observation is wanted; else the last one will do."""

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action without drawing a picture."""
        self._looks = False
        try:
            _, reward, terminated, truncated, info = self.step(action)
        finally:
            self._looks = True
        return reward, terminated, truncated, info


@dataclass(frozen=True)
class SeenOptions(TaskOptions):
    """Options of an env type whose tasks are told in numbers, or shown."""

    only_with: ClassVar = {"image_size": "images: true"}

    images: bool = False
    """Show a picture [image_size, image_size, 3], and as ``states`` what the robot knows of itself;
    otherwise ``states`` say where everything is."""
    image_size: int = 128
    """Pixels of a side."""


class SeenTask(DrawingTask):
    """A task whose picture is drawn beside it."""

    Options: ClassVar[type[Any]] = SeenOptions
    _known: Any = None
    _painter: Any = None

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._shown = options
        if options.images:
            size, states = options.image_size, len(self.robot_states())
            self.state_parts = ()
            self.observation_space = observation_space(
                {"states": (states,), "main_images": (size, size, 3)}
            )
            self.never_black = ("main_images",)

    @classmethod
    def check(cls, options: Any, max_episode_steps: int) -> None:
        """Refuse unknown tasks, and pictures of no size."""
        super().check(options, max_episode_steps)
        require_picture_sizes(options)

    def robot_states(self) -> np.ndarray:
        """What the robot knows of itself [D]."""
        raise NotImplementedError

    def picture(self, size: int) -> np.ndarray:
        """The present state, uint8 [size, size, 3]."""
        raise NotImplementedError

    def observe(self) -> Observation:
        """Return the present state."""
        return self._converted(self._known)

    def close(self) -> None:
        """Free model and graphics."""
        if self._painter is not None:
            self._painter.close()
        super().close()

    def _converted(self, observation: Any) -> Observation:
        self._known = observation
        if self._looks:
            self._seen_last = self._seen_now(observation)
        return self._seen_last

    def _seen_now(self, observation: Any) -> Observation:
        if not self._shown.images:
            return super()._converted(observation)
        states = self.robot_states().astype(np.float32)
        return {"states": states, "main_images": self.picture(self._shown.image_size)}


class PandaGymEnv(SeenTask):
    """A Franka arm in PyBullet: reach, push, slide, pick and place, stack; by goals."""

    name = "panda_gym"
    example: ClassVar[dict[str, Any]] = {"task": "PandaReachDense-v3"}
    # Flip's texture is not in its package.
    tasks = tuple(
        f"Panda{name}{control}{reward}-v3"
        for name in ("Reach", "Push", "Slide", "PickAndPlace", "Stack")
        for control in ("", "Joints")
        for reward in ("", "Dense")
    )
    requirements = Requirements(
        packages=("panda-gym==3.0.7", "pybullet==3.2.7", _GYMNASIUM),
        module="panda_gym",
        download_mb=130,
        disk_mb=470,
        licence="MIT; PyBullet zlib",
    )

    def __init__(self, options: SeenOptions) -> None:
        super().__init__(options)
        # Its client looks every function up at every call; to look this one up disconnects.
        inner: Any = self._env.unwrapped
        client = inner.sim.physics_client
        for name, member in vars(importlib.import_module("pybullet")).items():
            if isbuiltin(member) and name != "disconnect":
                setattr(client, name, getattr(client, name))
        # Else contacts are solved in an order that depends on all that ever met.
        client.setPhysicsEngineParameter(deterministicOverlappingPairs=1)
        bodies = inner.sim._bodies_idx.items()
        others = [body for name, body in bodies if name != inner.robot.body_name]
        self._loose = [body for body in others if client.getDynamicsInfo(body, -1)[0] > 0.0]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode; what touched in the last one, which PyBullet remembers, must not show
        in it, so that everything is taken apart first."""
        inner: Any = self._env.unwrapped
        client = inner.sim.physics_client
        inner.robot.reset()
        for place, body in enumerate(self._loose):
            client.resetBasePositionAndOrientation(
                body, (5.0 + place, 5.0, 5.0), (0.0, 0.0, 0.0, 1.0)
            )
        client.performCollisionDetection()
        return super().reset(seed=seed, options=options)

    def robot_states(self) -> np.ndarray:
        """Position and velocity of the hand, and how far it is open where it is not locked."""
        inner: Any = self._env.unwrapped
        found: np.ndarray = inner.robot.get_obs()
        return found

    def picture(self, size: int) -> np.ndarray:
        """The view of its videos."""
        inner: Any = self._env.unwrapped
        names = ("target_position", "distance", "yaw", "pitch", "roll")
        view = {name: getattr(inner, f"render_{name}") for name in names}
        frame: np.ndarray = inner.sim.render(width=size, height=size, **view)
        return frame

    @classmethod
    def arguments(cls, options: Any) -> dict[str, Any]:
        """PyBullet's own renderer: it needs no graphics library."""
        return {"renderer": "Tiny"}


class GymnasiumRoboticsEnv(SeenTask):
    """Fetch arms, hands and mazes in MuJoCo, by goals; Fetch arms may be seen."""

    name = "gymnasium_robotics"
    example: ClassVar[dict[str, Any]] = {"task": "FetchReachDense-v4"}
    tasks = (
        *(
            f"Fetch{name}{reward}-v4"
            for name in ("Reach", "Push", "Slide", "PickAndPlace")
            for reward in ("", "Dense")
        ),
        *(f"HandReach{reward}-v3" for reward in ("", "Dense")),
        *(f"AdroitHand{name}-v1" for name in ("Door", "Hammer", "Pen", "Relocate")),
        *(f"PointMaze_{name}-v3" for name in ("Open", "UMaze", "Medium", "Large")),
        *(f"AntMaze_{name}-v5" for name in ("Open", "UMaze", "Medium", "Large")),
    )
    # From 3.12 on MuJoCo's enumerations no longer equal their numbers inside a tuple.
    requirements = Requirements(
        packages=(
            "gymnasium-robotics==1.4.2",
            "mujoco==3.3.0",
            "packaging==26.3",
            _GYMNASIUM,
        ),
        module="gymnasium_robotics",
        download_mb=75,
        disk_mb=210,
        licence="MIT",
        variables={"MUJOCO_GL": "egl"},
    )

    @classmethod
    def check(cls, options: Any, max_episode_steps: int) -> None:
        """Refuse unknown tasks, and pictures of those without a camera."""
        super().check(options, max_episode_steps)
        if options.images and not options.task.startswith("Fetch"):
            reason = (
                f"no camera looks at {options.task}, only at the tasks of Fetch; nearest: false"
            )
            raise ConfigError(reason, key="options.images")

    def robot_states(self) -> np.ndarray:
        """Position of the hand, how far its fingers are open, and the velocities of both [10]."""
        inner: Any = self._env.unwrapped
        seen: np.ndarray = inner._get_obs()["observation"]
        return seen if len(seen) == 10 else seen[[0, 1, 2, 9, 10, 20, 21, 22, 23, 24]]

    def picture(self, size: int) -> np.ndarray:
        """Hand, table, object and goal, from before the table."""
        from rlinf.envs.mujoco.picture import shared_painter

        inner: Any = self._env.unwrapped
        self._painter = shared_painter(inner.model)
        inner._render_callback()  # puts the goal where it is
        frame: np.ndarray = self._painter.paint(inner.data, "external_camera_0", size)
        return frame

    @classmethod
    def success_key(cls, task: str) -> str:
        """Fetch and HandReach say ``is_success``, Adroit and the mazes ``success``."""
        return "is_success" if task.startswith(("Fetch", "HandReach")) else "success"

    @classmethod
    def keeps_model(cls, task: str) -> bool:
        """Fetch and HandReach write nothing but where a picture shows the goal, before drawing."""
        return task.startswith(("Fetch", "HandReach"))

    @property
    def simulation(self) -> Any:
        """That of the task; of a maze that of who walks in it. Goals are those of the reset."""
        inner: Any = self._env.unwrapped
        for name in ("point_env", "ant_env"):
            inner = getattr(inner, name, inner).unwrapped
        return inner


@dataclass(frozen=True)
class PushTOptions(TaskOptions):
    """Options of the ``pusht`` env type."""

    task: str = "gym_pusht/PushT-v0"
    """Task, of which the package registers this one alone."""
    images: bool = False
    """Show a picture [96, 96, 3] and where the disc is, as the set `lerobot/pusht` does; otherwise
    ``states`` [5] say where the T is, too."""


class PushTEnv(DrawingTask):
    """A disc that pushes a T onto its outline, in the plane; success is 95 % of it covered."""

    Options = PushTOptions
    name = "pusht"
    example: ClassVar[dict[str, Any]] = {"task": "gym_pusht/PushT-v0"}
    tasks = ("gym_pusht/PushT-v0",)
    requirements = Requirements(
        packages=("gym-pusht==0.1.8", _GYMNASIUM),
        module="gym_pusht",
        download_mb=90,
        disk_mb=310,
        licence="Apache-2.0",
        libraries={"libGL.so.1": "libgl1"},
        variables={"SDL_VIDEODRIVER": "dummy"},
    )

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self._goal: Any = None
        self._block: Any = None
        inner: Any = self._env.unwrapped
        inner._get_coverage = self._coverage
        self._look = inner.get_obs
        inner.get_obs = self._seen_now

    def observe(self) -> Observation:
        """Return the present state, or picture."""
        return self._converted(self._seen_now())

    def _seen_now(self) -> Any:
        if self._looks:
            self._last = self._look()
        return self._last

    @classmethod
    def arguments(cls, options: Any) -> dict[str, Any]:
        """What it shows."""
        return {"obs_type": "pixels_agent_pos"} if options.images else {}

    def _given(self, action: Any) -> Any:
        """Two floats: the simulator counts with them ten times, and NumPy is slow for so few."""
        from pymunk import Vec2d

        return Vec2d(*action.tolist())

    def _coverage(self) -> Any:
        """Return how much of the goal is covered; its outline is drawn once per episode.

        The two parts of the T are joined in their order: the simulator takes them from a set, whose
        order is by address, and the last bit of its reward depends on that.
        """
        from gym_pusht.envs.pusht import pymunk_to_shapely

        inner: Any = self._env.unwrapped
        if inner.block is not self._block:
            self._block = inner.block
            goal = inner.get_goal_pose_body(inner.goal_pose)
            self._goal = pymunk_to_shapely(goal, inner._block_shapes)
        block = pymunk_to_shapely(inner.block, inner._block_shapes)
        return self._goal.intersection(block).area / self._goal.area


def _looks_once(own: Any) -> Any:
    """A subclass of an xArm's class: after the last substep nothing moves any more, and hand and
    cube, for which observation, reward and success ask nineteen times, are looked up once."""

    class Quick(own):  # type: ignore[misc]
        _known: dict[str, Any] | None = None

        def step(self, action: Any) -> Any:
            try:
                return super().step(action)
            finally:
                self._known = None

        def _step_callback(self) -> None:
            super()._step_callback()
            self._known = {}

        @property
        def eef(self) -> Any:
            return super().eef if self._known is None else self._once("eef")

        @property
        def obj(self) -> Any:
            return super().obj if self._known is None else self._once("obj")

        def _once(self, name: str) -> Any:
            known: Any = self._known
            if name not in known:
                known[name] = getattr(super(), name)
            return known[name]

    return Quick


@dataclass(frozen=True)
class XArmOptions(SeenOptions):
    """Options of the ``xarm`` env type."""

    only_with: ClassVar = {"image_size": "images: true", "effects": "images: true"}

    task: str = "gym_xarm/XarmLift-v0"
    """Task, of which the package registers this one alone."""
    images: bool = False
    """Show a picture [image_size, image_size, 3], and as ``states`` [4] where the hand is and how
    far it is open, as the sets ``lerobot/xarm_lift_…`` do; otherwise ``states`` say where the cube
    is, too."""
    image_size: int = 84
    """Pixels of a side."""
    effects: bool = False
    """Draw shadows and smooth edges, as those sets have them; slow without a GPU."""


class XArmEnv(SeenTask):
    """An xArm 7 that lifts a cube, in MuJoCo."""

    Options: ClassVar[type[Any]] = XArmOptions
    name = "xarm"
    example: ClassVar[dict[str, Any]] = {"task": "gym_xarm/XarmLift-v0"}
    tasks = ("gym_xarm/XarmLift-v0",)
    requirements = Requirements(
        packages=("gym-xarm==0.1.1",),
        module="gym_xarm",
        download_mb=50,
        disk_mb=175,
        licence="Apache-2.0",
        variables={"MUJOCO_GL": "egl"},
    )

    def __init__(self, options: XArmOptions) -> None:
        super().__init__(options)
        inner: Any = self._env.unwrapped
        inner.__class__ = _looks_once(type(inner))

    def robot_states(self) -> np.ndarray:
        """Position of the hand, and how far it is open [4]."""
        inner: Any = self._env.unwrapped
        found: np.ndarray = inner.robot_state
        return found

    def picture(self, size: int) -> np.ndarray:
        """The view of its one camera."""
        from rlinf.envs.mujoco.picture import shared_painter

        inner: Any = self._env.unwrapped
        self._painter = shared_painter(inner.model, effects=self._shown.effects)
        frame: np.ndarray = self._painter.paint(inner.data, "camera0", size)
        return frame

    @classmethod
    def keeps_model(cls, task: str) -> bool:
        """It writes nothing into it."""
        return True

    @classmethod
    def arguments(cls, options: Any) -> dict[str, Any]:
        """States, which are quick, instead of pictures."""
        return {"obs_type": "state"}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode; what the last one left in the solver must not show in it."""
        inner: Any = self._env.unwrapped
        inner._mujoco.mj_resetData(inner.model, inner.data)
        return super().reset(seed=seed, options=options)

    def render(self) -> Any:
        """Its one camera, uint8 [256, 256, 3]; the package calls gymnasium's renderer as it was
        before 1.0."""
        return self.picture(256)


@dataclass(frozen=True)
class AlohaOptions(TaskOptions):
    """Options of the ``aloha`` env type."""

    states: bool = False
    """Show the 14 joints and grippers beside the picture, as the sets `lerobot/aloha_sim_…` do."""


class AlohaEnv(DrawingTask):
    """Two arms that hand over a cube or insert a peg, from a picture [480, 640, 3]."""

    Options = AlohaOptions
    name = "aloha"
    example: ClassVar[dict[str, Any]] = {"task": "gym_aloha/AlohaTransferCube-v0"}
    never_black = ("main_images",)
    tasks = ("gym_aloha/AlohaTransferCube-v0", "gym_aloha/AlohaInsertion-v0")
    requirements = Requirements(
        packages=("gym-aloha==0.1.5",),
        module="gym_aloha",
        download_mb=150,
        disk_mb=545,
        licence="MIT",
        libraries={"libEGL.so.1": "libegl1"},
        variables={"MUJOCO_GL": "egl"},
    )

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        inner: Any = self._env.unwrapped
        inner._env.task.get_observation = self._seen_by

    def observe(self) -> Observation:
        """Return the picture, and the joints, of the present state."""
        inner: Any = self._env.unwrapped
        return self._converted(inner._format_raw_obs(self._seen_by(inner._env.physics)))

    def _seen_by(self, physics: Any) -> dict[str, Any]:
        """What is read of the task's own observation, which holds two pictures more."""
        inner: Any = self._env.unwrapped
        if self._looks:
            self._drawn = physics.render(height=480, width=640, camera_id="top")
        return {"qpos": inner._env.task.get_qpos(physics), "images": {"top": self._drawn}}

    @classmethod
    def arguments(cls, options: Any) -> dict[str, Any]:
        """What it shows."""
        return {"obs_type": "pixels_agent_pos"} if options.states else {}
