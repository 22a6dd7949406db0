"""Clipped importance-sampling policy optimisation (MiniMax 2025, "MiniMax-M1", §3.1)."""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.objective import bounded_log_ratio
from rlinf.algorithms.samples import advantages_of
from rlinf.algorithms.tokens.config import CISPOConfig
from rlinf.algorithms.tokens.grpo import GroupObjective
from rlinf.algorithms.tokens.objective import PolicyTerms


class CISPO(GroupObjective):
    """−sg[clip(ρ, 1 − low, 1 + high)] · A · log π (eq. 4 and 5): no token loses its gradient."""

    config: CISPOConfig

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        """See :meth:`PolicyObjective._terms`."""
        ratio = bounded_log_ratio(self.config, log_ratio).exp().detach()
        clipped = ratio.clamp(1.0 - self.config.clip_ratio_low, 1.0 + self.config.clip_ratio_high)
        loss = -clipped * advantages_of(batch) * log_probs
        return PolicyTerms(loss=loss, ratio=ratio, clipped_ratio=clipped)
