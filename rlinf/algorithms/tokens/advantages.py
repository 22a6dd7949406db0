"""Advantages of token sequences: pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def at_last_token(*, rewards: Tensor, mask: Tensor) -> Tensor:
    """Put the reward of each sequence on its own last valid token.

    Args:
        rewards: [N].
        mask: [N, L], 1 for valid tokens; they need not be consecutive.

    Returns:
        [N, L], 0 elsewhere; all 0 for a sequence without valid tokens.
    """
    counted = mask > 0
    if not mask.shape[1]:
        return torch.zeros_like(mask, dtype=rewards.dtype)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(counted, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(counted & (positions == last), rewards.unsqueeze(1), 0.0)


def token_advantages(
    *, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over tokens (Schulman et al. 2016, eq. 16).

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, where t + 1 is the next *valid* token
    of the sequence, and V = A = 0 after the last one. With V = 0 and λ = 1 this is the discounted
    sum of the rewards to come.

    Args:
        rewards: [N, L]; those of tokens that are not valid do not count.
        values: [N, L].
        mask: [N, L].
        gamma: Discount per token.
        gae_lambda: λ.

    Returns:
        Advantages and returns A_t + V_t, each [N, L], 0 where not valid.
    """
    counted = mask > 0
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(counted[:, t], advantage, 0.0)
        next_advantage = torch.where(counted[:, t], advantage, next_advantage)
        next_value = torch.where(counted[:, t], values[:, t], next_value)
    return advantages, advantages + torch.where(counted, values, 0.0)


def leave_one_out_advantages(*, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """R_i − mean of the other R_j of its group (Kool et al. 2019; Ahmadian et al. 2024).

    Args:
        scores: [M].
        groups: [M] int64.

    Returns:
        [M] advantages (0 for the only member of a group), [M] size of each one's group.
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(sizes))
    total, size = zeros.index_add(0, group, scores)[group], sizes[group]
    baseline = (total - scores) / (size - 1).clamp(min=1)
    return torch.where(size > 1, scores - baseline, 0.0), size


def whiten(*, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A − mean) / std over valid tokens (Hu et al. 2025, "REINFORCE++"), in float64.

    The variance is that of the tokens themselves (ddof 0) and at least 1e-8.

    Args:
        advantages: [N, L].
        mask: [N, L].

    Returns:
        [N, L] in the dtype of ``advantages``, 0 where not valid.
    """
    counted = mask > 0
    picked = advantages[counted].double()
    if not picked.numel():
        return torch.zeros_like(advantages)
    variance, mean = torch.var_mean(picked, correction=0)
    result = torch.zeros_like(advantages)
    result[counted] = ((picked - mean) * variance.clamp(min=1e-8).rsqrt()).to(advantages.dtype)
    return result


def overlong_penalty(*, lengths: Tensor, safe_length: int, max_length: int) -> Tensor:
    """Soft overlong punishment (Yu et al. 2025, "DAPO", eq. 13), in [−1, 0].

    0 up to ``safe_length``, then linear down to −1 at ``max_length`` and beyond; in the paper's
    letters ``max_length`` is L_max and ``safe_length`` L_max − L_cache.

    Args:
        lengths: [N] tokens of each response.
        safe_length: Longest response without penalty.
        max_length: Shortest one with the full penalty.
    """
    return ((safe_length - lengths) / (max_length - safe_length)).clamp(-1.0, 0.0)
