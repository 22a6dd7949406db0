"""gym-hil: the Franka simulation of HIL-SERL in MuJoCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlinf.envs.base import (
    Observation,
    camera_shapes,
    observation_space,
    require_known,
    require_picture_sizes,
)
from rlinf.envs.gymnasium_tasks import DrawingTask, TaskOptions
from rlinf.envs.requirements import Requirements

REWARDS = ("sparse", "dense")
_CAMERAS = {"main_images": "front", "wrist_images": "handcam_rgb"}


@dataclass(frozen=True)
class FrankaSimOptions(TaskOptions):
    """Options of the ``franka_sim`` env type."""

    only_with: ClassVar = {
        "image_size": "images: true",
        "depth": "images: true",
        "effects": "images: true",
    }

    reward: str = "sparse"
    """``sparse``, 1 at success; or ``dense``: how near the gripper is to the cube and how high this
    is lifted, at most 1 a step; of the boxes how near each is to its place, at most 1 a box."""

    images: bool = False
    """Whether observations hold ``main_images`` and ``wrist_images`` [image_size, image_size, 3];
    ``states`` [18] are then what the robot knows of itself, and say nothing of the cube."""

    depth: bool = False
    """Whether observations hold ``depth.main`` and ``depth.wrist``, metres."""

    image_size: int = 128
    """Height and width of the pictures in pixels."""

    effects: bool = False
    """Whether shadows, reflections, sky and multisampling are drawn, as the package draws them and
    models that learnt from its pictures saw them: several times slower on a CPU."""

    random_block_position: bool = True
    """Lift: the cube begins somewhere in reach; false: always at one place, as the package has it
    where nothing is said, so that all episodes begin alike."""


class FrankaSimEnv(DrawingTask):
    """The Franka simulation of HIL-SERL in MuJoCo: lift a cube, arrange boxes.

    Actions of ``PandaPickCube-v0`` and ``PandaArrangeBoxes-v0`` [4] are moves of the gripper by up
    to 2.5 cm in [-1, 1], and the gripper: 0 opens it, 1 leaves it, 2 closes it. Those of the
    ``Base`` tasks [7] are moves in metres, three dimensions without effect, and the gripper in
    [-1, 1]. ``states`` [21] are joint positions and velocities, gripper, its place and that of the
    cube, or of the first box alone. An episode ends at success, and where the cube is out of reach.
    """

    Options = FrankaSimOptions
    name = "franka_sim"
    example: ClassVar[dict[str, Any]] = {"task": "gym_hil/PandaPickCube-v0"}
    tasks = tuple(
        f"gym_hil/Panda{task}{moved}-v0"
        for task in ("PickCube", "ArrangeBoxes")
        for moved in ("", "Base")
    )
    requirements = Requirements(
        packages=("gym-hil==0.1.14", "mujoco==3.8.1"),
        module="gym_hil",
        download_mb=110,
        disk_mb=360,
        licence="Apache-2.0",
        libraries={"libEGL.so.1": "libegl1"},
        variables={"MUJOCO_GL": "egl"},
    )

    _painter: Any = None

    def __init__(self, options: FrankaSimOptions) -> None:
        super().__init__(options)
        self._shows_pictures = options.images
        if not options.images:
            return
        from rlinf.envs.mujoco.picture import Painter

        inner: Any = self._env.unwrapped
        self._painter = Painter(inner.model, effects=options.effects)
        self._size, self._shows_depth = options.image_size, options.depth
        self.never_black = ("main_images",)
        own = self._env.observation_space["agent_pos"].shape
        self.state_parts = (("agent_pos", own[0]),)
        pictures = dict.fromkeys(_CAMERAS, (options.image_size, options.image_size))
        shapes = camera_shapes(pictures, depth=options.depth)
        self.observation_space = observation_space({"states": own, **shapes})

    @classmethod
    def check(cls, options: Any, max_episode_steps: int) -> None:
        """Refuse unknown tasks and rewards, and sizes that no picture has."""
        super().check(options, max_episode_steps)
        require_known("reward", options.reward, REWARDS)
        require_picture_sizes(options)

    @classmethod
    def success_key(cls, task: str) -> str:
        """The word of this package."""
        return "succeed"

    @classmethod
    def arguments(cls, options: Any) -> dict[str, Any]:
        """What earns a reward and where the cube begins; no waiting for a person at a reset."""
        found: dict[str, Any] = {"reward_type": options.reward}
        if "PickCube" in options.task:
            found["random_block_position"] = options.random_block_position
        if "Base" not in options.task:
            found["reset_delay_seconds"] = 0.0
        return found

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode; the package draws by numpy's numbers of the whole process."""
        before = np.random.get_state()
        if seed is not None:
            np.random.seed(seed % 2**32)
        try:
            return super().reset(seed=seed, options=options)
        finally:
            np.random.set_state(before)

    def observe(self) -> Observation:
        """Return states, and pictures, of the present state."""
        inner: Any = self._env.unwrapped
        return self._converted(inner._compute_observation())

    def render(self) -> Any:
        """The first of its two cameras, uint8 [H, W, 3]."""
        return self._env.render()[0]

    def close(self) -> None:
        """Free model and graphics."""
        if self._painter is not None:
            self._painter.close()
        super().close()

    def _converted(self, observation: Any) -> Observation:
        if not self._shows_pictures:
            return super()._converted(observation)
        if self._looks:
            data: Any = self._env.unwrapped.data
            self._drawn = self._painter.observations(
                data, _CAMERAS, self._size, depth=self._shows_depth
            )
        return {"states": observation["agent_pos"].astype(np.float32), **self._drawn}
