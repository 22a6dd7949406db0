"""Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.tokens.advantages import overlong_penalty
from rlinf.algorithms.tokens.config import DAPOConfig
from rlinf.algorithms.tokens.grpo import GRPO


class DAPO(GRPO):
    """GRPO with a penalty for long answers (eq. 13).

    Clip-higher (eq. 10), dynamic sampling (eq. 11), the token-level loss (eq. 12) and the overlong
    filter (§3.4) are the defaults of its config. Whether a group is drawn again is decided by the
    rewards themselves, before the penalty.
    """

    config: DAPOConfig

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add advantages; see :meth:`TokenAlgorithm.prepare`."""
        prepared, metrics = super().prepare(batch)
        penalty = self._penalty(batch)
        if penalty is not None:
            metrics["rollout/length_penalty"] = penalty.mean().item() if len(batch) else 0.0
        return prepared, metrics

    def _scores(self, batch: Batch) -> Tensor:
        scores, penalty = super()._scores(batch), self._penalty(batch)
        return scores if penalty is None else scores + self.config.len_reward_penalty * penalty

    def _penalty(self, batch: Batch) -> Tensor | None:
        """[N] in [−1, 0]; None without lengths in the config."""
        safe, longest = self.config.safe_length, self.config.max_length
        if safe is None or longest is None:
            return None
        lengths = (batch.mask > 0).sum(dim=1).double()
        return overlong_penalty(lengths=lengths, safe_length=safe, max_length=longest)
