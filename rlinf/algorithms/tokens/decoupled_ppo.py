"""Decoupled PPO for stale data (Hilton et al. 2022; Fu et al. 2025, "AReaL", §5.2)."""

from __future__ import annotations

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.tokens.config import DecoupledPPOConfig
from rlinf.algorithms.tokens.grpo import group_estimate, relative_to_group
from rlinf.algorithms.tokens.objective import Estimate
from rlinf.algorithms.tokens.ppo import PPO


class DecoupledPPO(PPO):
    """w · max(−Aρ, −A clip(ρ)) with ρ = π / π_prox and w = π_prox / π_behaviour.

    The data's age enters the weight w, bounded by ``importance_sampling_clip``, and the clip keeps
    the policy near to the proximal one. Proximal log-probs are recomputed or interpolated.
    """

    config: DecoupledPPOConfig

    def _estimate(self, batch: Batch) -> Estimate:
        if self.config.advantage == "gae":
            return super()._estimate(batch)
        scores = batch.rewards.double() - self._reward_kl(batch).sum(dim=1)
        return group_estimate(batch, scores, relative_to_group)
