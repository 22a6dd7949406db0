"""What all token algorithms share: preparation of a batch, normaliser, policy loss, metrics."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import AggregationMode
from rlinf.algorithms.kl import kl_estimate
from rlinf.algorithms.losses import aggregate, aggregation_normalizer, clipped_policy_loss
from rlinf.algorithms.objective import RATIO_STATISTICS, bounded_log_ratio, ratio_statistics
from rlinf.algorithms.samples import advantages_of
from rlinf.algorithms.tokens.advantages import whiten
from rlinf.algorithms.tokens.base_config import ClippedTokenConfig, TokenAlgorithmConfig
from rlinf.algorithms.tokens.importance import importance_weights, proximal_log_probs
from rlinf.algorithms.tokens.metrics import equal_groups, rollout_metrics
from rlinf.algorithms.tokens.protocol import TokenAlgorithm


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What an algorithm says about the sequences of a rollout.

    Args:
        advantages: [N, L].
        trained: [N] bool, sequences that the algorithm can train on; None for all valid ones.
        returns: [N, L] value targets; None without a critic.
    """

    advantages: Tensor
    trained: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Elementwise policy loss [n, L] with the ratios [n, L] behind it."""

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor


class PolicyObjective(TokenAlgorithm):
    """A policy loss per token, with entropy, KL and importance sampling as the config says.

    An algorithm gives :meth:`_estimate` and :meth:`_terms`.
    """

    def __init__(self, config: TokenAlgorithmConfig) -> None:
        self.config = config

    @abstractmethod
    def _estimate(self, batch: Batch) -> Estimate:
        """Advantages of a rollout, before they are normalised over tokens."""

    @abstractmethod
    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        """Policy loss of each token.

        Args:
            log_ratio: [n, L], log π − log π_proximal of each token; 0 where ``mask`` is 0.
            log_probs: [n, L], log π; 0 where ``mask`` is 0.
            batch: The prepared micro batch.
        """

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add advantages; see :meth:`TokenAlgorithm.prepare`."""
        estimate = self._estimate(batch)
        trained = batch.valid if estimate.trained is None else estimate.trained & batch.valid
        if self.config.overlong_filter:
            trained = trained & ~batch.truncated
        mask = batch.mask * trained.unsqueeze(1)
        advantages = estimate.advantages
        if self.config.normalize_advantages:
            advantages = whiten(advantages=advantages, mask=mask)
        prepared = replace(
            batch,
            mask=mask,
            advantages=torch.where(mask > 0, advantages, 0.0).float(),
            returns=None if estimate.returns is None else estimate.returns.float(),
        )
        metrics = rollout_metrics(batch, prepared)
        if self.config.needs_groups:
            metrics["rollout/equal_groups"] = equal_groups(
                rewards=batch.rewards, groups=batch.groups, valid=batch.valid
            )
        return prepared, metrics

    def _reward_kl(self, batch: Batch) -> Tensor:
        """[N, L] float64, what the KL divergence takes from the reward of each token."""
        config = self.config
        if not config.kl_reward_beta:
            return torch.zeros_like(batch.mask, dtype=torch.float64)
        if batch.reference_log_probs is None:
            raise ValueError("kl_reward_beta > 0 needs reference_log_probs in the batch")
        old = batch.log_probs if batch.proximal_log_probs is None else batch.proximal_log_probs
        kl = kl_estimate(
            log_probs=old.double(),
            reference_log_probs=batch.reference_log_probs.double(),
            kl_type=config.kl_reward_type,
        )
        return torch.where(batch.mask > 0, config.kl_reward_beta * kl, 0.0)

    @property
    def _mode(self) -> AggregationMode:
        mode = self.config.loss_agg_func
        return "seq-mean-token-sum" if mode == "seq-mean-token-sum-norm" else mode

    def normalizer(self, batch: Batch) -> float:
        """Tokens to train on, or sequences times ``loss_agg_length``; 1 if there are none."""
        count = aggregation_normalizer(mode=self._mode, mask=batch.mask.double()).item()
        return count * (self.config.loss_agg_length or 1) or 1.0

    def _sum(self, terms: Tensor, batch: Batch, normalizer: float) -> Tensor:
        """Share of a micro batch in a term of the loss."""
        return aggregate(loss=terms, mode=self._mode, normalizer=normalizer, mask=batch.mask)

    def _mean(self, terms: Tensor, batch: Batch, normalizer: float) -> Tensor:
        """Share of a micro batch in a mean over tokens, or over sequences of their mean."""
        if self._mode == "token-mean":
            return self._sum(terms, batch, normalizer)
        return aggregate(
            loss=terms,
            mode="seq-mean-token-mean",
            normalizer=normalizer / (self.config.loss_agg_length or 1),
            mask=batch.mask,
        )

    def loss(
        self, log_probs: Tensor, entropy: Tensor | None, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss + KL penalty − entropy bonus; see :meth:`TokenAlgorithm.loss`."""
        counted = batch.mask > 0
        # Padded positions may hold anything, even infinities.
        log_probs = torch.where(counted, log_probs, 0.0)
        proximal = torch.where(counted, proximal_log_probs(self.config, log_probs, batch), 0.0)
        log_ratio = log_probs - proximal
        terms = self._terms(log_ratio, log_probs, batch)
        metrics = self._ratio_metrics(log_ratio, terms, batch, normalizer)
        elementwise = terms.loss
        if self.config.importance_sampling is not None:
            weights, more = self._importance(proximal, batch, normalizer)
            elementwise = elementwise * weights
            metrics |= more
        loss = self._sum(elementwise, batch, normalizer)
        metrics["actor/policy_loss"] = loss.detach()
        if self.config.kl_beta:
            kl_loss = self._sum(self._loss_kl(log_probs, batch), batch, normalizer)
            loss = loss + self.config.kl_beta * kl_loss
            metrics["actor/kl_loss"] = kl_loss.detach()
        if entropy is not None:
            entropy = torch.where(counted, entropy, 0.0)
            metrics["actor/entropy"] = self._mean(entropy.detach(), batch, normalizer)
        if self.config.entropy_bonus:
            if entropy is None:
                raise ValueError("entropy_bonus > 0 needs the entropy")
            loss = loss - self.config.entropy_bonus * self._sum(entropy, batch, normalizer)
        metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def _loss_kl(self, log_probs: Tensor, batch: Batch) -> Tensor:
        if batch.reference_log_probs is None:
            raise ValueError("kl_beta > 0 needs reference_log_probs in the batch")
        return kl_estimate(
            log_probs=log_probs,
            reference_log_probs=torch.where(batch.mask > 0, batch.reference_log_probs, 0.0),
            kl_type=self.config.kl_penalty_type,
        )

    @torch.no_grad()
    def _importance(
        self, proximal: Tensor, batch: Batch, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[n, L] weights, and metrics about them."""
        config = self.config
        rollout = torch.where(batch.mask > 0, batch.log_probs, 0.0)
        weights, outside = importance_weights(
            log_ratio=proximal - rollout,
            mask=batch.mask,
            level=config.importance_sampling or "token",
            low=config.importance_sampling_min,
            high=config.importance_sampling_clip,
            mode=config.importance_sampling_mode,
        )
        return weights, {
            "actor/importance_weight": self._mean(weights, batch, normalizer),
            "actor/importance_clip_fraction": self._mean(outside.float(), batch, normalizer),
        }

    @torch.no_grad()
    def _ratio_metrics(
        self, log_ratio: Tensor, terms: PolicyTerms, batch: Batch, normalizer: float
    ) -> dict[str, Tensor]:
        statistics = ratio_statistics(log_ratio, terms.ratio, terms.clipped_ratio)
        return {
            f"actor/{name}": self._mean(statistic, batch, normalizer)
            for name, statistic in zip(RATIO_STATISTICS, statistics, strict=True)
        }


class ClippedObjective(PolicyObjective):
    """The clipped surrogate of PPO on each token's ratio (Schulman et al. 2017, eq. 7)."""

    config: ClippedTokenConfig

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        """See :meth:`PolicyObjective._terms`."""
        del log_probs
        return self._clipped(log_ratio, batch)

    def _clipped(self, log_ratio: Tensor, batch: Batch) -> PolicyTerms:
        """Surrogate of any log-ratio [n, L]."""
        loss, ratio, clipped_ratio = clipped_policy_loss(
            log_ratio=bounded_log_ratio(self.config, log_ratio),
            advantages=advantages_of(batch),
            clip_ratio_low=self.config.clip_ratio_low,
            clip_ratio_high=self.config.clip_ratio_high,
            clip_ratio_c=self.config.clip_ratio_c,
        )
        return PolicyTerms(loss=loss, ratio=ratio, clipped_ratio=clipped_ratio)
