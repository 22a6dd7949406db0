"""Metrics of a prepared rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.staleness import staleness_metrics


def rollout_metrics(batch: Batch, prepared: Batch) -> dict[str, float]:
    """Rewards, lengths and advantages of a rollout.

    Args:
        batch: Before preparation.
        prepared: After it.
    """
    trained = prepared.mask > 0
    metrics = {
        "rollout/rewards": _mean(batch.rewards[batch.valid]),
        "rollout/response_length": _mean(batch.mask.sum(dim=1)),
        "rollout/truncated": _mean(batch.truncated),
        "rollout/valid": _mean(batch.valid),
        "rollout/trained_sequences": float(trained.any(dim=1).sum()),
        "rollout/trained_tokens": float(trained.sum()),
    }
    if batch.version is not None:
        metrics.update(staleness_metrics((batch.version - batch.versions)[batch.mask > 0]))
    advantages = prepared.advantages
    if advantages is not None and bool(trained.any()):
        counted = advantages[trained]
        low, high = torch.aminmax(counted)
        metrics["rollout/advantages_mean"] = _mean(counted)
        metrics["rollout/advantages_max"] = high.item()
        metrics["rollout/advantages_min"] = low.item()
    return metrics


def equal_groups(*, rewards: Tensor, groups: Tensor, valid: Tensor) -> float:
    """Fraction of the groups in which all valid rewards are equal: they teach nothing.

    Args:
        rewards: [N].
        groups: [N] int64.
        valid: [N] bool.
    """
    if not bool(valid.any()):
        return 0.0
    numbers, group = torch.unique(groups[valid], return_inverse=True)
    rewards = rewards[valid]
    low = rewards.new_full((len(numbers),), torch.inf).scatter_reduce(0, group, rewards, "amin")
    high = rewards.new_full((len(numbers),), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    return _mean(low == high)


def explained_variance(*, values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns) over valid tokens; 0 for constant returns.

    Args:
        values: [N, L] of the critic before its update.
        returns: [N, L].
        mask: [N, L].
    """
    counted = mask > 0
    targets = returns[counted].double()
    if not targets.numel():
        return 0.0
    total = targets.var(correction=0)
    if not total > 0:
        return 0.0
    return 1.0 - ((targets - values[counted].double()).var(correction=0) / total).item()


def _mean(tensor: Tensor) -> float:
    return tensor.double().mean().item() if tensor.numel() else 0.0
