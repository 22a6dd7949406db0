"""Supervised learning: cross entropy on what is to be learnt, tokens or actions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Evaluation


class Supervised(Algorithm):
    """−Σ log π(term) / number of terms, over the terms where ``mask`` is not 0.

    Of target tokens it is their mean cross entropy, of demonstrated actions it is behaviour
    cloning (Pomerleau 1991).
    """

    def prepare(self, rollout: Any) -> tuple[Batch, dict[str, float]]:
        """What is to be learnt is given."""
        return rollout, {}

    def normalizer(self, batch: Batch) -> float:
        """Terms to be learnt; 1 if there are none."""
        return float((batch.mask > 0).sum()) or 1.0

    def loss(
        self, evaluation: Evaluation, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`Algorithm.loss`."""
        log_probs = batch.fold(evaluation.log_probs)
        return -(log_probs * (batch.mask > 0)).sum() / normalizer, {}
