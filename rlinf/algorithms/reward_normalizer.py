"""Scale rewards by the running standard deviation of the discounted return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RewardNormalizer:
    """r / std of the discounted return, clipped (Engstrom et al. 2020, "reward scaling").

    Every environment carries its discounted return R ← γR + r from rollout to rollout, back to 0
    where an episode ends. The variance of all R seen so far scales the rewards of the rollout it
    was updated with. A whole rollout is taken in at once in the order of environment numbers, so
    the result does not depend on how environments are split over workers.

    Args:
        gamma: Discount per step.
        clip: Bound of a scaled reward.
        epsilon: Added to the variance.
    """

    def __init__(self, *, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        self._gamma = gamma
        self._clip = clip
        self._epsilon = epsilon
        self._mean = 0.0
        self._variance = 1.0
        self._count = 0
        self._carried: dict[int, float] = {}

    def __call__(self, *, rewards: Tensor, dones: Tensor, valid: Tensor, env_ids: Tensor) -> Tensor:
        """Take a rollout into the statistics and return its scaled rewards.

        Args:
            rewards: [S, B].
            dones: [S, B] bool.
            valid: [S, B] bool; other steps do not enter the statistics.
            env_ids: [B].
        """
        envs = env_ids.tolist()
        carried = [self._carried.get(env, 0.0) for env in envs]
        running = torch.tensor(carried, dtype=torch.float64, device=rewards.device)
        rewards64 = rewards.double()
        returns = torch.empty_like(rewards64)
        keep = (~dones).double() * self._gamma
        for step in range(len(rewards)):
            returns[step] = rewards64[step] + running
            running = returns[step] * keep[step]
        # `running` is already discounted: what the next reward is added to.
        self._carried.update(zip(envs, running.tolist(), strict=True))
        self._update(returns[valid])
        scale = 1.0 / math.sqrt(self._variance + self._epsilon)
        return (rewards * scale).clamp(-self._clip, self._clip)

    def _update(self, returns: Tensor) -> None:
        """Combine the variances (Chan, Golub and LeVeque 1979)."""
        if not len(returns):
            return
        variance, mean = torch.var_mean(returns, correction=0)
        total = self._count + len(returns)
        weight = len(returns) / total
        delta = mean.item() - self._mean
        self._mean += delta * weight
        self._variance += weight * (variance.item() - self._variance)
        self._variance += weight * (1 - weight) * delta**2
        self._count = total

    def state_dict(self) -> dict[str, Any]:
        """Statistics, and the return that each environment carries."""
        envs = sorted(self._carried)
        return {
            "mean": self._mean,
            "variance": self._variance,
            "count": self._count,
            "env_ids": torch.tensor(envs, dtype=torch.int64),
            "carried": torch.tensor([self._carried[env] for env in envs], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
        self._count = int(state["count"])
        envs, carried = state["env_ids"].tolist(), state["carried"].tolist()
        self._carried = dict(zip(envs, carried, strict=True))
