"""REINFORCE (Williams 1992): the simplest policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.advantages import decision_steps, generalized_advantages, per_row
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Evaluation
from rlinf.algorithms.samples import advantage_metrics, advantages_of, training_batch
from rlinf.data.trajectory import Trajectory
from rlinf_example.reinforce_config import ReinforceConfig


class Reinforce(Algorithm):
    """−E[ρ A] with the discounted return to the end of the episode or rollout as A."""

    needs_reference = False

    def __init__(self, config: ReinforceConfig, *, group_size: int = 1) -> None:
        self.config = config

    def value_dim(self, chunk: int) -> int:
        """No critic."""
        return 0

    def prepare(self, trajectory: Trajectory) -> tuple[Batch, dict[str, float]]:
        """Samples with their returns; without values, λ = 1 makes of GAE the plain return."""
        steps = decision_steps(trajectory, reward_type="chunk_level", bootstrap_type="none")
        returns, _ = generalized_advantages(
            steps=steps, rewards=steps.rewards, gamma=self.config.gamma, gae_lambda=1.0
        )
        batch = training_batch(
            trajectory,
            logprob_type="chunk_level",
            advantages=per_row(returns, trajectory.num_steps),
            returns=None,
            values=None,
            weights=None,
            normalized=self.config.baseline,
        )
        return batch, advantage_metrics(batch, trajectory)

    def normalizer(self, batch: Batch) -> float:
        """Number of samples of the global batch."""
        return float(len(batch))

    def loss(
        self, evaluation: Evaluation, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of a micro batch in the mean of −ρ A; the trainer needs `actor/approx_kl`."""
        log_ratio = batch.fold(evaluation.log_probs) - batch.log_probs
        loss = -(log_ratio.exp() * advantages_of(batch)).sum() / normalizer
        kl = (torch.expm1(log_ratio) - log_ratio).sum() / normalizer
        return loss, {"actor/policy_loss": loss.detach(), "actor/approx_kl": kl.detach()}
