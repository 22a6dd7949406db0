"""What a simulator adapter is, and which there are.

Files on the env side (this one, ``host.py``, ``process.py``, the adapters) run in env processes,
perhaps under another interpreter. They import the standard library, numpy, gymnasium and, lazily,
their simulator; nothing else.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Dict  # noqa: UP035 - the env side runs under 3.8 as well

import gymnasium
import numpy as np

from rlinf.config.nearest import did_you_mean
from rlinf.config.registry import Registry
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError

Observation = Dict[str, np.ndarray]  # noqa: UP006
"""One observation: ``states``, ``proprioception`` float32 [D]; ``main_images``, ``wrist_images``
uint8 [H, W, 3] or [n, H, W, 3]; ``extra_view_images`` uint8 [n, H, W, 3]; further cameras by name,
``images.NAME`` uint8 [H, W, 3], and ``depth.NAME`` float32 [H, W] in metres. Any subset, the same
at every step."""

TASK_KEY = "task_ids"
"""The entry of an observation that says which of several tasks an env is in: int64, an index into
the table of descriptions. The host adds it, not the adapter."""

VECTORS = ("states", "proprioception")
"""Observations [D]; those of several simulators in one batch are padded with zeros."""
_PICTURES = ("main_images", "wrist_images", "extra_view_images")


def observation_type(key: str) -> type[np.generic] | None:
    """Return the type that an observation of this key has; None where there is no such key."""
    if key in VECTORS or re.fullmatch(r"depth\.\w+", key):
        return np.float32
    if key in _PICTURES or re.fullmatch(r"images\.\w+", key):
        return np.uint8
    return None


class Simulator:
    """What all adapters say of themselves.

    ``observation_space`` is a ``gymnasium.spaces.Dict`` over keys of :data:`Observation`,
    ``action_space`` a ``Box`` [A] or ``Discrete``. Time limits belong to the host: an adapter does
    not truncate at ``max_episode_steps``.
    """

    Options: ClassVar[type[Any]]
    """Frozen dataclass of the adapter's options."""

    requirements: ClassVar[Requirements | None] = None
    """What the simulator needs to be installed; None where gymnasium alone will do."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    task_descriptions: tuple[str, ...] = ()
    """What there is to do, in words, one text per task; known after the constructor."""

    deterministic: ClassVar[bool] = True
    """Whether the same seed and actions give the same floats, in every process."""

    replayable: ClassVar[bool] = True
    """Whether an env that was lost, or a resumed one, may be rebuilt by repeating its actions since
    the reset; not so for what cannot reproduce them to the bit, or would move a real arm. Where it
    is false and there is no :meth:`get_state` either, the episode is closed instead."""

    @classmethod
    def check(cls, options: Any, max_episode_steps: int) -> None:
        """Refuse options that cannot work, without importing the simulator.

        Raises:
            ConfigError: An option is not legal; ``key`` is ``options.NAME``, or that of another
                setting of the env section.
            MissingPackageError: The simulator is not installed.
        """

    @classmethod
    def expert(cls, options: Any) -> Callable[[Observation], np.ndarray] | None:
        """Who solves the task with these options from observations alone, None if nobody does.

        The function gives an action [A] for an observation. It runs where the episodes are
        recorded, not in an env process.
        """
        return None


class SimulatorEnv(Simulator, gymnasium.Env[Observation, np.ndarray]):
    """One simulated episode at a time, with ``reset`` and ``step`` of gymnasium.

    ``reset(seed=...)`` must depend on the seed alone. ``info["success"]`` and ``info["fail"]``
    (bool) are read when present. An action is a float32 array [A] for ``Box`` and an ``int`` for
    ``Discrete``.
    """

    task_id: int = 0
    """Which of ``task_descriptions`` holds now; it may change at a reset, and within an episode."""

    skips_observations: ClassVar[bool] = False
    """Whether :meth:`step_blind` and :meth:`observe` exist: inside an action chunk only the last
    observation is used, and an env that renders can leave out the others."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Step without making an observation; returns reward, terminated, truncated, info."""
        raise NotImplementedError

    def observe(self) -> Observation:
        """Return the observation of the present state."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any] | None:
        """Return all that the next steps depend on, or None when the simulator cannot say.

        Values are arrays, numbers, text, booleans, None, or dictionaries of those. Without a state,
        an env is rebuilt by replaying its actions since the last reset.
        """
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; called after a reset with the seed of the same episode."""
        raise NotImplementedError


@dataclass(frozen=True)
class BatchStep:
    """What followed one action in each of the N rows of a batch."""

    observations: Observation
    """By key [N, ...]; of rows that the simulator reset by itself, those after the reset."""
    rewards: np.ndarray
    """[N] float."""
    terminated: np.ndarray
    """[N] bool."""
    truncated: np.ndarray
    """[N] bool; by the simulator itself."""
    success: np.ndarray
    """[N] bool."""
    final_observations: Observation | None = None
    """By key [N, ...], what rows showed before the simulator reset them; None where it tells
    nothing, and the observations after the reset stand for them."""


class SimulatorBatch(Simulator):
    """N episodes that one simulator steps together, on its device.

    A row that ended within an action chunk is given zeros up to the end of the chunk, which count
    for nothing.
    """

    deterministic = False
    replayable = False

    def __init__(self, options: Any, num_envs: int) -> None:
        self.options = options
        self.num_envs = num_envs

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in rows [n] with seeds [n]; the observations of all rows, by key [N]."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A] in each row."""
        raise NotImplementedError

    def task_ids(self) -> np.ndarray:
        """[N] int64, which of ``task_descriptions`` each row is in."""
        return np.zeros(self.num_envs, np.int64)

    def render(self, row: int) -> np.ndarray:
        """Return a picture of a row, uint8 [H, W, 3]."""
        raise RuntimeError("this simulator draws no pictures")

    def close(self) -> None:
        """End the simulation."""


def require_package(name: str, needs: Requirements) -> None:
    """Refuse an interpreter that lacks the simulator of an env type.

    Raises:
        ConfigError: It does; with the command that makes an environment for it.
    """
    if importlib.util.find_spec(needs.module) is None:
        raise ConfigError(
            f"the env type `{name}` needs the package {needs.module}, which {sys.executable} does "
            f"not find; `rlinf env install {name}` makes an environment that has it",
            key="type",
        )


def require_known(key: str, value: str, known: Sequence[str]) -> None:
    """Refuse an option that is none of the known ones.

    Raises:
        ConfigError: With the nearest legal value.
    """
    if value not in known:
        raise ConfigError(f"no {key} `{value}`; {did_you_mean(value, known)}", key=f"options.{key}")


ADAPTERS = {
    "aloha": "rlinf.envs.gymnasium_tasks:AlohaEnv",
    "calvin": "rlinf.envs.calvin:CalvinEnv",
    "dm_control": "rlinf.envs.dm_control:DmControlEnv",
    "franka_sim": "rlinf.envs.gymnasium_tasks:FrankaSimEnv",
    "gsenv": "rlinf.envs.batches.gsenv:GSEnv",
    "gymnasium": "rlinf.envs.gymnasium_env:GymnasiumEnv",
    "gymnasium_robotics": "rlinf.envs.gymnasium_tasks:GymnasiumRoboticsEnv",
    "isaaclab": "rlinf.envs.batches.isaaclab:IsaacLabEnv",
    "libero": "rlinf.envs.libero:LiberoEnv",
    "maniskill": "rlinf.envs.maniskill:ManiSkillEnv",
    "metaworld": "rlinf.envs.metaworld.adapter:MetaWorldEnv",
    "mjlab": "rlinf.envs.batches.mjlab:MjlabEnv",
    "panda_gym": "rlinf.envs.gymnasium_tasks:PandaGymEnv",
    "pusht": "rlinf.envs.gymnasium_tasks:PushTEnv",
    "robosuite": "rlinf.envs.robosuite_env:RobosuiteEnv",
    "roboverse": "rlinf.envs.batches.roboverse:RoboVerseEnv",
    "xarm": "rlinf.envs.gymnasium_tasks:XArmEnv",
}

REGISTRY = Registry("env type", "rlinf.envs", ADAPTERS, Simulator)
"""This table, and the entry points of other packages. To import an adapter does not import its
simulator."""
