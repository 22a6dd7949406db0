"""An environment with a picture that costs nothing: a dot is to be moved to the middle."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIZE = 32


class Dot(gymnasium.Env[Any, Any]):
    """``picture`` [32, 32, 3] and ``position`` [2]; an action [2] moves the dot by a fifth."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None, size: int = SIZE) -> None:
        self.render_mode, self._size = render_mode, size
        picture = spaces.Box(0, 255, (size, size, 3), np.uint8)
        position = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"picture": picture, "position": position})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._position = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._position = np.clip(self._position + np.float32(0.2) * action, -1, 1)
        distance = float(np.linalg.norm(self._position))
        return self._seen(), -distance, distance < 0.1, False, {"is_success": distance < 0.1}

    def render(self) -> Any:
        picture = np.full((self._size, self._size, 3), 40, np.uint8)
        column, row = ((self._position + 1) / 2 * (self._size - 4)).astype(int)
        picture[row : row + 4, column : column + 4] = 255
        return picture

    def _seen(self) -> dict[str, Any]:
        return {"picture": self.render(), "position": self._position.copy()}


class BlindDot(Dot):
    """Loses its position, which is NaN then, where the dot has come into the right half."""

    def step(self, action: Any) -> Any:
        seen, *rest = super().step(action)
        if self._position[0] > 0:
            seen["position"][:] = np.nan
        return seen, *rest


class SeenDot(Dot):
    """It shows the picture alone."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"picture": self.observation_space["picture"]})

    def _seen(self) -> dict[str, Any]:
        return {"picture": self.render()}


class ToldDot(Dot):
    """Says in words from which corner the dot comes."""

    def __init__(self, render_mode: str | None = None, size: int = SIZE) -> None:
        super().__init__(render_mode, size)
        parts = dict(self.observation_space.spaces)
        self.observation_space = spaces.Dict({**parts, "told": spaces.Text(64)})

    def _seen(self) -> dict[str, Any]:
        side = "right" if self._position[0] > 0 else "left"
        return {**super()._seen(), "told": f"from the {side} move the dot to the middle"}


class TwoViews(gymnasium.Env[Any, Any]):
    """What the fixtures of ACT see and do: two pictures [32, 48, 3], states [5], actions [3]."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        picture = spaces.Box(0, 255, (32, 48, 3), np.uint8)
        parts = {"front": picture, "wrist": picture, "arm": spaces.Box(-4.0, 4.0, (5,))}
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Box(-4.0, 4.0, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        return self._seen(), -float(np.square(action).sum()), False, False, {"is_success": False}

    def render(self) -> Any:
        return self.np_random.integers(1, 255, (32, 48, 3), np.uint8)

    def _seen(self) -> dict[str, Any]:
        arm = self.np_random.uniform(-1, 1, 5).astype(np.float32)
        return {"front": self.render(), "wrist": self.render(), "arm": arm}


gymnasium.register("Dot-v0", entry_point=Dot)
gymnasium.register("SeenDot-v0", entry_point=SeenDot)
gymnasium.register("TwoViews-v0", entry_point=TwoViews)
gymnasium.register("ToldDot-v0", entry_point=ToldDot)
gymnasium.register("BlindDot-v0", entry_point=BlindDot)
