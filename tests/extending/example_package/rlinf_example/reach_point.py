"""A point in a box is pushed to a goal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import Observation, SimulatorEnv
from rlinf.errors import ConfigError


@dataclass(frozen=True)
class ReachPointOptions:
    """Options of the ``reach-point`` env type."""

    dimensions: int = 2
    """Dimensions of the box."""

    tolerance: float = 0.1
    """Distance from the goal that counts as success."""


class ReachPointEnv(SimulatorEnv):
    """A point in [-1, 1]^n is pushed to a goal; start and goal depend on the seed alone."""

    Options = ReachPointOptions
    task_descriptions = ("go to the goal",)

    def __init__(self, options: ReachPointOptions) -> None:
        super().__init__(options)
        size = options.dimensions
        states = spaces.Box(-np.inf, np.inf, (2 * size,), np.float32)
        self.observation_space = spaces.Dict({"states": states})
        self.action_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self._position = self._goal = np.zeros(size, np.float32)

    @classmethod
    def check(cls, options: ReachPointOptions, max_episode_steps: int) -> None:
        """Refuse, before anything starts, a box without dimensions."""
        if options.dimensions < 1:
            raise ConfigError("a box has dimensions; nearest: 1", key="options.dimensions")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Put point and goal at random places."""
        places = np.random.default_rng(seed).uniform(-1, 1, (2, self.options.dimensions))
        self._position, self._goal = places.astype(np.float32)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move by a fifth of the action; the reward is minus the distance that is left."""
        self._position = np.clip(self._position + 0.2 * np.clip(action, -1, 1), -1, 1)
        distance = float(np.linalg.norm(self._goal - self._position))
        success = distance < self.options.tolerance
        return self._observation(), -distance, success, False, {"success": success}

    def _observation(self) -> Observation:
        return {"states": np.concatenate([self._position, self._goal - self._position])}
