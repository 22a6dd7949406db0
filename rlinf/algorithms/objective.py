"""What the algorithms with a policy loss share, for actions and tokens alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.base_config import AggregationMode, ClippedConfig, PolicyConfig
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import CriticConfig
from rlinf.algorithms.credit import whiten
from rlinf.algorithms.losses import (
    LOG_RATIO_BOUND,
    aggregate,
    aggregation_normalizer,
    at_level,
    clipped_policy_loss,
    clipped_value_loss,
    divergence,
    importance_weights,
    interpolated_log_probs,
    kl_estimate,
    per_term,
)
from rlinf.algorithms.protocol import Algorithm, Evaluation, Loss, Modules, Share
from rlinf.algorithms.samples import (
    Credit,
    CreditEstimate,
    advantages_of,
    answer_metrics,
    chunk_step_metrics,
    critic_metrics,
    equal_groups,
    reference_metrics,
    row_weights,
    rows_of,
)
from rlinf.algorithms.supervised import Supervised, demonstrations_of
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import ACTION_MASK


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Elementwise policy loss [n, K] with the ratios [n, K] behind it."""

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    dual_clipped: Tensor | None = None
    """Where ``clip_ratio_c`` bounds the loss, bool [n, K]."""


class PolicyObjective(Algorithm):
    """A policy loss per term, with entropy, KL and importance weights as the config says.

    An algorithm gives :attr:`credit` and :meth:`_terms`.
    """

    credit: type[Credit]
    """Where advantages come from."""
    max_token_age: int | None = None
    """Phases by which the weights of a token that counts may be older than those that are trained;
    set by who trains on interrupted answers."""
    imitation: Supervised | None = None
    """Error of recorded chunks that rows of a batch have beside them."""

    def __init__(self, config: PolicyConfig, *, group_size: int = 1) -> None:
        self.config = config
        self._credit = self.credit(config, group_size)
        self.needs_values = config.needs_values
        self.needs_reference = config.needs_reference
        self.needs_proximal = config.needs_proximal
        self.needs_entropy = config.needs_entropy
        self.needs_present = config.family == "actions" and config.needs_proximal
        self._policy_weight = 1.0  # of all terms of the loss but that of the values

    @abstractmethod
    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        """Policy loss of each term; log π − log π_proximal and log π, each [n, K], are 0 where the
        ``mask`` of the prepared micro batch is."""

    def keep_group(self, rewards: np.ndarray, valid: np.ndarray | None = None) -> bool:
        """False with dynamic sampling for a group whose valid rewards are all equal, so that its
        advantages would be 0 (Yu et al. 2025, "DAPO", eq. 11)."""
        if not self.config.dynamic_sampling:
            return True
        counted = rewards if valid is None else rewards[valid]
        return len(counted) > 1 and bool(counted.max() > counted.min())

    def value_dim(self, chunk: int) -> int:
        """See :meth:`Algorithm.value_dim`."""
        return self._credit.value_dim(chunk)

    def prepare(self, rollout: Trajectory | Batch) -> tuple[Batch, dict[str, float]]:
        """Add advantages; see :meth:`Algorithm.prepare`."""
        if isinstance(rollout, Trajectory):
            return self._prepare_chunk_steps(rollout, None)
        estimate = self._credit.of_answers(rollout)
        prepared = self._prepared_answers(rollout, estimate)
        metrics = answer_metrics(rollout, prepared) | estimate.metrics
        if self.config.needs_groups:
            metrics["rollout/equal_groups"] = equal_groups(rollout)
        if self.config.kl_reward_beta:
            metrics |= reference_metrics(rollout, self.config.kl_reward_type)
        return prepared, metrics | critic_metrics(prepared)

    def _prepared_answers(self, batch: Batch, estimate: CreditEstimate) -> Batch:
        trained = batch.valid if estimate.trained is None else estimate.trained & batch.valid
        if self.config.overlong_filter:
            trained = trained & ~batch.truncated
        mask = batch.mask * trained.unsqueeze(1)
        age = batch.staleness()
        if self.max_token_age is not None and age is not None:
            mask = mask * (age <= self.max_token_age)
        advantages = estimate.advantages
        if self.config.normalize_advantages:
            advantages = whiten(advantages=advantages, mask=mask)
        return replace(
            batch,
            mask=mask,
            advantages=torch.where(mask > 0, advantages, 0.0).float(),
            returns=None if estimate.returns is None else estimate.returns.float(),
        )

    def prepare_stale(
        self, trajectory: Trajectory, present: Evaluation
    ) -> tuple[Batch, dict[str, float]]:
        """Samples with the proximal log-probs, and advantages and targets of the present critic:
        with the critic that acted, values would be learnt from stale ones."""
        if present.values is not None:
            trajectory = trajectory.with_values(present.values)
        return self._prepare_chunk_steps(trajectory, present.log_probs)

    def _prepare_chunk_steps(
        self, trajectory: Trajectory, proximal: Tensor | None
    ) -> tuple[Batch, dict[str, float]]:
        """``proximal`` [T, B, C, A]; None: the policy that acted."""
        config = self.config
        estimate = self._credit.of_chunk_steps(trajectory)
        proximal = trajectory.log_probs if proximal is None else proximal
        batch = rows_of(
            trajectory,
            logprob_type=config.logprob_type,
            advantages=estimate.advantages,
            returns=estimate.returns,
            weights=row_weights(
                trajectory, estimate.trained, by_length=config.weight_by_episode_length
            ),
            normalized=config.normalize_advantages,
            proximal_log_probs=proximal if self.needs_proximal else None,
        )
        metrics = chunk_step_metrics(trajectory, batch) | estimate.metrics
        return batch, metrics | critic_metrics(batch)

    def state_dict(self) -> dict[str, Any]:
        """Running statistics of the credit."""
        return self._credit.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._credit.load_state_dict(state)

    @property
    def _mode(self) -> AggregationMode:
        mode = self.config.loss_agg_func
        return "seq-mean-token-sum" if mode == "seq-mean-token-sum-norm" else mode

    def normalizer(self, batch: Batch) -> float:
        """Terms to train on, or rows times ``loss_agg_length``, by weight; 1 if there are none."""
        count = aggregation_normalizer(
            mode=self._mode, mask=batch.mask.double(), weights=batch.weights
        ).item()
        return count * (self.config.loss_agg_length or 1) or 1.0

    def _sum(self, terms: Tensor, batch: Batch, normalizer: float) -> Tensor:
        """Share of a micro batch in a term of the loss."""
        mask, weights = batch.mask, batch.weights
        return aggregate(
            loss=terms, mode=self._mode, normalizer=normalizer, mask=mask, weights=weights
        )

    def _mean(self, terms: Tensor, batch: Batch, normalizer: float) -> Tensor:
        """Share of a micro batch in a mean over terms, or over rows of their mean."""
        if self._mode == "token-mean":
            return self._sum(terms, batch, normalizer)
        return aggregate(
            loss=terms,
            mode="seq-mean-token-mean",
            normalizer=normalizer / (self.config.loss_agg_length or 1),
            mask=batch.mask,
            weights=batch.weights,
        )

    def _means(
        self, terms: Mapping[str, Tensor], batch: Batch, normalizer: float
    ) -> dict[str, Tensor]:
        """All at once, as small batches take longer by the number of operations than by rows."""
        together = torch.stack([each.detach() for each in terms.values()])
        means = self._mean(together, batch, normalizer).unbind()
        return {f"actor/{name}": mean for name, mean in zip(terms, means, strict=True)}

    def losses(self) -> tuple[Loss, ...]:
        """Of the policy; and of the critic, where it is a network of its own."""
        policy = Loss("policy", ("policy",), self._of_policy)
        if not self.needs_values or self.config.family == "actions":
            return (policy,)
        return policy, Loss("critic", ("critic",), self._of_critic)

    def _of_policy(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        loss, metrics = super()._of_policy(modules, batch, normalizer)
        shown = demonstrations_of(batch)
        if self.imitation is not None and shown is not None:
            errors = self.imitation.errors(modules["policy"], shown)
            imitation_loss = (errors * shown.mask).sum()
            loss = loss + self._policy_weight * imitation_loss
            metrics["actor/imitation_loss"] = imitation_loss.detach()
            metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def _of_critic(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        return self.value_loss(modules["critic"](batch), batch, normalizer=normalizer)

    def loss(self, evaluation: Evaluation, batch: Batch, *, normalizer: float) -> Share:
        """Policy loss + KL penalty − entropy bonus, + value loss of a policy with a critic of its
        own; see :meth:`Algorithm.loss`."""
        counted = batch.mask > 0
        # Padded positions may hold anything, even infinities.
        log_probs = torch.where(counted, batch.fold(evaluation.log_probs), 0.0)
        proximal = torch.where(counted, self._proximal(log_probs, batch), 0.0)
        log_ratio = log_probs - proximal
        terms = self._terms(log_ratio, log_probs, batch)
        numbers = {
            "ratio": terms.ratio,
            "clipped_ratio": terms.clipped_ratio,
            "clip_fraction": (terms.ratio != terms.clipped_ratio).to(terms.ratio.dtype),
            "approx_kl": divergence(log_ratio.detach()),
        }
        if terms.dual_clipped is not None:
            numbers["dual_clip_fraction"] = terms.dual_clipped.to(terms.ratio.dtype)
        metrics = self._means(numbers, batch, normalizer)
        elementwise = terms.loss
        if self.config.importance is not None:
            weights, more = self._importance(proximal, batch, normalizer)
            elementwise = elementwise * weights
            metrics |= more
        loss = self._sum(elementwise, batch, normalizer)
        metrics["actor/policy_loss"] = loss.detach()
        if self.config.kl_beta:
            kl_loss = self._sum(self._loss_kl(log_probs, batch), batch, normalizer)
            loss = loss + self.config.kl_beta * kl_loss
            metrics["actor/kl_loss"] = kl_loss.detach()
        bonus, more = self._entropy(evaluation, batch, normalizer)
        metrics |= more
        if bonus is not None:
            loss = loss - self.config.entropy_bonus * bonus
        if isinstance(self.config, CriticConfig) and evaluation.values is not None:
            value_loss, more = self.value_loss(evaluation.values, batch, normalizer=normalizer)
            loss = self._policy_weight * loss + self.config.value_coefficient * value_loss
            metrics |= more
        metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def _entropy(
        self, evaluation: Evaluation, batch: Batch, normalizer: float
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Share in the entropy of the loss, None without a bonus; and metrics about it."""
        entropy = evaluation.entropy
        if entropy is None:
            if self.config.entropy_bonus:
                raise ValueError("entropy_bonus > 0 needs the entropy")
            return None, {}
        if not self.config.entropy_bonus:
            entropy = entropy.detach()
        if entropy.ndim == 3:
            level = at_level(entropy, self.config.entropy_type)
            terms, total = batch.mask.shape[1], self._mode == "seq-mean-token-sum"
            own = batch.inputs.get(ACTION_MASK)
            of_dimensions = (terms if total else level.shape[1]) == entropy[0].numel()
            if own is not None and of_dimensions and level.shape[1] != terms:
                # A row is averaged over, or shared out to, the action dimensions that it has.
                level = level * (own.shape[1] / own.sum(dim=1, keepdim=True))
            entropy = per_term(level, terms, total=total)
        entropy = torch.where(batch.mask > 0, entropy, 0.0)
        share = self._sum(entropy, batch, normalizer)
        mean = share if self._mode == "token-mean" else self._mean(entropy, batch, normalizer)
        metrics = {"actor/entropy": mean.detach(), "actor/entropy_loss": share.detach()}
        return (share if self.config.entropy_bonus else None), metrics

    def value_loss(self, values: Tensor, batch: Batch, *, normalizer: float) -> Share:
        """Clipped Huber loss; see :meth:`Algorithm.value_loss`."""
        if not isinstance(self.config, CriticConfig):
            raise NotImplementedError(f"{self.config.type} has no critic")
        if batch.returns is None or batch.values is None:
            raise ValueError(f"the critic of {self.config.type} needs returns and values")
        counted = batch.mask > 0
        if values.shape != counted.shape:
            counted = counted.any(dim=1, keepdim=True)
        terms, clipped = clipped_value_loss(
            values=torch.where(counted, values, 0.0),
            old_values=torch.where(counted, batch.values, 0.0),
            returns=torch.where(counted, batch.returns, 0.0),
            value_clip=self.config.value_clip,
            delta=self.config.huber_delta,
        )

        def share(of_values: Tensor) -> Tensor:
            return self._mean(per_term(of_values, batch.mask.shape[1]), batch, normalizer)

        loss = share(terms)
        metrics = {"critic/value_loss": loss.detach()}
        if clipped is not None:
            metrics["critic/value_clip_ratio"] = share(clipped.float())
        return loss, metrics

    def accepts(self, metrics: Mapping[str, float]) -> bool:
        """Whether the mean ratio is within ``early_stop_imp_ratio``."""
        bound = self.config.early_stop_imp_ratio
        return bound is None or not metrics["actor/ratio"] > bound

    def _proximal(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """[n, K] log-probs that the probability ratio divides by, without gradient."""
        match self.config.proximal:
            case "recomputed":
                if batch.proximal_log_probs is None:
                    raise ValueError("proximal: recomputed needs proximal_log_probs in the batch")
                return batch.proximal_log_probs
            case "interpolated":
                staleness = batch.staleness()
                if staleness is None:
                    raise ValueError("proximal: interpolated needs the version in the batch")
                return interpolated_log_probs(
                    behaviour_log_probs=batch.log_probs, log_probs=log_probs, staleness=staleness
                )
        return batch.log_probs

    def _loss_kl(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """[n, K] KL divergence from the reference policy."""
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
        """[n, K] weights, and metrics about them."""
        level, low, high, mode = self.config.importance or ("token", 0.0, 1.0, "truncate")
        log_weight = proximal - torch.where(batch.mask > 0, batch.log_probs, 0.0)
        weights, outside = importance_weights(
            log_ratio=log_weight, mask=batch.mask, level=level, low=low, high=high, mode=mode
        )
        numbers = {
            "importance_weight": weights,
            "importance_clip_fraction": outside.float(),
            "behave_approx_kl": divergence(log_weight),
            "proximal_ratio": log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(),
        }
        return weights, self._means(numbers, batch, normalizer)


class ClippedObjective(PolicyObjective):
    """The clipped surrogate of PPO on each term's ratio (Schulman et al. 2017, eq. 7)."""

    config: ClippedConfig

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        del log_probs
        return self._clipped(log_ratio, batch)

    def _clipped(self, log_ratio: Tensor, batch: Batch) -> PolicyTerms:
        """Surrogate of any log-ratio [n, K]."""
        advantages, bound = advantages_of(batch), self.config.clip_ratio_c
        loss, ratio, clipped_ratio = clipped_policy_loss(
            log_ratio=bounded_log_ratio(self.config, log_ratio),
            advantages=advantages,
            clip_ratio_low=self.config.clip_ratio_low,
            clip_ratio_high=self.config.clip_ratio_high,
            clip_ratio_c=bound,
        )
        dual_clipped = None if bound is None else (advantages < 0) & (ratio > bound)
        return PolicyTerms(
            loss=loss, ratio=ratio, clipped_ratio=clipped_ratio, dual_clipped=dual_clipped
        )


def bounded_log_ratio(config: PolicyConfig, log_ratio: Tensor) -> Tensor:
    """``log_ratio`` within the bounds of the config, any shape.

    There always is a bound: e^88.8 is infinite in float32, and the gradient of a clipped term,
    0 · ∞, would be no number.
    """
    low, high = config.clip_log_ratio_min, config.clip_log_ratio_max
    return log_ratio.clamp(
        -LOG_RATIO_BOUND if low is None else low, LOG_RATIO_BOUND if high is None else high
    )
