"""Soft actor-critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications").

A row is a transition of one action chunk of C primitive actions: what was seen, what was done,
Σ γ^k r_k over the chunk, and what was seen then. A time limit is no end: only a termination stops
the bootstrap, and a transition at the limit leads to the last observation of its own episode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlinf.algorithms.config import AlgorithmConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlinf.data.trajectory import Trajectory

NEXT = "next."
"""Prefix in ``Batch.inputs`` of the observations that followed."""
NOISE, NEXT_NOISE = "noise", "next_noise"
REWARDS, DISCOUNTS, VERSIONS, EPISODES = "rewards", "discounts", "versions", "episodes"


class SACConfig(AlgorithmConfig):
    """Soft actor-critic."""

    implementation = "rlinf.algorithms.sac:SAC"
    type: Literal["sac"] = "sac"
    """Which algorithm this section configures."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount of one primitive action; a chunk of C is discounted by its C-th power."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Share of the Q functions that their targets take over at each update."""
    update_to_data: float = Field(default=1.0, gt=0)
    """Optimizer steps per transition that was collected."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """α that the run begins with: how much reward a nat of entropy is worth."""
    learn_temperature: bool = True
    """Adapt α so that the policy keeps `target_entropy`; otherwise it stays as it is."""
    target_entropy: float | None = None
    """Entropy of an action chunk in nats, over actions scaled to [−1, 1]; null: −A·C, minus one per
    action dimension of the chunk."""


def soft_targets(
    *,
    rewards: Tensor,
    discounts: Tensor,
    next_values: Tensor,
    next_log_probs: Tensor,
    alpha: Tensor,
) -> Tensor:
    """y = r + d (min_j Q̄_j(s', a') − α log π(a'|s')) [N] (eq. 3, 5).

    Args:
        rewards: [N] r.
        discounts: [N] d = γ^C, 0 where the episode terminated.
        next_values: [H, N] of the target Q functions.
        next_log_probs: [N].
        alpha: Scalar.
    """
    return rewards + discounts * (next_values.amin(dim=0) - alpha * next_log_probs)


def critic_terms(*, values: Tensor, targets: Tensor) -> Tensor:
    """[N] squared errors of Q functions [H, N] against targets [N], their mean over H."""
    return (values - targets).square().mean(dim=0)


def policy_terms(*, values: Tensor, log_probs: Tensor, alpha: Tensor) -> Tensor:
    """[N] α log π(a|s) − min_j Q_j(s, a) (eq. 7).

    Args:
        values: [H, N].
        log_probs: [N].
        alpha: Scalar, without gradient.
    """
    return alpha * log_probs - values.amin(dim=0)


def temperature_terms(*, alpha: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """[N] −α (log π(a|s) + H̄) (eq. 18).

    Args:
        alpha: Scalar, with gradient.
        log_probs: [N], without.
        target_entropy: H̄ in nats.
    """
    return -alpha * (log_probs + target_entropy)


def chunk_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Σ_k γ^k r_k over the last dimension of [..., C]."""
    powers = rewards.new_tensor([gamma**k for k in range(rewards.shape[-1])])
    return (rewards * powers).sum(dim=-1)


def polyak_update(targets: torch.nn.Module, sources: torch.nn.Module, tau: float) -> None:
    """Target parameters ← (1 − τ) target + τ source; buffers are copied."""
    for target, source in zip(targets.parameters(), sources.parameters(), strict=True):
        target.data.lerp_(source.data, tau)
    for target, source in zip(targets.buffers(), sources.buffers(), strict=True):
        target.copy_(source)


def transitions(trajectory: Trajectory, *, gamma: float) -> dict[str, Tensor]:
    """Rows of a replay store, in the order of time and, within it, of environments.

    Left out are rows that a fault spoilt, and those of environments that had ended and rested.

    Args:
        trajectory: With what followed each row.
        gamma: Discount of one primitive action.

    Returns:
        Each [N, ...]: the observations; those that followed, under ``next.`` and their names; raw
        actions [N, C, A]; rewards and discounts [N]; versions and episode numbers [N].
    """
    from rlinf.algorithms.advantages import idle_rows

    kept = (trajectory.valid & ~idle_rows(trajectory)).flatten()
    terminated = trajectory.terminations.any(dim=-1)
    columns = {
        **trajectory.forward_inputs,
        **{NEXT + name: column for name, column in trajectory.next_observations.items()},
        REWARDS: chunk_returns(trajectory.rewards, gamma),
        DISCOUNTS: gamma**trajectory.chunk * (~terminated).to(trajectory.rewards.dtype),
        VERSIONS: trajectory.versions,
        EPISODES: trajectory.episode_ids,
    }
    return {name: column.flatten(0, 1)[kept] for name, column in columns.items()}
