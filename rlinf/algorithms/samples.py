"""From rollouts to batches: what credit says about one, the rows of one over time, its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.base_config import AlgorithmConfig, KLType, Level
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.credit import episode_length_weights, idle_rows, normalize
from rlinf.algorithms.losses import at_level, kl_estimate
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import ACTION_MASK


@dataclass(frozen=True, kw_only=True)
class CreditEstimate:
    """What a rollout is worth, before advantages are normalised.

    Args:
        advantages: Of answers [N, L]; of chunk steps [T, B, 1], or [T, B, C] of each primitive
            action.
        trained: [N] or [T, B] bool, what can be trained on; None: everything valid.
        returns: Value targets [N, L] or [T, B, V]; None without a critic.
        metrics: About it.
    """

    advantages: Tensor
    trained: Tensor | None = None
    returns: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Credit(ABC):
    """Where the advantages of an algorithm come from.

    Args:
        config: Of the algorithm.
        group_size: Environments of a group.
    """

    _config: Any

    def __init__(self, config: AlgorithmConfig, group_size: int = 1) -> None:
        del group_size
        self._config = config

    def value_dim(self, chunk: int) -> int:
        """See :meth:`Algorithm.value_dim`."""
        del chunk
        return 0

    @abstractmethod
    def of_answers(self, batch: Batch) -> CreditEstimate:
        """Credit of the terms of answers; a ValueError where the batch lacks what is needed."""

    @abstractmethod
    def of_chunk_steps(self, trajectory: Trajectory) -> CreditEstimate:
        """Credit of the rows of a rollout over time."""

    def state_dict(self) -> dict[str, Any]:
        """Running statistics."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


def rows_of(
    trajectory: Trajectory,
    *,
    logprob_type: Level,
    advantages: Tensor,
    returns: Tensor | None = None,
    weights: Tensor | None = None,
    normalized: bool = False,
    proximal_log_probs: Tensor | None = None,
) -> Batch:
    """Flatten time and environments, and drop the rows that a fault spoilt.

    Args:
        trajectory: The rollout.
        logprob_type: Level that log-probs are summed to.
        advantages: [T, B, 1] of chunks, or [T, B, C] of primitive actions.
        returns: [T, B, V] or None.
        weights: [T, B] or None.
        normalized: Bring the advantages to mean 0 and standard deviation 1 over what is trained on.
        proximal_log_probs: [T, B, C, A] or None.
    """
    intact = trajectory.uninterrupted().flatten()
    kept = None if bool(intact.all()) else intact.nonzero().squeeze(-1)

    def flat(column: Tensor) -> Tensor:
        rows = column.flatten(0, 1)
        return rows if kept is None else rows[kept]

    log_probs = at_level(flat(trajectory.log_probs), logprob_type)
    shares = None if weights is None else flat(weights)
    of_rows = flat(advantages)
    if normalized:
        of_rows = normalize(of_rows, weights=shares)
    proximal = proximal_log_probs
    mask, own = torch.ones_like(log_probs), trajectory.forward_inputs.get(ACTION_MASK)
    if own is not None and logprob_type == "token_level":
        mask = flat(own).to(mask).repeat(1, trajectory.chunk)  # a term is an action dimension
    return Batch(
        inputs={name: flat(column) for name, column in trajectory.forward_inputs.items()},
        mask=mask,
        log_probs=log_probs,
        rewards=flat(trajectory.rewards.sum(dim=-1)),
        versions=flat(trajectory.versions).unsqueeze(1).expand(log_probs.shape),
        groups=flat(trajectory.env_ids.expand(trajectory.num_steps, -1)),
        truncated=flat(trajectory.truncations.any(dim=-1)),
        valid=flat(trajectory.valid),
        weights=shares,
        values=flat(trajectory.values) if returns is not None else None,
        returns=None if returns is None else flat(returns),
        # Those of a primitive action hold for each of its dimensions.
        advantages=of_rows.repeat_interleave(log_probs.shape[1] // of_rows.shape[1], dim=1),
        proximal_log_probs=None if proximal is None else at_level(flat(proximal), logprob_type),
    )


def row_weights(
    trajectory: Trajectory, trained: Tensor | None, *, by_length: bool
) -> Tensor | None:
    """[T, B] share of each row in the loss; None where all are 1. With ``by_length`` every
    environment's rollout has the same one however early it ended; ``trained`` [T, B] bool says what
    can be trained on, None: every row of a running episode."""
    idle = idle_rows(trajectory)
    active = ~idle & trajectory.uninterrupted()
    rows = active if trained is None else trained & active
    if bool(rows.all()) or (trained is None and not bool(idle.any())):
        return None
    if by_length and bool(idle.any()):
        return episode_length_weights(rows)
    return rows.float()


def answer_metrics(batch: Batch, prepared: Batch) -> dict[str, float]:
    """Rewards, lengths, age and advantages of answers, ``batch`` before and ``prepared`` after
    preparation."""
    trained = prepared.mask > 0
    metrics = {
        "rollout/rewards": mean(batch.rewards[batch.valid]),
        # What was sampled estimates it without bias, where nothing filters what is drawn.
        "rollout/entropy": -mean(batch.log_probs[batch.mask > 0]),
        "rollout/response_length": mean(batch.mask.sum(dim=1)),
        "rollout/truncated": mean(batch.truncated),
        "rollout/valid": mean(batch.valid),
        "rollout/trained_sequences": float(trained.any(dim=1).sum()),
        "rollout/trained_tokens": float(trained.sum()),
    }
    staleness = batch.staleness()
    if staleness is not None:
        metrics.update(staleness_metrics(staleness[batch.mask > 0]))
    return metrics | _advantage_metrics(prepared)


def chunk_step_metrics(trajectory: Trajectory, batch: Batch) -> dict[str, float]:
    """Mean reward of a chunk step of running episodes, and advantages of the samples that were made
    of a rollout."""
    rewards = trajectory.rewards.sum(dim=-1)[trajectory.valid & ~idle_rows(trajectory)]
    return {"rollout/rewards": mean(rewards), **_advantage_metrics(batch)}


def _advantage_metrics(batch: Batch) -> dict[str, float]:
    counted = advantages_of(batch)[_trained(batch, batch.mask)]
    if not counted.numel():
        return {}
    return {
        "rollout/advantages_mean": mean(counted),
        "rollout/advantages_max": counted.max().item(),
        "rollout/advantages_min": counted.min().item(),
    }


def equal_groups(batch: Batch) -> float:
    """Fraction of the groups in which all valid rewards are equal: they teach nothing."""
    numbers, group = torch.unique(batch.groups[batch.valid], return_inverse=True)
    rewards = batch.rewards[batch.valid]
    low = rewards.new_full((len(numbers),), torch.inf).scatter_reduce(0, group, rewards, "amin")
    high = rewards.new_full((len(numbers),), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    return mean(low == high)


def reference_kl(batch: Batch, kl_type: KLType) -> Tensor:
    """[N, L] float64, estimate of the KL divergence of answers from the reference policy at each
    sampled token, 0 elsewhere; a ValueError where the batch lacks its log-probs."""
    if batch.reference_log_probs is None:
        raise ValueError("kl_reward_beta > 0 needs reference_log_probs in the batch")
    proximal = batch.proximal_log_probs
    kl = kl_estimate(
        log_probs=(batch.log_probs if proximal is None else proximal).double(),
        reference_log_probs=batch.reference_log_probs.double(),
        kl_type=kl_type,
    )
    return torch.where(batch.mask > 0, kl, 0.0)


def reference_metrics(batch: Batch, kl_type: KLType) -> dict[str, float]:
    """Mean of :func:`reference_kl` over the tokens of valid answers."""
    counted = (batch.mask > 0) & batch.valid.unsqueeze(1)
    return {"rollout/reference_kl": mean(reference_kl(batch, kl_type)[counted])}


def critic_metrics(batch: Batch) -> dict[str, float]:
    """1 − Var(returns − values) / Var(returns) of the critic before its update, 0 for constant
    returns; nothing without one."""
    if batch.values is None or batch.returns is None:
        return {}
    counted = _trained(batch, batch.values)
    targets, values = batch.returns[counted].double(), batch.values[counted].double()
    total = targets.var(correction=0) if targets.numel() else targets.new_zeros(())
    left = (targets - values).var(correction=0) / total if total > 0 else None
    return {"critic/explained_variance": 0.0 if left is None else 1.0 - left.item()}


def staleness_metrics(staleness: Tensor) -> dict[str, float]:
    """Mean, largest value, and share of each, of the training phases [N] between the weights that
    made samples or tokens and those that the phase began with."""
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
    """[N, K] advantages of a prepared batch; a ValueError where it has none."""
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
