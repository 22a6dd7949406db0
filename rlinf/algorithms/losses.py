"""Loss terms and KL estimates of the policy-gradient algorithms: pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.base_config import (
    AggregationMode,
    ImportanceLevel,
    ImportanceMode,
    KLType,
    Level,
)

LOG_RATIO_BOUND = 20.0
"""Largest logarithm of a ratio of probabilities that is exponentiated, in nats."""
_K3_BOUND = 10.0


def kl_estimate(*, log_probs: Tensor, reference_log_probs: Tensor, kl_type: KLType) -> Tensor:
    """Elementwise estimate of KL(policy ‖ reference), in nats, of samples of the policy (Schulman,
    "Approximating KL divergence", 2020); any shape.

    With d = log p_ref − log p and r = exp d: ``k1`` −d (unbiased, any sign), ``abs`` |d|, ``k2``
    d²/2 (biased, low variance), ``k3`` or ``low_var_kl`` r − 1 − d (unbiased, never negative), its
    log-ratio clamped to ±20 and the result to ±10.

    As a loss, over samples of the policy: the mean gradient of ``k1`` is 0, that of ``k2`` is
    ∇ KL(policy ‖ reference), that of ``k3`` is ∇ KL(reference ‖ policy).
    """
    difference = log_probs - reference_log_probs
    match kl_type:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case "k3" | "low_var_kl":
            return divergence(-difference).clamp(-_K3_BOUND, _K3_BOUND)
    raise ValueError(f"unknown KL estimator {kl_type!r}; known: k1, abs, k2, k3, low_var_kl")


def divergence(log_ratio: Tensor) -> Tensor:
    """ρ − 1 − log ρ elementwise, KL(old ‖ new) of what the old policy drew (Schulman's k3)."""
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio


def at_level(per_token: Tensor, level: Level) -> Tensor:
    """Sum log-probs or entropies [N, C, A] to a level: [N, C·A], [N, C] or [N, 1]."""
    if level == "token_level":
        return per_token.flatten(1)
    if level == "action_level":
        return per_token.sum(dim=-1)
    return per_token.flatten(1).sum(dim=-1, keepdim=True)


def clipped_policy_loss(
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds and a dual clip.

    L = max(−Aρ, −A clip(ρ, 1 − low, 1 + high)); with ``clip_ratio_c`` = c > 1, L = min(L, c|A|),
    which binds for negative advantages only (Ye et al. 2020, eq. 5). ``log_ratio`` is log ρ, of any
    shape that the advantages broadcast to.

    Returns:
        Elementwise loss, ratio ρ, clipped ratio.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if clip_ratio_c is not None:
        loss = torch.minimum(loss, clip_ratio_c * advantages.abs())
    return loss, ratio, clipped_ratio


def clipped_value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None, delta: float
) -> tuple[Tensor, Tensor | None]:
    """max of the Huber losses of V and of V clipped to the old value ± ``value_clip``.

    Values under the present weights, of the critic that acted, and targets are [N, V]; the Huber
    loss becomes linear at ``delta``.

    Returns:
        Elementwise loss, and where the clipped one was taken (None without a bound).
    """
    loss = torch.nn.functional.huber_loss(values, returns, reduction="none", delta=delta)
    if value_clip is None:
        return loss, None
    change = values - old_values
    bounded = old_values + change.clamp(-value_clip, value_clip)
    # Within the bound the value itself: old + (value − old) may round to another number.
    clipped = torch.where(change.abs() > value_clip, bounded, values)
    clipped_loss = torch.nn.functional.huber_loss(clipped, returns, reduction="none", delta=delta)
    return torch.maximum(loss, clipped_loss), clipped_loss > loss


def aggregation_normalizer(
    *, mode: AggregationMode, mask: Tensor, weights: Tensor | None = None
) -> Tensor:
    """What :func:`aggregate` divides by, from mask [N, L] and weights [N] of a global batch."""
    if mode == "token-mean":
        per_sequence = mask.sum(dim=-1)
    else:
        per_sequence = mask.any(dim=-1).to(mask.dtype if mask.is_floating_point() else torch.float)
    return (per_sequence if weights is None else per_sequence * weights).sum()


def aggregate(
    *,
    loss: Tensor,
    mode: AggregationMode,
    normalizer: Tensor | float,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Share of a micro batch in the mean loss of its global batch.

    ``token-mean`` Σ L m / Σ m; ``seq-mean-token-sum`` mean over sequences of Σ_t L m;
    ``seq-mean-token-mean`` mean over sequences of Σ_t L m / Σ_t m. Because the normaliser,
    :func:`aggregation_normalizer`, is that of the global batch, the sum over micro batches does not
    depend on how it was split. The loss is [..., n, L], the mask [n, L], the weights of sequences
    [n]; None: 1.

    Returns:
        [...], a scalar for a loss [n, L].
    """
    if mask is not None:
        loss = loss * mask
    if mode == "seq-mean-token-mean":
        tokens = loss.shape[-1] if mask is None else mask.sum(dim=-1, keepdim=True).clamp(min=1)
        loss = loss / tokens
    if weights is not None:
        loss = loss * weights.unsqueeze(-1)
    return loss.sum(dim=(-2, -1)) / normalizer


def interpolated_log_probs(
    *, behaviour_log_probs: Tensor, log_probs: Tensor, staleness: Tensor
) -> Tensor:
    """Proximal log-probs without a forward pass, log-linear in the version of the weights; [n, L].

    log π_prox = log π_rollout + s / (s + 1) · (log π − log π_rollout) for a token whose weights
    were s versions old when the step began, as AReaL approximates them (Fu et al. 2025): counted
    from the weights that sampled, the proximal ones are version s and the present ones, in the
    making, version s + 1. The result carries no gradient.
    """
    stale = staleness.clamp(min=0).to(log_probs.dtype)
    return behaviour_log_probs + stale / (stale + 1) * (log_probs.detach() - behaviour_log_probs)


def importance_weights(
    *,
    log_ratio: Tensor,
    mask: Tensor,
    level: ImportanceLevel,
    low: float,
    high: float,
    mode: ImportanceMode,
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights (Ionides 2008; Yao et al. 2025 for rollout engines).

    w_t = clip(exp(log_ratio_t), low, high) for each token, or one weight per sequence from the
    product of its tokens' ratios; ``log_ratio`` [n, L] is that of proximal over behaviour
    probability. With ``mode`` mask a weight out of bounds is 0 instead.

    Returns:
        Weights [n, L], and [n, L] bool where they were out of bounds.
    """
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(dim=-1, keepdim=True).expand_as(log_ratio)
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    bounded = raw.clamp(low, high)
    outside = raw != bounded
    return (bounded if mode == "truncate" else torch.where(outside, 0.0, raw)), outside


def per_term(of_row: Tensor, terms: int, *, total: bool = False) -> Tensor:
    """[N, k] numbers of a row as [N, K] with the same mean over the row, or the same sum."""
    if of_row.shape[1] == terms:
        return of_row
    per_row = of_row.sum(dim=1) / terms if total else of_row.mean(dim=1)
    return per_row.unsqueeze(1).expand(-1, terms)
