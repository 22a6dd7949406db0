"""Proximal policy optimisation with a critic (Schulman et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.base_config import PolicyConfig
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import CriticConfig, DecoupledPPOConfig, PPOConfig
from rlinf.algorithms.credit import (
    DecisionSteps,
    at_last_token,
    decision_steps,
    generalized_advantages,
    idle_rows,
    per_row,
    token_advantages,
)
from rlinf.algorithms.objective import ClippedObjective
from rlinf.algorithms.samples import Credit, CreditEstimate, reference_kl
from rlinf.data.trajectory import NO_EPISODE, Trajectory
from rlinf.envs.results import TASK_IDS


class RewardNormalizer:
    """r / std of the discounted return, clipped (Engstrom et al. 2020, "reward scaling").

    Every environment carries its discounted return R ← γR + r from rollout to rollout, back to 0
    where an episode ends. The variance of all R seen so far, plus ε, scales the rewards of the
    rollout it was updated with; each of several tasks has its own, or those that are solved would
    drown the others. A whole rollout is taken in at once in the order of environment numbers, so
    that the result does not depend on how they are split over workers.
    """

    def __init__(self, *, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        self._gamma, self._clip, self._epsilon = gamma, clip, epsilon
        self._moments: dict[int, tuple[float, float, int]] = {}
        self._carried: dict[int, tuple[int, float]] = {}

    def __call__(
        self,
        *,
        rewards: Tensor,
        dones: Tensor,
        valid: Tensor,
        env_ids: Tensor,
        episodes: tuple[Tensor, Tensor] | None = None,
        played: Tensor | None = None,
        tasks: Tensor | None = None,
    ) -> Tensor:
        """Take the valid steps of a rollout [S, B] into the statistics; its scaled rewards.

        Args:
            rewards: [S, B].
            dones: [S, B] bool.
            valid: [S, B] bool.
            env_ids: [B] int64.
            episodes: Numbers of the episodes that the environments begin and leave the rollout in,
                int64 [B] each; a return is carried within one alone. None: they are the same.
            played: [S, B] bool, what is not counts for nothing and ends nothing; None: all are.
            tasks: The task of each step, int64 [S, B]; None: there is one.
        """
        envs = env_ids.tolist()
        first = last = [0] * len(envs)
        if episodes is not None:
            first, last = (numbers.tolist() for numbers in episodes)
        carried = []
        for env, episode in zip(envs, first, strict=True):
            begun, value = self._carried.get(env, (episode, 0.0))
            carried.append(value if begun == episode else 0.0)
        running = torch.tensor(carried, dtype=torch.float64, device=rewards.device)
        rewards64 = rewards.double()
        returns = torch.empty_like(rewards64)
        keep = (~dones).double() * self._gamma
        if played is not None:
            keep = torch.where(played, keep, 1.0)
        for step in range(len(rewards)):
            returns[step] = rewards64[step] + running
            running = returns[step] * keep[step]
        # `running` is already discounted: what the next reward is added to.
        self._carried.update(zip(envs, zip(last, running.tolist(), strict=True), strict=True))
        tasks = torch.zeros_like(valid, dtype=torch.int64) if tasks is None else tasks
        scaled = torch.empty_like(rewards)
        for task in torch.unique(tasks).tolist():
            played = tasks == task
            variance = self._variance(task, returns[played & valid])
            scaled[played] = rewards[played] * (1.0 / math.sqrt(variance + self._epsilon))
        return scaled.clamp(-self._clip, self._clip)

    def _variance(self, task: int, returns: Tensor) -> float:
        """Combine the variances (Chan, Golub and LeVeque 1979)."""
        mean, variance, count = self._moments.get(task, (0.0, 1.0, 0))
        if not len(returns):
            return variance
        new_variance, new_mean = (each.item() for each in torch.var_mean(returns, correction=0))
        total = count + len(returns)
        weight, delta = len(returns) / total, new_mean - mean
        mean += delta * weight
        variance += weight * (new_variance - variance) + weight * (1 - weight) * delta**2
        self._moments[task] = mean, variance, total
        return variance

    def state_dict(self) -> dict[str, Any]:
        """Statistics of each task, and the return that each environment carries."""
        envs, tasks = sorted(self._carried), sorted(self._moments)
        moments = [self._moments[task] for task in tasks]
        return {
            "tasks": torch.tensor(tasks, dtype=torch.int64),
            "moments": torch.tensor(moments, dtype=torch.float64).reshape(-1, 3),
            "env_ids": torch.tensor(envs, dtype=torch.int64),
            "episodes": torch.tensor([self._carried[env][0] for env in envs], dtype=torch.int64),
            "carried": torch.tensor([self._carried[env][1] for env in envs], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        moments = [(mean, variance, int(n)) for mean, variance, n in state["moments"].tolist()]
        self._moments = dict(zip(state["tasks"].tolist(), moments, strict=True))
        # Runs of before say of no return whose it is: it is begun anew.
        episodes = state.get("episodes", torch.full_like(state["env_ids"], NO_EPISODE))
        held = zip(episodes.tolist(), state["carried"].tolist(), strict=True)
        self._carried = dict(zip(state["env_ids"].tolist(), held, strict=True))


class CriticCredit(Credit):
    """Generalised advantages.

    The reward of an answer stands on its last valid token, less the KL divergence of each token
    where ``kl_reward_beta`` asks for it. Nothing follows the last token, also where the token limit
    cut the answer off.
    """

    _config: CriticConfig

    def __init__(self, config: CriticConfig, group_size: int = 1) -> None:
        super().__init__(config, group_size)
        self._normalizer: RewardNormalizer | None = None
        if config.normalize_rewards:
            self._normalizer = RewardNormalizer(gamma=config.gamma, clip=config.reward_clip)

    def value_dim(self, chunk: int) -> int:
        """One value per reward."""
        return chunk if self._config.reward_type == "action_level" else 1

    def of_answers(self, batch: Batch) -> CreditEstimate:
        """See :meth:`Credit.of_answers`."""
        if batch.values is None:
            raise ValueError(f"{self._config.type} needs values in the batch")
        scores = torch.where(batch.valid, batch.rewards.double(), 0.0)
        rewards = at_last_token(rewards=scores, mask=batch.mask) - reward_kl(self._config, batch)
        advantages, returns = token_advantages(
            rewards=rewards,
            values=batch.values.double(),
            mask=batch.mask,
            gamma=self._config.gamma,
            gae_lambda=self._config.gae_lambda,
        )
        return CreditEstimate(advantages=advantages, returns=returns)

    def of_chunk_steps(self, trajectory: Trajectory) -> CreditEstimate:
        """See :meth:`Credit.of_chunk_steps`."""
        config = self._config
        steps = decision_steps(
            trajectory, reward_type=config.reward_type, bootstrap_type=config.bootstrap_type
        )
        advantages, returns = generalized_advantages(
            steps=steps,
            rewards=self._rewards(steps, trajectory),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        rows = trajectory.num_steps
        return CreditEstimate(advantages=per_row(advantages, rows), returns=per_row(returns, rows))

    def _rewards(self, steps: DecisionSteps, trajectory: Trajectory) -> Tensor:
        if self._normalizer is None:
            return steps.rewards
        per_chunk = len(steps.rewards) // trajectory.num_steps
        valid = trajectory.valid & ~idle_rows(trajectory)
        tasks = trajectory.forward_inputs.get(TASK_IDS)
        return self._normalizer(
            rewards=steps.rewards,
            dones=steps.dones,
            valid=valid.repeat_interleave(per_chunk, dim=0),
            env_ids=trajectory.env_ids,
            episodes=(trajectory.of_first_row(trajectory.episode_ids), trajectory.episode_ids[-1]),
            played=trajectory.played.repeat_interleave(per_chunk, dim=0),
            tasks=None if tasks is None else tasks.repeat_interleave(per_chunk, dim=0),
        )

    def state_dict(self) -> dict[str, Any]:
        """Reward statistics."""
        if self._normalizer is None:
            return {}
        return {"reward_normalizer": self._normalizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if self._normalizer is not None:
            self._normalizer.load_state_dict(state["reward_normalizer"])


def reward_kl(config: PolicyConfig, batch: Batch) -> Tensor:
    """[N, L] float64, what the KL divergence takes from the reward of each token."""
    if not config.kl_reward_beta:
        return torch.zeros_like(batch.mask, dtype=torch.float64)
    return config.kl_reward_beta * reference_kl(batch, config.kl_reward_type)


class PPO(ClippedObjective):
    """Advantages from a critic, one clipped objective.

    The critic of a policy for actions is part of it and trained by the same loss; that of tokens is
    a network of its own.
    """

    config: PPOConfig | DecoupledPPOConfig
    credit: type[Credit] = CriticCredit

    def trains_policy(self, step: int) -> bool:
        """Not during the warm-up of a critic of its own."""
        return self.config.family == "actions" or not self._warms_up(step)

    def trains_values_alone(self, step: int) -> bool:
        """During the warm-up of a critic that is part of the policy."""
        return self.config.family == "actions" and self._warms_up(step)

    def begin_phase(self, step: int) -> None:
        """While a critic that is part of the policy warms up, the values are all its loss."""
        self._policy_weight = 0.0 if self.trains_values_alone(step) else 1.0

    def _warms_up(self, step: int) -> bool:
        return step < self.config.critic_warmup_steps
