"""Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import DAPOConfig
from rlinf.algorithms.credit import overlong_penalty
from rlinf.algorithms.grpo import GRPO, GroupCredit
from rlinf.algorithms.samples import CreditEstimate, mean


class _PenalisedCredit(GroupCredit):
    """GRPO with a penalty for long answers (eq. 13)."""

    _config: DAPOConfig

    def of_answers(self, batch: Batch) -> CreditEstimate:
        """See :meth:`Credit.of_answers`."""
        safe, longest = self._config.safe_length, self._config.max_length
        if safe is None or longest is None:
            return super().of_answers(batch)
        lengths = (batch.mask > 0).sum(dim=1).double()
        penalty = overlong_penalty(lengths=lengths, safe_length=safe, max_length=longest)
        scores = self._scores(batch) + self._config.len_reward_penalty * penalty
        found = self._of_scores(batch, scores)
        return replace(found, metrics={"rollout/length_penalty": mean(penalty)})


class DAPO(GRPO):
    """Clip-higher (eq. 10), dynamic sampling (eq. 11), the token-level loss (eq. 12) and the
    overlong filter (§3.4) are the defaults of its config; the penalty for long answers (eq. 13) is
    its credit. Whether a group is drawn again is decided by the rewards before the penalty."""

    credit = _PenalisedCredit
