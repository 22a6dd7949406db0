"""REINFORCE++ (Hu et al. 2025)."""

from __future__ import annotations

import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import ReinforcePPConfig
from rlinf.algorithms.credit import (
    at_last_token,
    decision_steps,
    generalized_advantages,
    group_advantages,
    per_row,
    token_advantages,
)
from rlinf.algorithms.objective import ClippedObjective
from rlinf.algorithms.ppo import reward_kl
from rlinf.algorithms.samples import Credit, CreditEstimate
from rlinf.data.trajectory import Trajectory


class ReturnCredit(Credit):
    """A_t = Σ_{k≥t} γ^(k−t) (r_k − β KL_k), to the end of the answer, episode or rollout.

    The reward of an answer stands on its last valid token. With ``group_baseline`` the mean reward
    of the group is subtracted first (REINFORCE++-baseline), and the only valid answer of a group is
    not trained on.
    """

    _config: ReinforcePPConfig

    def of_answers(self, batch: Batch) -> CreditEstimate:
        """See :meth:`Credit.of_answers`."""
        valid = batch.valid
        scores = torch.where(valid, batch.rewards.double(), 0.0)
        trained = None
        if self._config.group_baseline:
            scores[valid], _, sizes = group_advantages(
                scores=scores[valid], groups=batch.groups[valid], divide_by_std=False
            )
            trained = torch.zeros_like(valid)
            trained[valid] = sizes > 1
        rewards = at_last_token(rewards=scores, mask=batch.mask) - reward_kl(self._config, batch)
        advantages, _ = token_advantages(
            rewards=rewards,
            values=torch.zeros_like(rewards),
            mask=batch.mask,
            gamma=self._config.gamma,
            gae_lambda=1.0,
        )
        return CreditEstimate(advantages=advantages, trained=trained)

    def of_chunk_steps(self, trajectory: Trajectory) -> CreditEstimate:
        """See :meth:`Credit.of_chunk_steps`; without values, λ = 1 makes of GAE the return."""
        steps = decision_steps(trajectory, reward_type="chunk_level", bootstrap_type="none")
        returns, _ = generalized_advantages(
            steps=steps, rewards=steps.rewards, gamma=self._config.gamma, gae_lambda=1.0
        )
        return CreditEstimate(advantages=per_row(returns, trajectory.num_steps))


class ReinforcePP(ClippedObjective):
    """Returns, normalised over all terms of the rollout; clipped surrogate."""

    credit = ReturnCredit
