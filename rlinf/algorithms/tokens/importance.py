"""Corrections for data that another policy sampled: proximal log-probs and importance weights."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.kl import LOG_RATIO_BOUND
from rlinf.algorithms.tokens.base_config import (
    ImportanceLevel,
    ImportanceMode,
    TokenAlgorithmConfig,
)


def interpolated_log_probs(
    *, behaviour_log_probs: Tensor, log_probs: Tensor, staleness: Tensor
) -> Tensor:
    """Proximal log-probs without a forward pass, log-linear in the version of the weights.

    log π_prox = log π_rollout + s / (s + 1) · (log π − log π_rollout) for a token whose weights
    were s versions old when the step began, as AReaL approximates them (Fu et al. 2025): counted
    from the weights that sampled, the proximal ones are version s and the present ones, in the
    making, version s + 1. With s = 0 the proximal weights are those that sampled.

    Args:
        behaviour_log_probs: [n, L] of the policy that acted.
        log_probs: [n, L] of the present weights; the result carries no gradient.
        staleness: [n, L], versions between sampling and the beginning of the step, ≥ 0.
    """
    stale = staleness.clamp(min=0).to(log_probs.dtype)
    return behaviour_log_probs + stale / (stale + 1) * (log_probs.detach() - behaviour_log_probs)


def proximal_log_probs(config: TokenAlgorithmConfig, log_probs: Tensor, batch: Batch) -> Tensor:
    """[n, L] log-probs that the probability ratio divides by, without gradient.

    Raises:
        ValueError: The batch lacks what ``config.proximal`` needs.
    """
    if config.proximal == "rollout":
        return batch.log_probs
    if config.proximal == "recomputed":
        if batch.proximal_log_probs is None:
            raise ValueError("proximal: recomputed needs proximal_log_probs in the batch")
        return batch.proximal_log_probs
    staleness = batch.staleness()
    if staleness is None:
        raise ValueError("proximal: interpolated needs the version in the batch")
    return interpolated_log_probs(
        behaviour_log_probs=batch.log_probs,
        log_probs=log_probs,
        staleness=staleness,
    )


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
    product of its tokens' ratios. With ``mask`` a weight out of bounds is 0 instead.

    Args:
        log_ratio: [n, L], log of proximal over behaviour probability.
        mask: [n, L].
        level: What one weight belongs to.
        low: Smallest weight.
        high: Largest weight.
        mode: ``truncate`` or ``mask``.

    Returns:
        Weights [n, L], and [n, L] bool where they were out of bounds.
    """
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(dim=-1, keepdim=True).expand_as(log_ratio)
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    bounded = raw.clamp(low, high)
    outside = raw != bounded
    return (bounded if mode == "truncate" else torch.where(outside, 0.0, raw)), outside
