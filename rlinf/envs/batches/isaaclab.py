"""Isaac Lab 3: manager-based tasks, a whole batch on a device, with and without Isaac Sim."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlinf.envs.base import Observation, require_known, require_package
from rlinf.envs.batches import to_numpy
from rlinf.envs.batches.manager_based import (
    NO_TIME_LIMIT,
    ManagerBasedBatch,
    ManagerBasedOptions,
)
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

CAMERAS = {"table_cam": "main_images", "wrist_cam": "wrist_images"}
PROPRIOCEPTION = ("eef_pos", "eef_quat", "gripper_pos")
WITHOUT_DOWNLOADS = ("Isaac-Cartpole",)


@dataclass(frozen=True)
class IsaacLabOptions(ManagerBasedOptions):
    """Options of the ``isaaclab`` env type; a task is for example ``Isaac-Cartpole``."""

    overrides: tuple[str, ...] = ()
    """Isaac Lab's own overrides of the task, such as ``physics=newton_mjwarp``."""

    image_size: int = 256
    """Height and width in pixels of the cameras ``table_cam`` and ``wrist_cam``."""

    offline: bool = False
    """Whether nothing is asked of the asset server: `Isaac-Cartpole` alone, with the cart-pole that
    Newton's package holds, and without the ground that is only drawn."""


class IsaacLabEnv(ManagerBasedBatch):
    """Rows of one task from what its policy group holds.

    A group that is one vector is ``states``, and so are the terms of one that is not concatenated,
    one behind the other. With cameras, ``table_cam`` and ``wrist_cam`` are ``main_images`` and
    ``wrist_images`` and any other is ``images.NAME``; then ``proprioception`` [9] is the position
    of the gripper, its quaternion (x, y, z, w in Isaac Lab 3, w first before) and its two fingers,
    and no other term is shown, because those tell where objects are.

    Isaac Lab resets rows that a termination ended within the step, also where
    ``ignore_terminations`` lets the episode go on: it then goes on from a new start.
    """

    Options = IsaacLabOptions
    requirements = Requirements(
        packages=("isaaclab==3.0.0", "gymnasium==1.4.0"),
        module="isaaclab",
        python="3.12",
        download_mb=3300,
        disk_mb=7600,
        licence="BSD-3-Clause; Isaac Sim and assets their own",
    )
    _here: ClassVar[IsaacLabEnv | None] = None  # of this process
    _launched: ClassVar[Any] = None

    @classmethod
    def check(cls, options: IsaacLabOptions, max_episode_steps: int) -> None:
        """Refuse what would need the asset server where it must not be asked."""
        require_package("isaaclab", cls.requirements)
        if options.offline:
            require_known("task", options.task, WITHOUT_DOWNLOADS)

    def close(self) -> None:
        """End the simulation."""
        super().close()
        type(self)._here = None

    def _make(self) -> Any:
        import gymnasium
        import isaaclab_tasks  # noqa: F401 - registers the tasks
        from isaaclab.app import launch_simulation
        from isaaclab_tasks.utils import parse_env_cfg

        mine, options = type(self), self.options
        if mine._here is not None:
            raise ConfigError(
                "Isaac Lab steps one batch in a process, and each pipeline stage is a batch: "
                "set rollout.pipeline_stage_num to 1",
                key="type",
            )
        if options.task not in gymnasium.registry:
            known = [name for name in gymnasium.registry if name.startswith("Isaac")]
            require_known("task", options.task, known)
        config = parse_env_cfg(
            options.task, options.device, self.num_envs, overrides=options.overrides
        )
        config.seed = 0  # of what is drawn once, when the scene is built
        config.episode_length_s = NO_TIME_LIMIT
        config.compute_final_obs = True
        if options.device == "cpu" and hasattr(config.sim.physics, "use_cuda_graph"):
            config.sim.physics.use_cuda_graph = False
        for camera in CAMERAS:
            if (of_scene := getattr(config.scene, camera, None)) is not None:
                of_scene.height = of_scene.width = options.image_size
        if options.offline:
            self._files = tempfile.TemporaryDirectory(prefix="rlinf_")
            config.scene.robot.spawn.usd_path = _cart_pole(Path(self._files.name))
            config.scene.ground = None
        if mine._launched is None:  # it stays until the process ends, as Isaac Sim wants it
            mine._launched = launch_simulation(config, {"headless": True})
            mine._launched.__enter__()
        made = gymnasium.make(options.task, cfg=config).unwrapped
        mine._here = self
        return made

    def _observed(self, seen: Any) -> Observation:
        group = seen["policy"]
        if not isinstance(group, dict):
            return {"states": to_numpy(group)}
        terms = {name: to_numpy(value) for name, value in group.items()}
        pictures = {
            CAMERAS.get(name, f"images.{name}"): value
            for name, value in terms.items()
            if value.dtype == np.uint8
        }
        if pictures:
            return {**pictures, "proprioception": _joined(terms, PROPRIOCEPTION)}
        return {"states": _joined(terms, tuple(terms))}


def _joined(terms: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """Terms [N, ...] one behind the other, [N, D]."""
    flat = [terms[name].reshape(len(terms[name]), -1) for name in names]
    return np.concatenate(flat, axis=1).astype(np.float32)


def _cart_pole(folder: Path) -> str:
    """Newton's copy of Isaac Lab's cart-pole, whose default prim is misspelt there."""
    import newton.examples

    source = Path(newton.examples.get_asset("cartpole_single_pendulum.usda"))
    copy = folder / "cartpole.usda"
    copy.write_text(
        source.read_text().replace('defaultPrim = "cartPole"', 'defaultPrim = "cartpole"')
    )
    return str(copy)
