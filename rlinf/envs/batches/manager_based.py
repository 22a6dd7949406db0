"""Environments made of managers, as Isaac Lab and mjlab have them: one batch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import BatchStep, Observation, SimulatorBatch, quiet
from rlinf.envs.batches import row_space, to_numpy

NO_TIME_LIMIT = 1e9
"""Seconds; time limits belong to the host."""


@dataclass(frozen=True)
class ManagerBasedOptions:
    """Options that all of them have."""

    task: str
    """Task, as the simulator calls it."""

    device: str = "cpu"
    """Device that simulates: ``cpu``, or ``cuda:0``."""

    own_seeds: bool = True
    """Whether every row is reset by its own seed, one after another, which groups of equal starts
    need; false: those that begin together share the first one's, which is quicker."""

    success_return: float | None = None
    """Return from which on an episode of a task without a goal, once it is over, counts as a
    success."""

    instruction: str | None = None
    """What there is to do, in words; by default the name of the task."""


class ManagerBasedBatch(SimulatorBatch):
    """Rows of one task whose rewards, ends and goals are terms of managers.

    Success is a task's own: a command that says it is ``at_goal``, a termination that is called
    ``success``; else a return. A task without rewards gives 1 at success. Kernels are compiled when
    the first batch is built, which takes minutes and is cached by Warp: ``start_deadline`` must
    allow for it.
    """

    options: Any

    def __init__(self, options: Any, num_envs: int) -> None:
        super().__init__(options, num_envs)
        import torch

        self._torch: Any = torch
        self._return = np.zeros(num_envs)
        with quiet():
            self._env: Any = self._make()
        seen = self._reset_rows(list(range(num_envs)), seed=0)
        size = self._env.action_manager.total_action_dim
        with quiet():  # kernels of a step are compiled here, under the deadline of the start
            self._env.step(torch.zeros(num_envs, size, device=self._env.device))
        self.observation_space = row_space(self._observed(seen))
        self.action_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.task_descriptions = (options.instruction or options.task.replace("-", " ").lower(),)

    def _make(self) -> Any:
        """Build the environment of ``options.task`` with ``num_envs`` rows."""
        raise NotImplementedError

    def _observed(self, seen: Any) -> Observation:
        """What a policy sees of the groups of observations, by key [N, ...]."""
        raise NotImplementedError

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows."""
        self._return[rows] = 0.0
        if self.options.own_seeds:
            for row, seed in zip(rows.tolist(), seeds.tolist()):  # noqa: B905 - Python 3.8
                seen = self._reset_rows([int(row)], int(seed))
        else:
            seen = self._reset_rows(rows.tolist(), int(seeds[0]))
        return self._observed(seen)

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A]."""
        env = self._env
        given = self._torch.as_tensor(actions, device=env.device)
        seen, reward, terminated, time_outs, extras = env.step(given)
        rewards, ends = to_numpy(reward), to_numpy(terminated).astype(bool)
        success = self._success(rewards)
        if not env.reward_manager.active_terms:
            rewards = success.astype(np.float32)
        truncated = to_numpy(time_outs).astype(bool)
        # Where rows begin anew within the step. The entry stays from the last time that some did.
        final = extras.get("final_obs") if (ends | truncated).any() else None
        return BatchStep(
            observations=lambda: self._observed(seen),
            rewards=rewards,
            terminated=ends,
            truncated=truncated,
            success=success,
            final_observations=None if final is None else lambda: self._observed(final),
        )

    def close(self) -> None:
        """End the simulation."""
        self._env.close()

    def _reset_rows(self, rows: list[int], seed: int) -> Any:
        ids = self._torch.tensor(rows, device=self._env.device)
        with quiet():
            seen, _ = self._env.reset(seed=seed, env_ids=ids)
        return seen

    def _success(self, rewards: np.ndarray) -> np.ndarray:
        """[N] bool, after rewards [N]."""
        self._return += rewards
        commands, ends = self._env.command_manager, self._env.termination_manager
        for name in getattr(commands, "active_terms", ()):
            metrics = commands.get_term(name).metrics
            if "at_goal" in metrics:
                return to_numpy(metrics["at_goal"]) > 0
        if "success" in ends.active_terms:
            return to_numpy(ends.get_term("success")).astype(bool)
        limit = self.options.success_return
        self.judged_at_end = limit is not None
        return np.full(self.num_envs, False) if limit is None else self._return >= limit
