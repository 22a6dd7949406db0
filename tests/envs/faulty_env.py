"""A real simulator that misbehaves on purpose, by the reset seed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.envs.base import REGISTRY, SimulatorBatch, SimulatorEnv


@dataclass(frozen=True)
class FaultyOptions:
    """Options of the ``faulty`` and ``faulty_batch`` env types."""

    inner: str
    """Env type that is wrapped."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its options."""
    kinds: tuple[str, ...] = ("none",)
    """What an episode does at its third step: number ``seed % len(kinds)``."""
    broken_task: int = -1
    """Task whose every reset raises."""
    leak_mb: int = 0
    """What every episode keeps for ever, in megabytes."""


def _fail(kind: str) -> None:
    """End, never answer, or raise, where that is how the simulator is broken."""
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    if kind == "raise":
        raise ValueError("the gripper fell off")


def _broken(kind: str, observation: Any) -> Any:
    """What a broken simulator shows instead of an observation."""
    states = observation["states"]
    changes = {
        "nan": {"states": states * np.float32(np.nan)},
        "shape": {"states": states[..., :1]},
        "dtype": {"states": states.astype(np.float64)},
        "black": {"main_images": np.zeros_like(observation.get("main_images", states))},
    }
    return {**observation, **changes.get(kind, {})}


class FaultyEnv(SimulatorEnv):
    """One env of another type; without states, so that it is rebuilt by replaying its actions."""

    Options = FaultyOptions

    def __init__(self, options: FaultyOptions) -> None:
        super().__init__(options)
        adapter = REGISTRY.load(options.inner)
        self._inner: Any = adapter(adapter.Options(**options.options))
        for name in (
            "observation_space", "action_space", "task_descriptions", "never_black", "replayable",
            "skips_observations",
        ):  # fmt: skip
            setattr(self, name, getattr(self._inner, name))
        self._kept: list[bytes] = []
        self._steps, self._kind = 0, "none"
        self._seen: Any = None

    def task_of(self, seed: int) -> int:
        return self._inner.task_of(seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.task_of(seed or 0) == self.options.broken_task:
            raise ValueError("the model has no such body")
        self._steps, self._kind = 0, self.options.kinds[(seed or 0) % len(self.options.kinds)]
        self._kept.append(os.urandom(self.options.leak_mb << 20))
        found = self._inner.reset(seed=seed)
        self.task_id = self._inner.task_id
        return found

    def step_blind(self, action: Any) -> Any:
        """It fails without having drawn a picture: the graphics of another env are at hand."""
        self._steps += 1
        if self.skips_observations:
            self._seen, found = None, self._inner.step_blind(action)
        else:
            self._seen, *found = self._inner.step(action)
        if self._steps == 3:
            _fail(self._kind)
        return tuple(found)

    def observe(self) -> Any:
        seen = self._inner.observe() if self._seen is None else self._seen
        return _broken(self._kind, seen) if self._steps >= 3 else seen

    def render(self) -> Any:
        if self._kind == "no picture":
            raise RuntimeError("the graphics card fell off the bus")
        return self._inner.render()

    def close(self) -> None:
        self._inner.close()

    def discard(self) -> None:
        self._inner.discard()


class FaultyBatch(SimulatorBatch):
    """Rows of another type that steps a batch; one that misbehaves takes the others with it."""

    Options = FaultyOptions

    def __init__(self, options: FaultyOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        adapter = REGISTRY.load(options.inner)
        self._inner: Any = adapter(adapter.Options(**options.options), num_envs)
        for name in ("observation_space", "action_space", "task_descriptions"):
            setattr(self, name, getattr(self._inner, name))
        self._steps = np.zeros(num_envs, int)
        self._kinds = np.full(num_envs, "none", object)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        self._steps[rows] = 0
        for row, seed in zip(rows.tolist(), seeds.tolist()):  # noqa: B905 - as the env side
            self._kinds[row] = self.options.kinds[seed % len(self.options.kinds)]
        return self._inner.reset(rows, seeds)

    def step(self, actions: np.ndarray) -> Any:
        self._steps += 1
        found = self._inner.step(actions)
        shown = found.observations
        observations = dict(shown() if callable(shown) else shown)
        for row in np.flatnonzero(self._steps == 3).tolist():
            kind = self._kinds[row]
            if kind == "nan":
                observations["states"][row] = np.nan
            else:
                _fail(kind)
                observations = _broken(kind, observations)
        return type(found)(**{**vars(found), "observations": observations})

    def close(self) -> None:
        self._inner.close()
