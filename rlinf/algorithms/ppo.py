"""Proximal policy optimisation (Schulman et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlinf.algorithms.advantages import (
    DecisionSteps,
    decision_steps,
    episode_length_weights,
    generalized_advantages,
    idle_rows,
    per_row,
)
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.losses import aggregate, clipped_value_loss
from rlinf.algorithms.objective import policy_terms, total_weight
from rlinf.algorithms.protocol import Algorithm, Evaluation
from rlinf.algorithms.reward_normalizer import RewardNormalizer
from rlinf.algorithms.samples import advantage_metrics, training_batch
from rlinf.data.trajectory import Trajectory


class PPO(Algorithm):
    """Advantages from a critic, one clipped objective."""

    def __init__(self, config: PPOConfig, *, group_size: int = 1) -> None:
        del group_size  # environments are not compared with each other
        self.config = config
        self.needs_reference = config.kl_beta > 0
        self._reward_normalizer = (
            RewardNormalizer(gamma=config.gamma, clip=config.reward_clip)
            if config.normalize_rewards
            else None
        )

    def value_dim(self, chunk: int) -> int:
        """One value per reward."""
        return chunk if self.config.reward_type == "action_level" else 1

    def prepare(self, trajectory: Trajectory) -> tuple[Batch, dict[str, float]]:
        """Samples with generalised advantages; see :meth:`Algorithm.prepare`."""
        config = self.config
        steps = decision_steps(
            trajectory, reward_type=config.reward_type, bootstrap_type=config.bootstrap_type
        )
        advantages, returns = generalized_advantages(
            steps=steps,
            rewards=self._rewards(steps, trajectory),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        batch = training_batch(
            trajectory,
            logprob_type=config.logprob_type,
            advantages=per_row(advantages, trajectory.num_steps),
            returns=per_row(returns, trajectory.num_steps),
            values=trajectory.values,
            weights=self._weights(trajectory),
            normalized=config.normalize_advantages,
        )
        metrics = advantage_metrics(batch, trajectory)
        metrics["critic/explained_variance"] = explained_variance(batch)
        return batch, metrics

    def _rewards(self, steps: DecisionSteps, trajectory: Trajectory) -> Tensor:
        if self._reward_normalizer is None:
            return steps.rewards
        per_chunk = len(steps.rewards) // trajectory.num_steps
        valid = trajectory.valid & ~idle_rows(trajectory)
        return self._reward_normalizer(
            rewards=steps.rewards,
            dones=steps.dones,
            valid=valid.repeat_interleave(per_chunk, dim=0),
            env_ids=trajectory.env_ids,
        )

    def _weights(self, trajectory: Trajectory) -> Tensor | None:
        idle = idle_rows(trajectory)
        if not bool(idle.any()):
            return None
        active = ~idle & trajectory.uninterrupted()
        if self.config.weight_by_episode_length:
            return episode_length_weights(active)
        return active.float()

    def normalizer(self, batch: Batch) -> float:
        """Sum of the sample weights."""
        return total_weight(batch)

    def loss(
        self, evaluation: Evaluation, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy, value and entropy loss; see :meth:`Algorithm.loss`."""
        config = self.config
        loss, metrics = self._policy_terms(evaluation, batch, normalizer)
        if batch.returns is None or batch.values is None:
            raise ValueError("PPO needs returns and values in the batch")
        terms, clipped = clipped_value_loss(
            values=evaluation.values,
            old_values=batch.values,
            returns=batch.returns,
            value_clip=config.value_clip,
            delta=config.huber_delta,
        )
        value_loss = _mean(terms, batch.weights, normalizer)
        metrics["critic/value_loss"] = value_loss.detach()
        if clipped is not None:
            metrics["critic/value_clip_ratio"] = _mean(clipped.float(), batch.weights, normalizer)
        return loss + config.value_coefficient * value_loss, metrics

    def _policy_terms(
        self, evaluation: Evaluation, batch: Batch, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy and entropy loss of a micro batch."""
        return policy_terms(self.config, evaluation, batch, normalizer=normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Reward statistics."""
        if self._reward_normalizer is None:
            return {}
        return {"reward_normalizer": self._reward_normalizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if self._reward_normalizer is not None:
            self._reward_normalizer.load_state_dict(state["reward_normalizer"])


def _mean(terms: Tensor, weights: Tensor | None, normalizer: float) -> Tensor:
    return aggregate(loss=terms, mode="seq-mean-token-mean", normalizer=normalizer, weights=weights)


def explained_variance(batch: Batch) -> float:
    """1 − Var(returns − values) / Var(returns) of the critic that acted; 0 for constant returns."""
    if batch.returns is None or batch.values is None:
        raise ValueError("explained variance needs returns and values")
    returns, values = batch.returns, batch.values
    if batch.weights is not None:
        counted = batch.weights > 0
        returns, values = returns[counted], values[counted]
    total = returns.double().var(correction=0)
    if not total > 0:
        return 0.0
    return 1.0 - ((returns.double() - values.double()).var(correction=0) / total).item()
