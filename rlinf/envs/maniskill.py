"""ManiSkill 3: manipulation tasks in SAPIEN, on the CPU, one scene per env."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    require_within,
)
from rlinf.envs.observation_names import depth_of
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

TASKS = (
    "DrawTriangle-v1", "LiftPegUpright-v1", "PegInsertionSide-v1", "PickCube-v1",
    "PickCubeSO100-v1", "PlaceSphere-v1", "PlugCharger-v1", "PokeCube-v1",
    "PullCube-v1", "PullCubeTool-v1", "PushCube-v1", "RollBall-v1", "SO100GraspCube-v1",
    "StackCube-v1", "StackPyramid-v1",
    "TwoRobotPickCube-v1", "TwoRobotStackCube-v1", "FMBAssembly1Easy-v1",
    "MS-AntRun-v1", "MS-AntWalk-v1", "MS-CartpoleBalance-v1", "MS-CartpoleSwingUp-v1",
    "MS-HopperHop-v1", "MS-HopperStand-v1", "MS-HumanoidRun-v1", "MS-HumanoidStand-v1",
    "MS-HumanoidWalk-v1",
    *(f"RotateSingleObjectInHandLevel{level}-v1" for level in range(2)),
    *(f"RotateValveLevel{level}-v1" for level in range(5)),
    *(f"TriFingerRotateCubeLevel{level}-v1" for level in range(5)),
    "UnitreeG1PlaceAppleInBowl-v1", "UnitreeG1Stand-v1", "UnitreeG1TransportBox-v1",
)  # fmt: skip
"""Tasks whose objects are in the package; others ask a hub for theirs when they are built."""

_JOINTS = ("pd_joint_delta_pos", "pd_joint_pos")
_TARGET = (*_JOINTS, "pd_joint_target_delta_pos")
_VELOCITY = (*_TARGET, "pd_joint_vel", "pd_joint_pos_vel", "pd_joint_delta_pos_vel")
_PANDA = (
    *_VELOCITY, "pd_ee_delta_pos", "pd_ee_delta_pose", "pd_ee_pose", "pd_ee_target_delta_pos",
    "pd_ee_target_delta_pose",
)  # fmt: skip
CONTROL_MODES = {
    "MS-Humanoid": _JOINTS,
    "MS-": _JOINTS[:1],
    "UnitreeG1": _JOINTS,
    "Rotate": _TARGET,
    "PickCubeSO100": _TARGET,
    "SO100": _TARGET,
    "TriFinger": _VELOCITY,
    "DrawTriangle": (*_PANDA, "pd_ee_delta_pose_align"),
    "": _PANDA,
}
"""How the robot of a task may be moved, by how the task's name begins; the first that fits."""

REWARDS = {
    "DrawTriangle": ("sparse",),
    "FMBAssembly": ("sparse", "none"),
    "PlugCharger": ("sparse", "none"),
    "StackPyramid": ("sparse", "none"),
    "UnitreeG1Stand": ("sparse", "none"),
    "MS-Ant": ("normalized_dense", "dense", "none"),
    "MS-CartpoleSwingUp": ("normalized_dense", "dense", "none"),
    "MS-Humanoid": ("normalized_dense", "none"),
    "": ("normalized_dense", "dense", "sparse", "none"),
}
"""What a task can be paid by, by how its name begins; the first that fits."""

_FARTHEST = 100.0
"""Metres of the far clipping plane of the tasks' cameras."""
_STATES = ("all", "robot")
_ROBOT_MESHES = ("visual", "collision")
_NO_VULKAN = ("vk::", "rendering device")
"""What SAPIEN says where it cannot draw."""


@dataclass(frozen=True)
class ManiSkillOptions:
    """Options of the ``maniskill`` env type."""

    only_with: ClassVar = {
        "image_size": "images: true",
        "depth": "images: true",
        "field_of_view": "images: true",
        "camera_position": "images: true",
        "camera_target": "camera_position",
    }

    task: str
    """Task, for example ``PickCube-v1``."""

    control_mode: str = "pd_ee_delta_pos"
    """How actions move the robot; the task's robot says which it has."""

    reward: str = "normalized_dense"
    """``normalized_dense`` (at most 1 a step), ``dense``, ``sparse`` (success) or ``none``; a few
    tasks have some of them alone."""

    states: str = "all"
    """What `states` holds: `all`, also where objects and goal are; or, beside pictures, what the
    `robot` knows of itself, as in ManiSkill's own observations of pictures."""

    images: bool = False
    """Whether observations hold ``main_images`` [image_size, image_size, 3] of the base camera."""

    depth: bool = False
    """Whether observations hold ``depth.main`` [image_size, image_size], metres to the millimetre;
    100 where nothing is within 32 m."""

    image_size: int = 128
    """Height and width of ``main_images`` in pixels."""

    field_of_view: float | None = None
    """Of the base camera, from top to bottom in degrees; null: the task's, mostly 90. Less shows
    objects larger."""

    camera_position: tuple[float, float, float] | None = None
    """Where the base camera is, in metres: from the robot's base forwards, to its left, upwards;
    null: where the task has it, which may leave part of what is to be reached out of the picture
    where `field_of_view` is smaller than the task's."""

    camera_target: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The point that a camera at `camera_position` looks at."""

    robot_meshes: str = "visual"
    """What the robot is drawn with: its `visual` meshes, 135,000 triangles of a Panda, or those it
    collides with, 4,000: on a CPU, where every triangle costs, the time of a picture."""

    own_scenes: bool = True
    """Whether every episode has a scene built for it, and so depends on its seed to the last bit;
    false: objects are put back into the scene of the episode before, which takes a fraction of the
    time, and what its contacts left in the physics may show in the last bits."""


class ManiSkillEnv(SimulatorEnv):
    """A ManiSkill task from its state vector, with pictures where they are asked for.

    An episode ends at success or failure, which are the task's own ``evaluate()``. Pictures need a
    Vulkan device: a GPU, or Mesa 24.3 or newer for the CPU.
    """

    Options = ManiSkillOptions
    example: ClassVar[dict[str, Any]] = {"task": "PushCube-v1"}
    requirements = Requirements(
        packages=("mani-skill==3.0.1", "torch==2.13.0", "gymnasium==1.4.0"),
        module="mani_skill",
        download_mb=700,
        disk_mb=1850,
        licence="Apache-2.0; assets CC BY-NC 4.0",
        libraries={"libGL.so.1": "libgl1"},
        variables={"MS_SKIP_ASSET_DOWNLOAD_PROMPT": "1"},
    )
    skips_observations = True
    never_black = ("main_images",)

    def __init__(self, options: ManiSkillOptions) -> None:
        super().__init__(options)
        _import_mani_skill(draws=options.images)
        import gymnasium
        import torch

        # Nothing differentiates a step, and a tensor that keeps no account of it is cheaper.
        self._plain = torch.inference_mode
        size = options.image_size
        self._mode = _mode(options)
        self._built = _coarse_robots if options.robot_meshes == "collision" else nullcontext
        camera: dict[str, Any] = {"width": size, "height": size}
        if options.field_of_view is not None:
            camera["fov"] = math.radians(options.field_of_view)
        if options.camera_position is not None:
            utilities = importlib.import_module("mani_skill.utils.sapien_utils")
            camera["pose"] = utilities.look_at(options.camera_position, options.camera_target)
        try:
            with self._built():
                made: Any = gymnasium.make(
                    options.task,
                    num_envs=1,
                    obs_mode=self._mode,
                    control_mode=options.control_mode,
                    reward_mode=options.reward,
                    sim_backend="physx_cpu",
                    render_backend="cpu" if options.images else "none",
                    sensor_configs=camera,
                )
        except RuntimeError as error:
            if not options.images or not any(word in str(error) for word in _NO_VULKAN):
                raise
            raise ConfigError(
                f"pictures need a Vulkan device, and there is none ({error}); nearest: a GPU, or "
                "for the CPU mesa-vulkan-drivers 24.3 or newer, which Debian 12 has in "
                "bookworm-backports; without pictures: false",
                key="options.images",
            ) from error
        self._env = made.unwrapped
        self.control_rate = float(self._env.control_freq)
        self._flattened = importlib.import_module("mani_skill.utils.common").flatten_state_dict
        self.task_descriptions = (" ".join(_words(options.task.rsplit("-", 1)[0])),)
        with self._plain(), self._built():
            self._seen, _ = self._env.reset(seed=0)
        shapes: dict[str, tuple[int, ...]] = {"states": self._states().shape}
        if options.images:
            shapes.update(camera_shapes({"main_images": (size, size)}, depth=options.depth))
        self.observation_space = observation_space(shapes)
        self._takes: Any = self._env.single_action_space
        flat: Any = spaces.flatten_space(self._takes)  # of two robots one behind the other
        low, high = (np.asarray(limit, np.float32) for limit in (flat.low, flat.high))
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @classmethod
    def check(cls, options: ManiSkillOptions, max_episode_steps: int) -> None:
        """Refuse tasks whose objects would be downloaded, and what a task's robot cannot do."""
        require_package("maniskill", cls.requirements)
        require_known("task", options.task, TASKS)
        for key, table in (("control_mode", CONTROL_MODES), ("reward", REWARDS)):
            known = next(table[begin] for begin in table if options.task.startswith(begin))
            require_known(key, getattr(options, key), known)
        require_known("states", options.states, _STATES)
        require_known("robot_meshes", options.robot_meshes, _ROBOT_MESHES)
        if options.states == "robot" and not options.images:
            raise ConfigError(
                "without pictures nothing shows where objects are; nearest: all, or "
                "options.images: true",
                key="options.states",
            )
        require_picture_sizes(options)
        if options.field_of_view is not None:
            require_within("field_of_view", options.field_of_view, 1, 179)
        if options.camera_position and tuple(options.camera_position) == tuple(
            options.camera_target
        ):
            raise ConfigError(
                "a camera cannot look at the point where it is; nearest: one below it",
                key="options.camera_target",
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the episode of ``seed``."""
        self._env._obs_mode = self._mode
        # What earlier contacts left in the physics must not show in this episode.
        anew = {"reconfigure": self.options.own_scenes}
        with self._plain(), self._built():
            self._seen, _ = self._env.reset(seed=seed, options=anew)
        return self._observation(), {}

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action without drawing a picture."""
        # Where there are pictures, `observe` reads the states beside them. ManiSkill flattens those
        # of "rgb+state" after every step, and so must have some.
        self._env._obs_mode = "state" if "state" in self._mode else "none"
        given: Any = np.asarray(action, np.float32)
        if isinstance(self._takes, spaces.Dict):
            given = spaces.unflatten(self._takes, given)
        with self._plain():
            self._seen, reward, terminated, _, info = self._env.step(given)
        flags = {key: bool(info[key]) for key in ("success", "fail") if key in info}
        return float(reward), bool(terminated), False, flags

    def observe(self) -> Observation:
        """Return states and picture of the present state."""
        if self.options.images:
            self._env._obs_mode = self._mode
            with self._plain():
                self._seen = self._env.get_obs()
        return self._observation()

    def render(self) -> Any:
        """Return a picture of the base camera; without ``images`` there is no renderer."""
        if not self.options.images:
            raise RuntimeError("set `options.images: true`: without it ManiSkill has no renderer")
        return self.observe()["main_images"]

    def close(self) -> None:
        """Close the scene."""
        self._env.close()

    def _states(self) -> np.ndarray:
        seen = self._seen
        if self.options.images and "state" not in self._mode:
            parts = {name: seen[name] for name in ("agent", "extra")}
            states = self._flattened(parts, use_torch=True)
        else:
            states = seen["state"] if isinstance(seen, dict) else seen
        found: np.ndarray = states[0].numpy().astype(np.float32)
        return found

    def _observation(self) -> Observation:
        observation = {"states": self._states()}
        if self.options.images:
            seen = self._seen["sensor_data"]["base_camera"]
            observation["main_images"] = seen["rgb"][0].numpy()
            if self.options.depth:
                # Whole millimetres in 16 bits: not above 0 where nothing is, or too far away.
                metres = seen["depth"][0, ..., 0].numpy().astype(np.float32) / np.float32(1000.0)
                observation[depth_of("main_images")] = np.where(
                    metres > 0, metres, np.float32(_FARTHEST)
                )
        return observation


def _mode(options: ManiSkillOptions) -> str:
    """ManiSkill's name of what is observed."""
    if not options.images:
        return "state"
    seen = "rgb+depth" if options.depth else "rgb"
    return f"{seen}+state" if options.states == "all" else seen


def _import_mani_skill(*, draws: bool) -> None:
    """Register the tasks; without a renderer they still make materials, which do nothing."""
    os.environ.setdefault("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")
    import sapien

    if not draws:
        sapien.render.RenderMaterial = _NoMaterial
        sapien.pysapien.render.RenderMaterial = _NoMaterial
    importlib.import_module("mani_skill.envs")


@contextmanager
def _coarse_robots() -> Iterator[None]:
    """Robots that are built meanwhile are drawn with the meshes they collide with."""
    module: Any = importlib.import_module("mani_skill.utils.building.urdf_loader")
    original = module.URDFLoader

    class CollisionMeshes(original):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.collision_is_visual = True  # behind the visual meshes of each link

        def parse(self, *arguments: Any, **named: Any) -> Any:
            parsed = super().parse(*arguments, **named)
            for robot in parsed["articulation_builders"]:
                for link in robot.link_builders:
                    if link.collision_records:
                        link.visual_records = link.visual_records[-len(link.collision_records) :]
            return parsed

    module.URDFLoader = CollisionMeshes
    try:
        yield
    finally:
        module.URDFLoader = original


class _NoMaterial:
    """A material for nobody to see; SAPIEN's own needs a Vulkan device."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.__dict__.update(named)

    def __getattr__(self, name: str) -> Any:
        """Its setters, as ``set_base_color``."""
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda *arguments: None


def _words(name: str) -> list[str]:
    """Split ``PickCube`` into its words."""
    words: list[str] = []
    for letter in name:
        if letter.isupper() and not (words and words[-1].isupper()):
            words.append("")
        words[-1] += letter.lower() if words else letter
    return words
