"""From rows of a rollout to the samples of a training batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.advantages import normalize
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import Level
from rlinf.algorithms.losses import at_level
from rlinf.data.trajectory import Trajectory


def training_batch(
    trajectory: Trajectory,
    *,
    logprob_type: Level,
    advantages: Tensor,
    returns: Tensor | None,
    values: Tensor | None,
    weights: Tensor | None,
    normalized: bool = False,
    groups: Tensor | None = None,
) -> Batch:
    """Flatten time and environments, and drop the rows that a fault spoilt.

    Args:
        trajectory: The rollout.
        logprob_type: Level that log-probs are summed to.
        advantages: [T, B, 1] of chunks, or [T, B, C] of primitive actions.
        returns: [T, B, V] or None.
        values: [T, B, V] or None.
        weights: [T, B] or None.
        normalized: Bring the advantages to mean 0 and standard deviation 1 over what is trained on.
        groups: [T, B] int64; None: each environment is its own.
    """
    log_probs = at_level(trajectory.log_probs.flatten(0, 1), logprob_type)
    kept = _intact_samples(trajectory)

    def flat(column: Tensor) -> Tensor:
        rows = column.flatten(0, 1)
        return rows if kept is None else rows[kept]

    of_rows = flat(advantages)
    row_weights = None if weights is None else flat(weights)
    if normalized:
        of_rows = normalize(of_rows, weights=row_weights)
    if groups is None:
        groups = trajectory.env_ids.expand(trajectory.num_steps, -1)
    log_probs = log_probs if kept is None else log_probs[kept]
    return Batch(
        inputs={name: flat(column) for name, column in trajectory.forward_inputs.items()},
        mask=torch.ones_like(log_probs),
        log_probs=log_probs,
        rewards=flat(trajectory.rewards.sum(dim=-1)),
        versions=flat(trajectory.versions).unsqueeze(1).expand(log_probs.shape),
        groups=flat(groups),
        truncated=flat(trajectory.truncations.any(dim=-1)),
        valid=flat(trajectory.valid),
        weights=row_weights,
        values=None if values is None else flat(values),
        returns=None if returns is None else flat(returns),
        # Those of a primitive action hold for each of its dimensions.
        advantages=of_rows.repeat_interleave(log_probs.shape[1] // of_rows.shape[1], dim=1),
    )


def intact_rows(tensor: Tensor, trajectory: Trajectory) -> Tensor:
    """[T, B, ...] to [N, ...]: the rows that :func:`training_batch` makes samples of."""
    intact = _intact_samples(trajectory)
    flat = tensor.flatten(0, 1)
    return flat if intact is None else flat[intact]


def _intact_samples(trajectory: Trajectory) -> Tensor | None:
    """Numbers of the rows that no fault spoilt; None: all."""
    intact = trajectory.uninterrupted().flatten()
    return None if bool(intact.all()) else intact.nonzero().squeeze(-1)


def advantages_of(batch: Batch) -> Tensor:
    """[N, K] advantages of a prepared batch."""
    if batch.advantages is None:
        raise ValueError("the batch has no advantages: prepare it first")
    return batch.advantages


def advantage_metrics(batch: Batch, trajectory: Trajectory) -> dict[str, float]:
    """Mean, maximum and minimum of the advantages, and the mean reward of a chunk step."""
    advantages = advantages_of(batch)
    counted = advantages if batch.weights is None else advantages[batch.weights > 0]
    rewards = trajectory.rewards.sum(dim=-1)[trajectory.valid]
    metrics = {"rollout/rewards": _finite_mean(rewards)}
    if counted.numel():
        low, high = torch.aminmax(counted)
        metrics["rollout/advantages_mean"] = counted.mean().item()
        metrics["rollout/advantages_max"] = high.item()
        metrics["rollout/advantages_min"] = low.item()
    return metrics


def _finite_mean(tensor: Tensor) -> float:
    return tensor.mean().item() if tensor.numel() else 0.0
