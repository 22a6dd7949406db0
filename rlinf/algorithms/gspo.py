"""Group sequence policy optimisation (Zheng et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import GSPOConfig
from rlinf.algorithms.grpo import GRPO
from rlinf.algorithms.objective import PolicyTerms


class GSPO(GRPO):
    """GRPO with the ratio s_i = exp(mean over tokens of their log-ratio) of a sequence (eq. 7).

    With ``per_token`` the ratio of a token is sg[s_i] · π / sg[π] (GSPO-token, eq. 14): the same
    value, but the gradient of each token's own log-prob.
    """

    config: GSPOConfig

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        tokens = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
        of_sequence = (log_ratio * batch.mask).sum(dim=1, keepdim=True) / tokens
        if self.config.per_token:
            return self._clipped(of_sequence.detach() + log_probs - log_probs.detach(), batch)
        return self._clipped(of_sequence.expand_as(log_ratio), batch)
