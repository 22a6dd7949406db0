"""Metrics of a prepared rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.data.trajectory import Trajectory


def answer_metrics(batch: Batch, prepared: Batch) -> dict[str, float]:
    """Rewards, lengths, age and advantages of answers.

    Args:
        batch: Before preparation.
        prepared: After it.
    """
    trained = prepared.mask > 0
    metrics = {
        "rollout/rewards": mean(batch.rewards[batch.valid]),
        "rollout/response_length": mean(batch.mask.sum(dim=1)),
        "rollout/truncated": mean(batch.truncated),
        "rollout/valid": mean(batch.valid),
        "rollout/trained_sequences": float(trained.any(dim=1).sum()),
        "rollout/trained_tokens": float(trained.sum()),
    }
    staleness = batch.staleness()
    if staleness is not None:
        metrics.update(staleness_metrics(staleness[batch.mask > 0]))
    return metrics | advantage_metrics(prepared)


def chunk_step_metrics(trajectory: Trajectory, batch: Batch) -> dict[str, float]:
    """Mean reward of a chunk step, and advantages of the samples that were made of a rollout."""
    rewards = trajectory.rewards.sum(dim=-1)[trajectory.valid]
    return {"rollout/rewards": mean(rewards), **advantage_metrics(batch)}


def advantage_metrics(batch: Batch) -> dict[str, float]:
    """Mean, maximum and minimum of the advantages that are trained on."""
    counted = advantages_of(batch)[_trained(batch, batch.mask)]
    if not counted.numel():
        return {}
    low, high = torch.aminmax(counted)
    return {
        "rollout/advantages_mean": mean(counted),
        "rollout/advantages_max": high.item(),
        "rollout/advantages_min": low.item(),
    }


def equal_groups(batch: Batch) -> float:
    """Fraction of the groups in which all valid rewards are equal: they teach nothing."""
    if not bool(batch.valid.any()):
        return 0.0
    numbers, group = torch.unique(batch.groups[batch.valid], return_inverse=True)
    rewards = batch.rewards[batch.valid]
    low = rewards.new_full((len(numbers),), torch.inf).scatter_reduce(0, group, rewards, "amin")
    high = rewards.new_full((len(numbers),), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    return mean(low == high)


def critic_metrics(batch: Batch) -> dict[str, float]:
    """Explained variance of the critic before its update; nothing without one."""
    if batch.values is None or batch.returns is None:
        return {}
    counted = _trained(batch, batch.values)
    found = explained_variance(batch.values[counted], batch.returns[counted])
    return {"critic/explained_variance": found}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns); 0 for constant returns."""
    targets = returns.double()
    total = targets.var(correction=0) if targets.numel() else targets.new_zeros(())
    if not total > 0:
        return 0.0
    return 1.0 - ((targets - values.double()).var(correction=0) / total).item()


def staleness_metrics(staleness: Tensor) -> dict[str, float]:
    """Mean and largest staleness, and the share of each value that occurs.

    Args:
        staleness: [N] int64 of samples or tokens: training phases between the weights that made
            them and those that the phase began with.
    """
    if not staleness.numel():
        return {}
    values, counts = torch.unique(staleness, return_counts=True)
    metrics = {
        f"rollout/staleness_share/{value}": count / staleness.numel()
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }
    metrics["rollout/staleness"] = mean(staleness)
    metrics["rollout/staleness_max"] = float(values[-1])
    return metrics


def advantages_of(batch: Batch) -> Tensor:
    """[N, K] advantages of a prepared batch.

    Raises:
        ValueError: It has none.
    """
    if batch.advantages is None:
        raise ValueError("the batch has no advantages: prepare it first")
    return batch.advantages


def mean(tensor: Tensor) -> float:
    """Mean in float64; 0 of nothing."""
    return tensor.double().mean().item() if tensor.numel() else 0.0


def _trained(batch: Batch, column: Tensor) -> Tensor:
    """Bool, of the shape of ``column``, [N, K] or [N, V]: what counts in the loss."""
    counted = batch.mask > 0
    if column.shape != counted.shape:
        counted = counted.any(dim=1, keepdim=True).expand(column.shape)
    return counted if batch.weights is None else counted & (batch.weights > 0).unsqueeze(1)
