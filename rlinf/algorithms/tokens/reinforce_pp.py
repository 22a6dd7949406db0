"""REINFORCE++ (Hu et al. 2025)."""

from __future__ import annotations

import torch

from rlinf.algorithms.advantages import group_advantages
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.tokens.advantages import at_last_token, token_advantages
from rlinf.algorithms.tokens.config import ReinforcePPConfig
from rlinf.algorithms.tokens.objective import ClippedObjective, Estimate


class ReinforcePP(ClippedObjective):
    """A_t = Σ_{k≥t} γ^(k−t) (r_k − β KL_k), normalised over all tokens of the rollout.

    The reward stands on the last valid token of its sequence. With ``group_baseline`` the mean
    reward of the group is subtracted first (REINFORCE++-baseline), and the only valid answer of a
    group is not trained on.
    """

    config: ReinforcePPConfig

    def _estimate(self, batch: Batch) -> Estimate:
        valid = batch.valid
        scores = torch.where(valid, batch.rewards.double(), 0.0)
        trained = None
        if self.config.group_baseline:
            scores[valid], _, sizes = group_advantages(
                scores=scores[valid], groups=batch.groups[valid], divide_by_std=False
            )
            trained = torch.zeros_like(valid)
            trained[valid] = sizes > 1
        rewards = at_last_token(rewards=scores, mask=batch.mask) - self._reward_kl(batch)
        advantages, _ = token_advantages(
            rewards=rewards,
            values=torch.zeros_like(rewards),
            mask=batch.mask,
            gamma=self.config.gamma,
            gae_lambda=1.0,
        )
        return Estimate(advantages=advantages, trained=trained)
