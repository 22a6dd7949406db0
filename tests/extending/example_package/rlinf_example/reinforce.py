"""REINFORCE (Williams 1992): the simplest policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.credit import decision_steps, generalized_advantages, per_row
from rlinf.algorithms.protocol import Algorithm, Evaluation
from rlinf.algorithms.samples import advantages_of, chunk_step_metrics, rows_of
from rlinf.data.trajectory import Trajectory
from rlinf_example.reinforce_config import ReinforceConfig


class Reinforce(Algorithm):
    """−E[ρ A] with the discounted return to the end of the episode or rollout as A."""

    def __init__(self, config: ReinforceConfig, *, group_size: int = 1) -> None:
        self.config = config

    def prepare(self, rollout: Trajectory | Batch) -> tuple[Batch, dict[str, float]]:
        """Samples with their returns; without values, λ = 1 makes of GAE the plain return."""
        assert isinstance(rollout, Trajectory)  # the config says: actions alone
        steps = decision_steps(rollout, reward_type="chunk_level", bootstrap_type="none")
        returns, _ = generalized_advantages(
            steps=steps, rewards=steps.rewards, gamma=self.config.gamma, gae_lambda=1.0
        )
        batch = rows_of(
            rollout,
            logprob_type="chunk_level",
            advantages=per_row(returns, rollout.num_steps),
            normalized=self.config.baseline,
        )
        return batch, chunk_step_metrics(rollout, batch)

    def normalizer(self, batch: Batch) -> float:
        """Number of samples of the global batch."""
        return float(len(batch))

    def loss(
        self, evaluation: Evaluation, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of a micro batch in the mean of −ρ A, and KL, to compare with `actor.target_kl`."""
        log_ratio = batch.fold(evaluation.log_probs) - batch.log_probs
        loss = -(log_ratio.exp() * advantages_of(batch)).sum() / normalizer
        kl = (torch.expm1(log_ratio) - log_ratio).sum() / normalizer
        return loss, {"actor/policy_loss": loss.detach(), "actor/approx_kl": kl.detach()}
