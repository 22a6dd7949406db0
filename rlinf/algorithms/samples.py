"""From rows of a rollout to the samples of a training batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.config import Level
from rlinf.algorithms.losses import at_level
from rlinf.algorithms.protocol import TrainingBatch
from rlinf.data.trajectory import Trajectory


def training_batch(
    trajectory: Trajectory,
    *,
    logprob_type: Level,
    advantages: Tensor,
    returns: Tensor | None,
    values: Tensor | None,
    weights: Tensor | None,
) -> TrainingBatch:
    """Flatten time and environments, and drop the rows that a fault spoilt.

    Args:
        trajectory: The rollout.
        logprob_type: Level that log-probs are summed to.
        advantages: [T, B, K]; K is 1 or C.
        returns: [T, B, V] or None.
        values: [T, B, V] or None.
        weights: [T, B] or None.
    """
    flat_advantages = advantages.flatten(0, 1)
    if logprob_type == "token_level":
        flat_advantages = flat_advantages.unsqueeze(-1)
    batch = TrainingBatch(
        forward_inputs={k: t.flatten(0, 1) for k, t in trajectory.forward_inputs.items()},
        log_probs=at_level(trajectory.log_probs.flatten(0, 1), logprob_type),
        advantages=flat_advantages,
        returns=None if returns is None else returns.flatten(0, 1),
        values=None if values is None else values.flatten(0, 1),
        weights=None if weights is None else weights.flatten(),
        versions=trajectory.versions.flatten(),
    )
    intact = _intact_samples(trajectory)
    return batch if intact is None else batch.select(intact)


def intact_rows(tensor: Tensor, trajectory: Trajectory) -> Tensor:
    """[T, B, ...] to [N, ...]: the rows that :func:`training_batch` makes samples of."""
    intact = _intact_samples(trajectory)
    flat = tensor.flatten(0, 1)
    return flat if intact is None else flat[intact]


def _intact_samples(trajectory: Trajectory) -> Tensor | None:
    """Numbers of the rows that no fault spoilt; None: all."""
    intact = trajectory.uninterrupted().flatten()
    return None if bool(intact.all()) else intact.nonzero().squeeze(-1)


def advantage_metrics(batch: TrainingBatch, trajectory: Trajectory) -> dict[str, float]:
    """Mean, maximum and minimum of the advantages, and the mean reward of a chunk step."""
    counted = batch.advantages if batch.weights is None else batch.advantages[batch.weights > 0]
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
