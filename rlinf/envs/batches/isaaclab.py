"""Isaac Lab 3: manager-based tasks, a whole batch on a device, with and without Isaac Sim."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlinf.config.nearest import did_you_mean
from rlinf.envs.base import Observation, package_folder, require_known, require_package
from rlinf.envs.batches import require_device, to_numpy
from rlinf.envs.batches.manager_based import (
    NO_TIME_LIMIT,
    ManagerBasedBatch,
    ManagerBasedOptions,
)
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError, told

CAMERAS = {"table_cam": "main_images", "wrist_cam": "wrist_images"}
PROPRIOCEPTION = ("eef_pos", "eef_quat", "gripper_pos")
WITHOUT_DOWNLOADS = ("Isaac-Cartpole",)
_OF_BEFORE = ("newton", "kamino")  # which Isaac Lab still takes for `newton_mjwarp` and so on


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
    one behind the other; one picture is ``main_images``. With cameras, ``table_cam`` and
    ``wrist_cam`` are ``main_images`` and ``wrist_images`` and any other is ``images.NAME``; then
    ``proprioception`` [9] is the position of the gripper, its quaternion (x, y, z, w in Isaac
    Lab 3, w first before) and its two fingers, and no other term is shown, because those tell where
    objects are.

    Isaac Lab resets rows that a termination ended within the step, also where
    ``ignore_terminations`` lets the episode go on: it then goes on from a new start.
    """

    Options = IsaacLabOptions
    example: ClassVar[dict[str, Any]] = {"task": "Isaac-Cartpole", "offline": True}
    requirements = Requirements(
        packages=("isaaclab==3.0.0", "gymnasium==1.4.0"),
        module="isaaclab",
        python="3.12",
        download_mb=3300,
        disk_mb=7600,
        licence="BSD-3-Clause; Isaac Sim and assets their own",
        # Or Hydra prints what it has against an override, and ends the process.
        variables={"HYDRA_FULL_ERROR": "1"},
    )
    one_batch_per_process = True
    _launched: ClassVar[Any] = None

    @classmethod
    def check(cls, options: IsaacLabOptions, max_episode_steps: int) -> None:
        """Refuse unknown tasks and engines of physics, and what would need the asset server where
        it must not be asked. Other overrides are judged by Isaac Lab, whose import takes half a
        minute."""
        require_package("isaaclab", cls.requirements)
        require_device(options.device)
        if known := list(WITHOUT_DOWNLOADS) if options.offline else _tasks():
            require_known("task", options.task, known)
        _require_physics(options.overrides)

    def _make(self) -> Any:
        import gymnasium
        import isaaclab_tasks  # noqa: F401 - registers the tasks
        from isaaclab.app import launch_simulation
        from isaaclab.sim import SimulationContext
        from isaaclab_tasks.utils import parse_env_cfg

        if SimulationContext.instance() is not None:
            raise ConfigError(
                "Isaac Lab steps one batch in a process, and each pipeline stage is a batch: "
                "set rollout.pipeline_stage_num to 1",
                key="type",
            )
        task = self.options.task
        if task not in gymnasium.registry:
            known = [name for name in gymnasium.registry if name.startswith("Isaac")]
            require_known("task", task, known)

        def parse(overrides: tuple[str, ...]) -> Any:
            return parse_env_cfg(task, self.options.device, self.num_envs, overrides=overrides)

        with _overriding(self.options.overrides):
            config = parse(self.options.overrides)
        _require_places(self.options.overrides, config, parse)
        self._configure(config)
        mine = type(self)
        if mine._launched is None:  # it stays until the process ends, as Isaac Sim wants it
            mine._launched = launch_simulation(config, {"headless": True})
            mine._launched.__enter__()
        return gymnasium.make(task, cfg=config).unwrapped

    def _configure(self, config: Any) -> None:
        options = self.options
        config.seed = 0  # of what is drawn once, when the scene is built
        config.episode_length_s = NO_TIME_LIMIT
        config.compute_final_obs = True
        if options.device == "cpu" and hasattr(config.sim.physics, "use_cuda_graph"):
            config.sim.physics.use_cuda_graph = False
        for name in CAMERAS:
            if (camera := getattr(config.scene, name, None)) is not None:
                camera.height = camera.width = options.image_size
        if options.offline:
            self._files = tempfile.TemporaryDirectory(prefix="rlinf_")
            config.scene.robot.spawn.usd_path = _cart_pole(Path(self._files.name))
            config.scene.ground = None

    def _observed(self, seen: Any) -> Observation:
        group = seen["policy"]
        if not isinstance(group, dict):
            return {self._key_of(group): to_numpy(group)}
        terms = {name: to_numpy(value) for name, value in group.items()}
        pictures = {
            CAMERAS.get(name, f"images.{name}"): value
            for name, value in terms.items()
            if value.dtype == np.uint8
        }
        if not pictures:
            return {"states": _joined(terms, list(terms))}
        own = [name for name in PROPRIOCEPTION if name in terms]
        return {**pictures, **({"proprioception": _joined(terms, own)} if own else {})}

    def _key_of(self, group: Any) -> str:
        """What a group that is one tensor is called."""
        if group.ndim == 2:
            return "states"
        if group.ndim == 4 and group.dtype == self._torch.uint8:
            return "main_images"
        raise ConfigError(
            f"`{self.options.task}` shows {group.dtype} {list(group.shape)}: no vector, and no "
            "picture of bytes; for pictures an override sets `normalize` of its term to false",
            key="options.task",
        )


def _tasks() -> list[str]:
    """What Isaac Lab registers, read from its sources: to import them takes half a minute."""
    folder = package_folder("isaaclab_tasks")
    files = folder.rglob("__init__.py") if folder.name else ()
    return [name for file in files for name in re.findall(r'id="(Isaac[^"]+)"', file.read_text())]


def _physics() -> list[str]:
    """What any task of Isaac Lab calls an engine of physics, read from its sources."""
    folder = package_folder("isaaclab_tasks")
    files = folder.rglob("*.py") if folder.name else ()
    declared = re.compile(r"^\s+(\w+): \w*(?:Newton|Physx|PhysxAuto)Cfg\b", re.MULTILINE)
    return [name for file in files for name in declared.findall(file.read_text(encoding="utf-8"))]


def _require_physics(overrides: tuple[str, ...]) -> None:
    """Refuse an override ``physics=NAME`` that no task has.

    Raises:
        ConfigError: With the nearest name.
    """
    pairs = [each.lstrip("-").partition("=") for each in overrides]
    wanted = [
        name.strip() for key, _, names in pairs if key == "physics" for name in names.split(",")
    ]
    if not any(wanted) or not (known := _physics()):
        return
    for name in filter(None, wanted):
        if name not in (*known, *_OF_BEFORE):
            why = f"no task has `physics={name}`; {did_you_mean(name, known)}"
            raise ConfigError(why, key="options.overrides")


def _require_places(
    overrides: tuple[str, ...], config: Any, parse: Callable[[tuple[str, ...]], Any]
) -> None:
    """Refuse an override ``env.PLACE=VALUE`` whose last name the task did not have: Isaac Lab makes
    such a one without a word, and nothing reads it.

    Raises:
        ConfigError: With the nearest name.
    """
    for override in overrides:
        place, is_given, _ = override.partition("=")
        if not is_given or not place.startswith("env."):
            continue
        *parents, name = place.split(".")[1:]
        others = tuple(each for each in overrides if each != override)
        if name in _names_at(config, parents) - (known := _names_at(parse(others), parents)):
            why = f"the task has no `{place}`; {did_you_mean(name, known)}"
            raise ConfigError(why, key="options.overrides")


def _names_at(config: Any, parents: list[str]) -> set[str]:
    """What a part of a task's configuration holds; nothing where there is no such part."""
    for parent in parents:
        config = config.get(parent) if isinstance(config, dict) else getattr(config, parent, None)
    held = config if isinstance(config, dict) else getattr(config, "__dict__", ())
    return {str(name) for name in held}


@contextmanager
def _overriding(overrides: tuple[str, ...]) -> Iterator[None]:
    """Say in one line what Isaac Lab, or Hydra, has against overrides.

    Raises:
        ConfigError: They are refused.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        if not overrides:
            raise
        why = f"Isaac Lab refuses them: {told(error)}; nearest: leave out what it names"
        raise ConfigError(why, key="options.overrides") from error


def _joined(terms: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
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
