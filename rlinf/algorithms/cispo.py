"""Clipped importance-sampling policy optimisation (MiniMax 2025, "MiniMax-M1", §3.1)."""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import CISPOConfig
from rlinf.algorithms.grpo import GroupCredit
from rlinf.algorithms.objective import PolicyObjective, PolicyTerms, bounded_log_ratio
from rlinf.algorithms.samples import advantages_of


class CISPO(PolicyObjective):
    """−sg[clip(ρ, 1 − low, 1 + high)] · A · log π (eq. 4 and 5): no term loses its gradient."""

    config: CISPOConfig
    credit = GroupCredit

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        ratio = bounded_log_ratio(self.config, log_ratio).exp().detach()
        clipped = ratio.clamp(1.0 - self.config.clip_ratio_low, 1.0 + self.config.clip_ratio_high)
        loss = -clipped * advantages_of(batch) * log_probs
        return PolicyTerms(loss=loss, ratio=ratio, clipped_ratio=clipped)
