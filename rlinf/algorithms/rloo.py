"""REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to basics")."""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.credit import leave_one_out_advantages
from rlinf.algorithms.grpo import GRPO
from rlinf.algorithms.objective import PolicyTerms


class RLOO(GRPO):
    """One action is the whole answer: it has one ratio, the product of those of its tokens.

    While the ratio is 1 the gradient is that of REINFORCE with the leave-one-out baseline; away
    from 1 it is clipped as in PPO.
    """

    compare = staticmethod(leave_one_out_advantages)

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        """The loss of a sequence, in equal parts on its tokens."""
        del log_probs
        of_sequence = (log_ratio * batch.mask).sum(dim=1, keepdim=True)
        terms = self._clipped(of_sequence.expand_as(log_ratio), batch)
        tokens = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
        return PolicyTerms(
            loss=terms.loss / tokens, ratio=terms.ratio, clipped_ratio=terms.clipped_ratio
        )
