"""The clipped policy objective with entropy and KL terms that PPO and GRPO share."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import ClippedObjectiveConfig, PolicyLossConfig
from rlinf.algorithms.kl import LOG_RATIO_BOUND, kl_estimate
from rlinf.algorithms.losses import aggregate, at_level, clipped_policy_loss
from rlinf.algorithms.protocol import Evaluation
from rlinf.algorithms.samples import advantages_of


def policy_terms(
    config: ClippedObjectiveConfig,
    evaluation: Evaluation,
    batch: Batch,
    *,
    normalizer: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss − entropy bonus + KL penalty of a micro batch, and their metrics.

    Args:
        config: Which terms and how.
        evaluation: The micro batch under the present weights.
        batch: The micro batch.
        normalizer: :func:`total_weight` of the global batch.
        importance: Weight of each policy loss term, shaped as the log-probs; None for 1.
    """

    def mean(terms: Tensor) -> Tensor:
        tokens = terms.shape[1] if config.loss_agg_func == "token-mean" else 1
        return aggregate(
            loss=terms,
            mode=config.loss_agg_func,
            normalizer=normalizer * tokens,
            weights=batch.weights,
        )

    log_probs = at_level(evaluation.log_probs, config.logprob_type)
    log_ratio = bounded_log_ratio(config, log_probs - batch.log_probs)
    terms, ratio, clipped_ratio = clipped_policy_loss(
        log_ratio=log_ratio,
        advantages=advantages_of(batch),
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    policy_loss = mean(terms if importance is None else importance * terms)
    entropy = mean(at_level(evaluation.entropy, config.entropy_type))
    loss = policy_loss
    if config.entropy_bonus:
        loss = loss - config.entropy_bonus * entropy
    metrics = ratio_metrics(log_ratio, ratio, clipped_ratio, batch.weights, normalizer)
    metrics["actor/policy_loss"] = policy_loss.detach()
    metrics["actor/entropy_loss"] = entropy.detach()
    if config.kl_beta:
        kl_loss = mean(_reference_kl(config, log_probs, batch))
        loss = loss + config.kl_beta * kl_loss
        metrics["actor/kl_loss"] = kl_loss.detach()
    return loss, metrics


def bounded_log_ratio(config: PolicyLossConfig, log_ratio: Tensor) -> Tensor:
    """``log_ratio`` within the bounds of the config, any shape.

    There always is a bound: e^88.8 is infinite in float32, and the gradient of a clipped term,
    0 · ∞, would be no number.
    """
    low, high = config.clip_log_ratio_min, config.clip_log_ratio_max
    return log_ratio.clamp(
        -LOG_RATIO_BOUND if low is None else low, LOG_RATIO_BOUND if high is None else high
    )


def _reference_kl(config: ClippedObjectiveConfig, log_probs: Tensor, batch: Batch) -> Tensor:
    if batch.reference_log_probs is None:
        raise ValueError("kl_beta > 0 needs reference_log_probs in the batch")
    return kl_estimate(
        log_probs=log_probs,
        reference_log_probs=batch.reference_log_probs,
        kl_type=config.kl_penalty_type,
    )


RATIO_STATISTICS = ("ratio", "clipped_ratio", "clip_fraction", "approx_kl")


@torch.no_grad()
def ratio_statistics(log_ratio: Tensor, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
    """[4, ...] elementwise, in the order of ``RATIO_STATISTICS``.

    Their means are those of ratio and clipped ratio, the fraction that was clipped, and
    KL(old ‖ new) by ρ − 1 − log ρ.
    """
    clipped = (ratio != clipped_ratio).to(ratio.dtype)
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.stack([ratio, clipped_ratio, clipped, torch.expm1(log_ratio) - log_ratio])


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor,
    ratio: Tensor,
    clipped_ratio: Tensor,
    weights: Tensor | None,
    normalizer: float,
) -> dict[str, Tensor]:
    """Means of :func:`ratio_statistics`, each the share of a micro batch in its global batch."""
    per_sample = ratio_statistics(log_ratio, ratio, clipped_ratio).mean(dim=-1)
    if weights is not None:
        per_sample = per_sample * weights
    means = per_sample.sum(dim=-1) / normalizer
    return {f"actor/{name}": value for name, value in zip(RATIO_STATISTICS, means, strict=True)}


def total_weight(batch: Batch) -> float:
    """Sum of the sample weights of a global batch; 1 where nothing is trained on."""
    if batch.weights is None:
        return float(len(batch))
    return batch.weights.sum().item() or 1.0
