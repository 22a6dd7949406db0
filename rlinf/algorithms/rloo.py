"""REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to basics")."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.credit import leave_one_out_advantages
from rlinf.algorithms.grpo import GRPO, GroupCredit
from rlinf.algorithms.objective import PolicyTerms


class _LeaveOneOutCredit(GroupCredit):
    def _compare(self, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        return leave_one_out_advantages(scores=scores, groups=groups)


class RLOO(GRPO):
    """One action is the whole answer: it has one ratio, the product of those of its tokens.

    While the ratio is 1 the gradient is that of REINFORCE with the leave-one-out baseline; away
    from 1 it is clipped as in PPO.
    """

    credit = _LeaveOneOutCredit

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        """The loss of a sequence, in equal parts on its tokens."""
        del log_probs
        of_sequence = (log_ratio * batch.mask).sum(dim=1, keepdim=True)
        terms = self._clipped(of_sequence.expand_as(log_ratio), batch)
        tokens = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
        return replace(terms, loss=terms.loss / tokens)
