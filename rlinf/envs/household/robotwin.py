"""RoboTwin 2: fifty tasks of two arms in SAPIEN; a call of the simulator executes a whole chunk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    INSTRUCTION_KEY,
    INSTRUCTION_SHAPE,
    BatchStep,
    Observation,
    SimulatorBatch,
    instruction_bytes,
    observation_space,
    package_folder,
    require_known,
    require_package,
)
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

CONFIGS = ("demo_clean", "demo_randomized")
PLANNERS = ("curobo", "mplib")
INSTRUCTIONS = ("seen", "unseen")
ASSETS = ("background_texture", "embodiments/aloha-agilex", "objects")
ASSETS_VARIABLE = "ROBOTWIN_ASSETS_ROOT"
JOINTS = 14
"""Per arm six joints and a gripper, first the left arm."""
_GRIPPERS = (6, 13)
_NO_LIMIT = 10**9
"""Time limits belong to the host."""


@dataclass(frozen=True)
class RobotwinOptions:
    """Options of the ``robotwin`` env type."""

    task: str
    """Task, for example ``beat_block_hammer``."""

    config: str = "demo_clean"
    """``demo_clean``, or ``demo_randomized``: clutter, textures, light and height of the table."""

    instructions: str = "seen"
    """Wordings that an instruction is drawn from: ``seen`` or ``unseen``."""

    planner: str = "curobo"
    """Motion planner that the scene is built with: ``curobo`` (a package of its own), ``mplib``."""

    images: bool = True
    """Whether observations hold ``main_images`` of the head and ``wrist_images`` of both arms."""

    crop: int = 224
    """Side of the square about the centre that is kept of a picture of 240 x 320 pixels, as in
    published evaluations; 0 keeps all of it."""

    assets: str = ""
    """Folder that holds ``assets``; by default that of the variable ROBOTWIN_ASSETS_ROOT."""


class RobotwinEnv(SimulatorBatch):
    """A task for two arms of an ALOHA robot, whose chunks of absolute joint positions are planned.

    ``states`` [14] are the joints and the gripper of the left and of the right arm; actions [14]
    say where those shall be (radians; grippers 0 closed to 1 open). ``instruction`` is worded anew
    at every reset. Reward 1 is given once, at success, in the last column of its chunk, since the
    simulator does not say at which action it came; with it the episode ends.
    """

    Options = RobotwinOptions
    example: ClassVar[dict[str, Any]] = {"task": "lift_pot"}
    requirements = Requirements(
        packages=("rlinf-robotwin-runtime==0.1.3",),
        module="robotwin",
        python="3.10",
        # Estimated from those of torch with CUDA: it was not installed here.
        download_mb=3900,
        disk_mb=8500,
        licence="MIT; assets under their own licences",
        assets="`robotwin-download-assets --output DIR` of its environment, then "
        "options.assets=DIR; cuRobo 0.7.8 from source, or options.planner=mplib",
        accelerator=True,
    )
    whole_chunks = True

    def __init__(self, options: RobotwinOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        if options.assets:
            os.environ[ASSETS_VARIABLE] = options.assets
        from robotwin.config import load_task_config
        from robotwin.envs.vector_env import VectorEnv

        # The constructor writes into the mapping that it is given.
        config = load_task_config(options.config)
        config.update(task_name=options.task, planner_backend=options.planner, step_lim=_NO_LIMIT)
        config["camera"]["collect_wrist_camera"] = options.images
        self._env: Any = VectorEnv(
            config, num_envs, env_seeds=None, instruction_type=options.instructions
        )
        self.task_descriptions = (options.task.replace("_", " "),)
        self._seen: list[dict[str, Any]] = []
        self._solved = np.zeros(num_envs, bool)
        self._shifts = np.zeros(num_envs, np.int64)
        side = (options.crop, options.crop) if options.crop else (240, 320)
        shapes: dict[str, tuple[int, ...]] = {
            "states": (JOINTS,),
            INSTRUCTION_KEY: INSTRUCTION_SHAPE,
        }
        if options.images:
            shapes.update(main_images=(*side, 3), wrist_images=(2, *side, 3))
        self.observation_space = observation_space(shapes)
        high = np.full(JOINTS, np.pi, np.float32)
        low = -high
        low[list(_GRIPPERS)], high[list(_GRIPPERS)] = 0.0, 1.0
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @classmethod
    def check(cls, options: RobotwinOptions, max_episode_steps: int) -> None:
        """Refuse what RoboTwin has not, and missing assets."""
        require_package("robotwin", cls.requirements)
        require_known("task", options.task, sorted(step_limits(package_folder("robotwin"))))
        require_known("config", options.config, CONFIGS)
        require_known("planner", options.planner, PLANNERS)
        require_known("instructions", options.instructions, INSTRUCTIONS)
        if not 0 <= options.crop <= 240:
            raise ConfigError(
                f"a picture is 240 pixels high; nearest: {min(max(options.crop, 0), 240)}",
                key="options.crop",
            )
        root = Path(options.assets or os.environ.get(ASSETS_VARIABLE, "."))
        missing = [each for each in ASSETS if not (root / "assets" / each).is_dir()]
        if missing:
            raise ConfigError(
                f"no folder {root / 'assets' / missing[0]}; {cls.requirements.assets}",
                key="options.assets",
            )

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes; a seed whose objects do not come to rest is moved on from by one.

        The simulator returns nothing and moves on silently: the number of the episode that its
        task carries is the seed which it took in the end.
        """
        # It draws words with Python's generator, which takes no integers of numpy.
        self._env.reset(env_idx=rows.tolist(), env_seeds=seeds.tolist())
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self._shifts[row] = self._env.envs[row].task.ep_num - seed
        self._solved[rows] = False
        self._seen = self._env.get_obs()
        return self._observations()

    def seed_shifts(self) -> np.ndarray:
        """[N] int64, by how much each row moved on from the seed that was asked for."""
        return self._shifts

    def chunk_step(self, actions: np.ndarray, lengths: np.ndarray) -> BatchStep:
        """Execute the first ``lengths`` [N] of the actions [N, C, 14] of each row."""
        # Positions are absolute: a row at rest is told to stay where it is.
        given = [
            chunk[:length].astype(np.float64) if length else np.asarray(seen["state"])[None]
            for chunk, length, seen in zip(actions, lengths, self._seen, strict=True)
        ]
        self._seen, rewards, terminated, truncated, infos = self._env.step(given)
        success = np.array([bool(info["success"]) for info in infos])
        # From then on the simulator says success, and reward 1, to every chunk.
        earned = np.zeros(actions.shape[:2])
        fresh = np.flatnonzero(success & ~self._solved & (lengths > 0))
        earned[fresh, lengths[fresh] - 1] = np.concatenate(rewards)[fresh]
        self._solved |= success
        return BatchStep(
            observations=self._observations(),
            rewards=earned,
            terminated=np.concatenate(terminated).astype(bool),
            truncated=np.concatenate(truncated).astype(bool),
            success=success,
        )

    def render(self, row: int) -> np.ndarray:
        """Return what the head of a row saw last, uint8 [240, 320, 3]."""
        picture: np.ndarray = np.ascontiguousarray(self._seen[row]["full_image"])
        return picture

    def close(self) -> None:
        """Free scenes and threads."""
        self._env.close()

    def _observations(self) -> Observation:
        seen, side = self._seen, self.options.crop
        found = {
            "states": np.stack([each["state"] for each in seen]).astype(np.float32),
            INSTRUCTION_KEY: np.stack([instruction_bytes(str(e["instruction"])) for e in seen]),
        }
        if self.options.images:
            wrists = [(each["left_wrist_image"], each["right_wrist_image"]) for each in seen]
            found["main_images"] = centre(np.stack([each["full_image"] for each in seen]), side)
            found["wrist_images"] = centre(np.stack([np.stack(pair) for pair in wrists]), side)
        return found


def centre(pictures: np.ndarray, side: int) -> np.ndarray:
    """Return the square of ``side`` pixels about the centre of [..., H, W, 3]; all of it for 0."""
    if not side:
        return pictures
    top, left = ((size - side) // 2 for size in pictures.shape[-3:-1])
    return pictures[..., top : top + side, left : left + side, :]


def step_limits(folder: Path) -> dict[str, int]:
    """Return the tasks of RoboTwin's package, and after how many actions each is given up."""
    lines = (folder / "configs" / "task" / "_eval_step_limit.yml").read_text().splitlines()
    pairs = (line.split("#")[0].partition(":") for line in lines)
    return {name.strip(): int(limit) for name, _, limit in pairs if limit.strip()}
