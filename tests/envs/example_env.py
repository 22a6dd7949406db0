"""An env in one file: a point that is pushed towards the origin.

Besides the task itself it can misbehave on purpose, so that the supervision is tested for real.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import BatchStep, SimulatorBatch, SimulatorEnv


@dataclass(frozen=True)
class PointOptions:
    """Options of the ``point`` env type."""

    size: int = 2
    misbehaviour: str = "none"
    at_step: int = 3
    one_in: int = 1
    tasks: int = 1
    replays: bool = True
    pictures: bool = False
    draws: bool = True
    at_end: bool = False
    states: bool = False
    """Whether it gives its state."""
    seconds: float = 0.0
    """Of a step."""


class PointEnv(SimulatorEnv):
    """``states`` [size] moves by a tenth of the action [size]; success within 0.1 of the origin."""

    Options = PointOptions
    task_descriptions = ("go to the origin",)

    def __init__(self, options: PointOptions) -> None:
        super().__init__(options)
        box = spaces.Box(-np.inf, np.inf, (options.size,), np.float32)
        self.observation_space = spaces.Dict({"states": box})
        if options.pictures:
            self.observation_space["main_images"] = spaces.Box(0, 255, (32, 32, 3), np.uint8)
            self.never_black = ("main_images",)
        self.action_space = spaces.Box(-1.0, 1.0, (options.size,), np.float32)
        self._position = np.zeros(options.size, np.float32)
        self._steps = 0
        self._bad = False
        self._leak: list[bytes] = []
        if options.tasks > 1:
            self.task_descriptions = tuple(f"task {number}" for number in range(options.tasks))
        self.judged_at_end = options.at_end
        self.replayable = options.replays  # of the class elsewhere; the tests want both
        if options.misbehaviour == "modules":
            raise RuntimeError(f"modules: {sorted(sys.modules)}")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        generator = np.random.default_rng(seed)
        if self.options.misbehaviour == "noise":  # not by the seed alone
            generator = np.random.default_rng()
        self._position = generator.uniform(-1, 1, self.options.size).astype(np.float32)
        self._steps = 0
        self.task_id = (seed or 0) % self.options.tasks
        self._bad = (seed or 0) % self.options.one_in == 0
        observation: Any = self._observation()
        if self._bad and self.options.at_step == 0:
            observation, _ = self._misbehave(observation, 0.0)
        return observation, {}

    def get_state(self) -> Any:
        return {"position": self._position, "steps": self._steps} if self.options.states else None

    def set_state(self, state: Any) -> None:
        self._position, self._steps = state["position"], state["steps"]

    def step(self, action: np.ndarray) -> Any:
        time.sleep(self.options.seconds)
        self._position = self._position + np.float32(0.1) * action
        self._steps += 1
        if self._steps == 2 and self.options.tasks > 1:
            self.task_id = (self.task_id + 1) % self.options.tasks  # within an episode
        distance = float(np.linalg.norm(self._position))
        observation, reward = self._observation(), -distance
        if self._bad and self._steps == self.options.at_step:
            observation, reward = self._misbehave(observation, reward)
            if self.options.misbehaviour == "values":  # as gym had it, before gymnasium
                return observation, reward, distance < 0.1, {"success": distance < 0.1}
            if self.options.misbehaviour == "info":
                return observation, reward, False, False, None
        return observation, reward, distance < 0.1, False, {"success": distance < 0.1}

    def _observation(self) -> Any:
        picture = {"main_images": self.render()} if self.options.pictures else {}
        return {"states": self._position.copy(), **picture}

    def render(self) -> Any:
        if not self.options.draws:
            raise RuntimeError("no graphics")
        picture = np.zeros((32, 32, 3), np.uint8)
        column, row = np.clip((self._position[:2] + 1) * 16, 0, 31).astype(int)
        picture[row, column] = 255
        return picture

    def _misbehave(self, observation: Any, reward: Any) -> Any:
        kind = self.options.misbehaviour
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "leak":
            self._leak.append(b"x" * (64 << 20))
        if kind == "hang":
            time.sleep(3600)
        if kind == "raise":
            raise ValueError("the gripper fell off")
        if kind == "black":
            return {**observation, "main_images": np.zeros((32, 32, 3), np.uint8)}, reward
        states = observation["states"]
        wrong = {
            "nan": ({"states": states * np.float32(np.nan)}, reward),
            "nan_reward": (observation, float("nan")),
            "shape": ({"states": states[:1]}, reward),
            "dtype": ({"states": states.astype(np.float64)}, reward),
            "keys": ({"state": states}, reward),
            "reward": (observation, np.zeros(2)),
        }
        return wrong.get(kind, (observation, reward))


@dataclass(frozen=True)
class PointBatchOptions:
    """Options of the ``point_batch`` env type."""

    size: int = 2
    misbehaviour: str = "none"
    at_step: int = 3
    one_in: int = 1
    at_end: bool = False
    together: bool = False
    reads: bool = False
    """Whether observations are handed over as what reads them, with how often that was done."""


class PointBatch(SimulatorBatch):
    """The points of many rows at once; misbehaves in the first row whose seed is bad."""

    Options = PointBatchOptions
    task_descriptions = ("go to the origin",)

    def __init__(self, options: PointBatchOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        self.judged_at_end = options.at_end
        self._reads = 0
        box = spaces.Box(-np.inf, np.inf, (options.size,), np.float32)
        self.observation_space = spaces.Dict({"states": box})
        if options.reads:
            self.observation_space["proprioception"] = spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (options.size,), np.float32)
        self._position = np.zeros((num_envs, options.size), np.float32)
        self._steps = np.zeros(num_envs, int)
        self._bad = np.zeros(num_envs, bool)
        self._leak: list[bytes] = []

    @classmethod
    def begins_together(cls, options: PointBatchOptions) -> bool:
        return options.together

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        if self.options.together:
            self._steps[:] = self._position[:] = 0
        if self.options.misbehaviour == "reset" and len(rows) < self.num_envs:
            raise ValueError("all rows or none")
        for row, seed in zip(rows, seeds, strict=True):
            generator = np.random.default_rng(seed)
            self._position[row] = generator.uniform(-1, 1, self.options.size)
            self._bad[row] = seed % self.options.one_in == 0
        self._steps[rows] = 0
        return self._seen()

    def _seen(self) -> Any:
        seen = {"states": self._position.copy()}
        if self.options.reads:
            seen["proprioception"] = np.full((self.num_envs, 1), self._reads, np.float32)
        return seen

    def _read(self) -> Any:
        self._reads += 1
        return self._seen()

    def step(self, actions: np.ndarray) -> BatchStep:
        self._position += np.float32(0.1) * actions
        self._steps += 1
        distance = np.linalg.norm(self._position, axis=1)
        observations, rewards = {"states": self._position.copy()}, -distance
        bad = np.flatnonzero(self._bad & (self._steps == self.options.at_step))
        if len(bad):
            if self.options.misbehaviour == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.options.misbehaviour == "hang":
                time.sleep(3600)
            if self.options.misbehaviour == "raise":
                raise ValueError("the solver diverged")
            if self.options.misbehaviour == "leak":
                self._leak.append(b"x" * (64 << 20))
            if self.options.misbehaviour in ("nan", "reset"):
                observations["states"][bad] = np.nan
            if self.options.misbehaviour == "shape":
                observations["states"] = observations["states"][:, :1]
            if self.options.misbehaviour == "dtype":
                observations["states"] = observations["states"].astype(np.float64)
            if self.options.misbehaviour == "keys":
                observations["state"] = observations.pop("states")
            if self.options.misbehaviour == "rewards":
                rewards = rewards[1:]
        reached = distance < 0.1
        seen = self._read if self.options.reads else observations
        return BatchStep(seen, rewards, reached, np.zeros_like(reached), reached)

    def render(self, row: int) -> np.ndarray:
        return np.full((32, 32, 3), 255, np.uint8)


class PointChunks(PointBatch):
    """The points of many rows, of which a whole chunk is executed in one call.

    A seed that eleven divides cannot be started: the simulator moves on to the next one.
    """

    whole_chunks = True

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        self._shifts = np.zeros(self.num_envs, np.int64)
        self._shifts[rows] = seeds % 11 == 0
        return super().reset(rows, seeds + self._shifts[rows])

    def seed_shifts(self) -> np.ndarray:
        return self._shifts

    def chunk_step(self, actions: np.ndarray, lengths: np.ndarray) -> BatchStep:
        rewards = np.full(actions.shape[:2], np.nan)  # what is behind the end is nobody's
        success = np.zeros(self.num_envs, bool)
        for column in range(actions.shape[1]):
            assert not actions[column >= lengths, column].any()
            step = super().step(actions[:, column])
            due = column < lengths
            rewards[due, column] = step.rewards[due]
            success |= step.success & due
        seen = {"states": self._position.copy()}
        return BatchStep(seen, rewards, success, np.zeros_like(success), success)
