"""What a simulator adapter is, and which there are.

Files on the env side (this one, ``host.py``, ``process.py``, the adapters) run in env processes,
perhaps under another interpreter. They import the standard library, numpy, gymnasium and, lazily,
their simulator; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np

from rlinf.config.registry import Registry

Observation = dict[str, np.ndarray]
"""One observation: ``states`` float32 [D]; ``main_images``, ``wrist_images`` uint8 [H, W, 3];
``extra_view_images`` uint8 [n, H, W, 3]. Any subset, the same at every step."""

OBSERVATION_KEYS = ("states", "main_images", "wrist_images", "extra_view_images")


class SimulatorEnv(gymnasium.Env[Observation, np.ndarray]):
    """One simulated episode at a time.

    A subclass sets ``observation_space`` (a ``gymnasium.spaces.Dict`` over
    :data:`OBSERVATION_KEYS`) and ``action_space`` (``Box`` [A] or ``Discrete``), and implements
    ``reset`` and ``step`` of gymnasium. ``reset(seed=...)`` must depend on the seed alone.
    ``info["success"]`` and ``info["fail"]`` (bool) are read when present. An action is a float32
    array [A] for ``Box`` and an ``int`` for ``Discrete``. Time limits belong to the host: a
    subclass does not truncate at ``max_episode_steps``.
    """

    Options: ClassVar[type[Any]]
    """Frozen dataclass of the adapter's options; the only argument of the constructor."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    task_description: str | None = None
    """What to do, in words, for policies that read."""

    skips_observations: ClassVar[bool] = False
    """Whether :meth:`step_blind` and :meth:`observe` exist: inside an action chunk only the last
    observation is used, and an env that renders can leave out the others."""

    def __init__(self, options: Any) -> None:
        self.options = options

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


ADAPTERS = {
    "gymnasium": "rlinf.envs.gymnasium_env:GymnasiumEnv",
    "metaworld": "rlinf.envs.metaworld.adapter:MetaWorldEnv",
}

REGISTRY = Registry("env type", "rlinf.envs", ADAPTERS, SimulatorEnv)
"""This table, and the entry points of other packages. To import an adapter does not import its
simulator."""
