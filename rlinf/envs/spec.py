"""What a policy must know of an env: names, shapes and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import TASK_KEY, Simulator, observation_type
from rlinf.errors import ConfigError


@dataclass(frozen=True)
class EnvSpec:
    """Shapes of one env, without the leading env dimension."""

    observation_shapes: dict[str, tuple[int, ...]]
    observation_dtypes: dict[str, str]
    """numpy type names (``float32``, ``uint8``)."""
    action_kind: str
    """``continuous`` (Box) or ``discrete``."""
    action_dim: int
    """A; 1 for a discrete action, which travels as its index."""
    action_low: tuple[float, ...]
    """[A]; 0 for a discrete action."""
    action_high: tuple[float, ...]
    """[A]; number of choices - 1 for a discrete action."""
    task_descriptions: tuple[str, ...]
    """In words; empty when the simulator has none. Where there are several, observations hold
    ``task_ids``, the index of the present one."""
    max_episode_steps: int
    """Primitive steps after which an episode is truncated."""

    @property
    def num_actions(self) -> int | None:
        """Number of choices of a discrete action, None for a continuous one."""
        return int(self.action_high[0]) + 1 if self.action_kind == "discrete" else None

    def to_json(self) -> dict[str, Any]:
        """The plain form that travels between processes."""
        return {**self.__dict__}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        """The spec whose plain form is ``data``."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        shapes = {key: tuple(shape) for key, shape in data["observation_shapes"].items()}
        plain["observation_shapes"] = shapes
        return cls(**plain)


def spec_of(env: Simulator, max_episode_steps: int) -> EnvSpec:
    """Return the spec of ``env``.

    Raises:
        ConfigError: Its spaces are not of the kind that adapters must have.
    """
    name = type(env).__name__
    boxes = _observation_boxes(env.observation_space, name)
    kind, low, high = _action_limits(env.action_space, name)
    shapes: dict[str, tuple[int, ...]] = {key: tuple(box.shape) for key, box in boxes.items()}
    dtypes = {key: np.dtype(box.dtype).name for key, box in boxes.items()}
    if len(env.task_descriptions) > 1:
        shapes[TASK_KEY], dtypes[TASK_KEY] = (), "int64"
    return EnvSpec(
        observation_shapes=shapes,
        observation_dtypes=dtypes,
        action_kind=kind,
        action_dim=len(low),
        action_low=low,
        action_high=high,
        task_descriptions=tuple(env.task_descriptions),
        max_episode_steps=max_episode_steps,
    )


def _observation_boxes(space: Any, name: str) -> dict[str, spaces.Box]:
    if not isinstance(space, spaces.Dict) or not space.spaces:
        raise ConfigError(f"{name}: observation_space must be a gymnasium.spaces.Dict, is {space}")
    boxes: dict[str, spaces.Box] = {}
    for key, part in space.spaces.items():
        wanted = observation_type(key)
        if wanted is None:
            raise ConfigError(
                f"{name}: unknown observation key '{key}'; known: states, proprioception, "
                "main_images, wrist_images, extra_view_images, images.NAME, depth.NAME"
            )
        if not isinstance(part, spaces.Box) or part.dtype != wanted:
            raise ConfigError(f"{name}: '{key}' must be a Box of {np.dtype(wanted).name}: {part}")
        boxes[key] = part
    return boxes


def _action_limits(space: Any, name: str) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            raise ConfigError(f"{name}: a Discrete action space must start at 0, is {space}")
        return "discrete", (0.0,), (float(space.n - 1),)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        low, high = (tuple(float(x) for x in limit) for limit in (space.low, space.high))
        return "continuous", low, high
    raise ConfigError(f"{name}: action_space must be a Box [A] or Discrete, is {space}")
