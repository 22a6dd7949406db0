"""Credit: advantages and returns of rollouts and of sequences, as pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.algorithms.base_config import BootstrapType, RewardType
from rlinf.data.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class DecisionSteps:
    """A rollout on the time axis of rewards: chunk steps, or primitive steps.

    Args:
        rewards: [S, B]; S is T for chunk-level rewards, T·C for action-level ones.
        dones: [S, B] bool, the episode ended after this step.
        bootstrap: [S, B] bool, an ended episode whose last observation has a value.
        values: [S, B], 0 without a critic.
        final_values: [S, B].
        bootstrap_values: [B].
    """

    rewards: Tensor
    dones: Tensor
    bootstrap: Tensor
    values: Tensor
    final_values: Tensor
    bootstrap_values: Tensor


def decision_steps(
    trajectory: Trajectory, *, reward_type: RewardType, bootstrap_type: BootstrapType
) -> DecisionSteps:
    """Lay a rollout out on the time axis of its rewards.

    A row that a fault spoilt has reward 0 and ends its episode without bootstrap.

    Args:
        trajectory: A rollout.
        reward_type: One reward and value per chunk (``chunk_level``, the sum) or primitive step.
        bootstrap_type: Ended episodes that continue in value: ``standard`` those that were only
            truncated, ``always`` all, ``none`` none.
    """
    steps = trajectory.chunk if reward_type == "action_level" else 1
    if trajectory.values.shape[-1] not in (0, steps):
        raise ValueError(
            f"{reward_type} rewards with chunks of {trajectory.chunk} need {steps} values per "
            f"row, the critic gave {trajectory.values.shape[-1]}"
        )
    valid = trajectory.valid.unsqueeze(-1)
    rewards = torch.where(valid, trajectory.rewards, 0.0)
    terminated = trajectory.terminations.any(dim=-1)
    truncated = trajectory.truncations.any(dim=-1)
    faulty = trajectory.played & ~trajectory.valid
    bootstrap = {
        "standard": truncated & ~terminated,
        "always": truncated | terminated,
        "none": torch.zeros_like(truncated),
    }[bootstrap_type]
    if reward_type == "chunk_level":
        rewards = rewards.sum(dim=-1, keepdim=True)

    def last_column(flags: Tensor) -> Tensor:
        columns = flags.new_zeros(*flags.shape, steps)
        columns[..., -1] = flags
        return columns

    def per_step(values: Tensor) -> Tensor:
        return values if values.shape[-1] else values.new_zeros(*values.shape[:-1], steps)

    final = per_step(trajectory.final_values)[..., 0]
    return DecisionSteps(
        rewards=_time_major(rewards),
        dones=_time_major(last_column(terminated | truncated | faulty)),
        bootstrap=_time_major(last_column(bootstrap & trajectory.valid)),
        values=_time_major(torch.where(valid, per_step(trajectory.values), 0.0)),
        final_values=_time_major(last_column(torch.where(trajectory.valid, final, 0.0))),
        bootstrap_values=per_step(trajectory.bootstrap_values)[..., 0],
    )


def _time_major(per_row: Tensor) -> Tensor:
    """[T, B, K] to [T·K, B]."""
    return per_row.transpose(1, 2).reshape(-1, per_row.shape[1])


def per_row(per_step: Tensor, rows: int) -> Tensor:
    """[T·K, B] back to [T, B, K]."""
    return per_step.reshape(rows, -1, per_step.shape[1]).transpose(1, 2)


def reverse_scan(terms: Tensor, decay: Tensor) -> Tensor:
    """x_t = terms_t + decay_t · x_{t+1}, from the last step with x = 0 behind it; [S, B] each."""
    result = torch.empty_like(terms)
    running = terms.new_zeros(terms.shape[1:])
    for step in reversed(range(len(terms))):
        running = torch.addcmul(terms[step], decay[step], running)
        result[step] = running
    return result


def generalized_advantages(
    *, steps: DecisionSteps, rewards: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) with truncation bootstrap.

    δ_t = r_t + γ[(1 − d_t) V_{t+1} + b_t V(final_t)] − V_t and A_t = δ_t + γλ(1 − d_t) A_{t+1},
    where b_t marks ended episodes that continue in value (Pardo et al. 2018). Rewards [S, B] are
    those of ``steps`` or normalised ones.

    Returns:
        Advantages and returns A_t + V_t, each [S, B].
    """
    continues = (~steps.dones).to(rewards.dtype)
    next_values = torch.cat([steps.values[1:], steps.bootstrap_values.unsqueeze(0)])
    future = torch.where(steps.bootstrap, steps.final_values, continues * next_values)
    deltas = rewards + gamma * future - steps.values
    advantages = reverse_scan(deltas, continues * (gamma * gae_lambda))
    return advantages, advantages + steps.values


def at_last_token(*, rewards: Tensor, mask: Tensor) -> Tensor:
    """Put the reward [N] of each sequence on its own last valid token, where ``mask`` [N, L] is 1.

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
    """Generalised advantage estimation over tokens (Schulman et al. 2016, eq. 16), all [N, L].

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, where t + 1 is the next *valid* token
    of the sequence, and V = A = 0 after the last one. With V = 0 and λ = 1 this is the discounted
    sum of the rewards to come.

    Returns:
        Advantages and returns A_t + V_t, 0 where not valid.
    """
    counted = (mask > 0).T
    here, passed = counted.to(rewards.dtype), (~counted).to(rewards.dtype)
    own = torch.where(counted, values.T, 0.0)
    following = reverse_scan(own, passed)  # the value of the first valid token from t on
    following = torch.cat([following[1:], torch.zeros_like(following[:1])])
    deltas = torch.where(counted, rewards.T + gamma * following - own, 0.0)
    advantages = reverse_scan(deltas, gamma * gae_lambda * here + passed)
    advantages = torch.where(counted, advantages, 0.0)
    return advantages.T, (advantages + own).T


def normalize(
    advantages: Tensor, *, weights: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """(A − mean) / (std + ε) of [N, K] over what is trained on; sample standard deviation. Rows of
    weight [N] 0 do not count, others count once."""
    counted = advantages if weights is None else advantages[weights > 0]
    if counted.numel() < 2:
        return advantages
    std, mean = torch.std_mean(counted)
    return (advantages - mean) / (std + epsilon)


def whiten(*, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A − mean) / std of [N, L] over valid tokens (Hu et al. 2025, "REINFORCE++"), in float64; 0
    where not valid. The variance is that of the tokens themselves (ddof 0) and at least 1e-8."""
    counted = mask > 0
    picked = advantages[counted].double()
    if not picked.numel():
        return torch.zeros_like(advantages)
    variance, mean = torch.var_mean(picked, correction=0)
    result = torch.zeros_like(advantages)
    result[counted] = ((picked - mean) * variance.clamp(min=1e-8).rsqrt()).to(advantages.dtype)
    return result


def group_advantages(
    *, scores: Tensor, groups: Tensor, epsilon: float = 1e-6, divide_by_std: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """GRPO advantage (Shao et al. 2024, §4.1.2): (R − mean of group) / (std of group + ε), ddof 1.

    Without the division it is that of Dr. GRPO (Liu et al. 2025, §3.1). Scores [M] are of
    episodes, ``groups`` [M] int64 the numbers of their groups.

    Returns:
        [M] advantages (0 for the only member of a group), [M] mean score of the episode's group,
        [M] size of the episode's group.
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(sizes))
    mean = (zeros.index_add(0, group, scores) / sizes)[group]
    centred = scores - mean
    if not divide_by_std:
        return centred, mean, sizes[group]
    squares = zeros.index_add(0, group, centred.square())
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()[group]
    return centred / (std + epsilon), mean, sizes[group]


def leave_one_out_advantages(*, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """R_i − mean of the other R_j of its group (Kool et al. 2019; Ahmadian et al. 2024).

    Returns:
        [M] advantages (0 for the only member of a group), [M] size of each one's group.
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(sizes))
    total, size = zeros.index_add(0, group, scores)[group], sizes[group]
    baseline = (total - scores) / (size - 1).clamp(min=1)
    return torch.where(size > 1, scores - baseline, 0.0), size


def overlong_penalty(*, lengths: Tensor, safe_length: int, max_length: int) -> Tensor:
    """Soft overlong punishment (Yu et al. 2025, "DAPO", eq. 13) of responses of lengths [N].

    0 up to ``safe_length``, then linear down to −1 at ``max_length`` and beyond; in the paper's
    letters ``max_length`` is L_max and ``safe_length`` L_max − L_cache.
    """
    return ((safe_length - lengths) / (max_length - safe_length)).clamp(-1.0, 0.0)


def idle_rows(trajectory: Trajectory) -> Tensor:
    """[T, B] bool: rows after the end of an episode that was not reset, in which its environment
    waits for the end of the rollout; the row in which the episode ended is not idle."""
    dones = trajectory.dones
    same = torch.zeros_like(dones)
    same[1:] = trajectory.episode_ids[1:] == trajectory.episode_ids[:-1]
    if not bool((same[1:] & dones[:-1]).any()):
        return torch.zeros_like(dones)
    idle = torch.zeros_like(dones)
    for step in range(1, len(dones)):
        idle[step] = same[step] & (idle[step - 1] | dones[step - 1])
    return idle


def episode_length_weights(active: Tensor) -> Tensor:
    """[T, B] weights that give every environment's rollout the same share: T / rows that are
    ``active`` [T, B], 0 for others."""
    counts = active.sum(dim=0).clamp(min=1)
    return active * (len(active) / counts)
