"""Estimators of the Kullback-Leibler divergence from samples (Schulman, "Approximating KL
divergence", 2020).

With x drawn from the policy, d = log p_ref(x) − log p(x) and r = exp d, each is an estimate of
KL(p ‖ p_ref) = E[−d]: ``k1`` −d (unbiased, any sign), ``k2`` d²/2 (biased, low variance), ``k3``
r − 1 − d (unbiased, never negative). ``abs`` is |d|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.base_config import KLType

LOG_RATIO_BOUND = 20.0
"""Largest logarithm of a ratio of probabilities that is exponentiated, in nats."""
_K3_BOUND = 10.0


def kl_estimate(*, log_probs: Tensor, reference_log_probs: Tensor, kl_type: KLType) -> Tensor:
    """Elementwise estimate of KL(policy ‖ reference), in nats.

    Args:
        log_probs: Of the policy, any shape.
        reference_log_probs: Of the reference, the same shape.
        kl_type: ``k1``, ``abs``, ``k2``, ``k3``, or ``low_var_kl``, another name of ``k3``. For k3
            the log-ratio is clamped to ±20 and the result to ±10.

    Raises:
        ValueError: an unknown estimator.
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
            log_ratio = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (torch.expm1(log_ratio) - log_ratio).clamp(-_K3_BOUND, _K3_BOUND)
    raise ValueError(f"unknown KL estimator {kl_type!r}; known: k1, abs, k2, k3, low_var_kl")
