"""Decoupled PPO on actions, for rollouts of older weights (Hilton et al. 2022, eq. 4)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import DecoupledPPOConfig
from rlinf.algorithms.kl import LOG_RATIO_BOUND
from rlinf.algorithms.losses import at_level
from rlinf.algorithms.objective import policy_terms
from rlinf.algorithms.ppo import PPO
from rlinf.algorithms.protocol import Evaluation
from rlinf.algorithms.samples import intact_rows
from rlinf.algorithms.tokens.importance import importance_weights, interpolated_log_probs
from rlinf.data.trajectory import Trajectory


class DecoupledPPO(PPO):
    """w · max(−A r, −A clip(r)) with r = π / π_proximal and w = π_proximal / π_behaviour.

    The age of the data enters the weight w, and the clip keeps the policy near to the proximal one.
    A term whose weight exceeds ``behave_weight_threshold`` is left out, as if its loss were 0: the
    normaliser still counts it, so that the loss does not depend on the split into micro batches.
    With data of the present weights w = 1 and the loss is that of PPO.
    """

    config: DecoupledPPOConfig

    def __init__(self, config: DecoupledPPOConfig, *, group_size: int = 1) -> None:
        super().__init__(config, group_size=group_size)
        self.needs_present = config.proximal == "recomputed"

    def prepare(self, trajectory: Trajectory) -> tuple[Batch, dict[str, float]]:
        """Samples of PPO; the policy that acted is the proximal one."""
        batch, metrics = super().prepare(trajectory)
        return replace(batch, proximal_log_probs=batch.log_probs), metrics

    def prepare_stale(
        self, trajectory: Trajectory, present: Evaluation
    ) -> tuple[Batch, dict[str, float]]:
        """Samples with the proximal log-probs, and advantages and targets of the present critic.

        With the critic that acted, values would be learnt from values that are as many training
        phases old as the rollout.
        """
        batch, metrics = super().prepare(trajectory.with_values(present.values))
        proximal = at_level(intact_rows(present.log_probs, trajectory), self.config.logprob_type)
        return replace(batch, proximal_log_probs=proximal), metrics

    def _policy_terms(
        self, evaluation: Evaluation, batch: Batch, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        proximal = self._proximal(evaluation, batch)
        log_weight = proximal - batch.log_probs
        weights, left_out = importance_weights(
            log_ratio=log_weight,
            mask=torch.ones_like(log_weight),
            level="token",
            low=0.0,
            high=self.config.behave_weight_threshold,
            mode="mask",
        )
        loss, metrics = policy_terms(
            self.config,
            evaluation,
            replace(batch, log_probs=proximal),
            normalizer=normalizer,
            importance=weights,
        )

        def mean(terms: Tensor) -> Tensor:
            per_sample = terms.mean(dim=1)
            counted = per_sample if batch.weights is None else per_sample * batch.weights
            return counted.sum() / normalizer

        # KL(behaviour ‖ proximal) by Schulman's k3, of actions that the behaviour policy drew.
        log_weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        metrics["actor/behave_approx_kl"] = mean(torch.expm1(log_weight) - log_weight)
        metrics["actor/behave_clip_fraction"] = mean(left_out.float())
        metrics["actor/proximal_ratio"] = mean(log_weight.exp())
        return loss, metrics

    def _proximal(self, evaluation: Evaluation, batch: Batch) -> Tensor:
        """Log-probs under the proximal policy, shaped as ``batch.log_probs``, without gradient."""
        if self.config.proximal == "recomputed":
            if batch.proximal_log_probs is None:
                raise ValueError("proximal: recomputed needs proximal_log_probs in the batch")
            return batch.proximal_log_probs
        staleness = batch.staleness()
        if staleness is None:
            raise ValueError("proximal: interpolated needs the version in the batch")
        return interpolated_log_probs(
            behaviour_log_probs=batch.log_probs,
            log_probs=at_level(evaluation.log_probs, self.config.logprob_type),
            staleness=staleness,
        )
