"""On-policy distillation (Agarwal et al. 2024, "On-policy distillation of language models")."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import DistillationConfig
from rlinf.algorithms.objective import PolicyObjective, PolicyTerms, bounded_log_ratio
from rlinf.algorithms.protocol import Evaluation, Share
from rlinf.algorithms.samples import Credit, CreditEstimate
from rlinf.data.trajectory import Trajectory


class NoCredit(Credit):
    """Rewards count for nothing."""

    def of_answers(self, batch: Batch) -> CreditEstimate:
        """0 for every token."""
        return CreditEstimate(advantages=torch.zeros_like(batch.mask))

    def of_chunk_steps(self, trajectory: Trajectory) -> CreditEstimate:
        """0 for every chunk."""
        return CreditEstimate(advantages=torch.zeros_like(trajectory.rewards[..., :1]))


class Distillation(PolicyObjective):
    """−A log π, A = log π_teacher − log π of the student that acted, at the student's own actions:
    the policy gradient of the KL divergence from student to teacher. The teacher is the reference
    policy, with weights of its own."""

    config: DistillationConfig
    credit = NoCredit

    def __init__(self, config: DistillationConfig, *, group_size: int = 1) -> None:
        super().__init__(config, group_size=group_size)
        self.reference_weights = config.teacher

    def _prepare_chunk_steps(
        self, trajectory: Trajectory, proximal: Tensor | None
    ) -> tuple[Batch, dict[str, float]]:
        """Tells nothing of advantages: what the teacher thinks of the actions is asked later."""
        batch, metrics = super()._prepare_chunk_steps(trajectory, proximal)
        return batch, {n: each for n, each in metrics.items() if "advantages" not in n}

    def _terms(self, log_ratio: Tensor, log_probs: Tensor, batch: Batch) -> PolicyTerms:
        ratio = bounded_log_ratio(self.config, log_ratio).detach().exp()
        loss = -self._advantages(batch) * log_probs
        return PolicyTerms(loss=loss, ratio=ratio, clipped_ratio=ratio)

    def _advantages(self, batch: Batch) -> Tensor:
        if batch.reference_log_probs is None:
            raise ValueError("distillation needs reference_log_probs in the batch")
        return torch.where(batch.mask > 0, batch.reference_log_probs - batch.log_probs, 0.0)

    def loss(self, evaluation: Evaluation, batch: Batch, *, normalizer: float) -> Share:
        """See the base class; ``actor/teacher_kl`` estimates the divergence from the teacher."""
        loss, metrics = super().loss(evaluation, batch, normalizer=normalizer)
        apart = {"teacher_kl": -self._advantages(batch)}
        return loss, metrics | self._means(apart, batch, normalizer)
