"""Proximal policy optimisation on tokens, with a critic (Schulman et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.losses import clipped_value_loss
from rlinf.algorithms.tokens.advantages import at_last_token, token_advantages
from rlinf.algorithms.tokens.config import DecoupledPPOConfig, PPOConfig
from rlinf.algorithms.tokens.metrics import explained_variance
from rlinf.algorithms.tokens.objective import ClippedObjective, Estimate


class PPO(ClippedObjective):
    """Generalised advantages from the values of a critic, and the loss of that critic.

    The reward stands on the last valid token of its sequence, less the KL divergence of each token
    where ``kl_reward_beta`` asks for it. Nothing follows the last token, also where the token limit
    cut the sequence off.
    """

    config: PPOConfig | DecoupledPPOConfig

    def trains_policy(self, step: int) -> bool:
        """Not during the critic's warm-up."""
        return step >= self.config.critic_warmup_steps

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add advantages and returns; see :meth:`TokenAlgorithm.prepare`."""
        prepared, metrics = super().prepare(batch)
        if prepared.values is not None and prepared.returns is not None:
            metrics["critic/explained_variance"] = explained_variance(
                values=prepared.values, returns=prepared.returns, mask=prepared.mask
            )
        return prepared, metrics

    def _estimate(self, batch: Batch) -> Estimate:
        if batch.values is None:
            raise ValueError(f"{self.config.type} needs values in the batch")
        scores = torch.where(batch.valid, batch.rewards.double(), 0.0)
        advantages, returns = token_advantages(
            rewards=at_last_token(rewards=scores, mask=batch.mask) - self._reward_kl(batch),
            values=batch.values.double(),
            mask=batch.mask,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )
        return Estimate(advantages=advantages, returns=returns)

    def value_loss(
        self, values: Tensor, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped Huber loss; see :meth:`TokenAlgorithm.value_loss`."""
        if batch.returns is None or batch.values is None:
            raise ValueError(f"the critic of {self.config.type} needs returns and values")
        counted = batch.mask > 0
        terms, clipped = clipped_value_loss(
            values=torch.where(counted, values, 0.0),
            old_values=torch.where(counted, batch.values, 0.0),
            returns=torch.where(counted, batch.returns, 0.0),
            value_clip=self.config.value_clip,
            delta=self.config.huber_delta,
        )
        loss = self._mean(terms, batch, normalizer)
        metrics = {"critic/value_loss": loss.detach()}
        if clipped is not None:
            ratio = self._mean(clipped.float(), batch, normalizer)
            metrics["critic/value_clip_ratio"] = ratio
        return loss, metrics
