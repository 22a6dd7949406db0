"""Group-relative policy optimisation on tokens (Shao et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlinf.algorithms.advantages import group_advantages
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.tokens.objective import ClippedObjective, Estimate, PolicyObjective

Comparison = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From [M] scores and [M] groups to [M] advantages and [M] sizes of the groups."""


def relative_to_group(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """(R − mean of group) / (std of group + 1e-6), and the size of each one's group."""
    advantages, _, sizes = group_advantages(scores=scores, groups=groups)
    return advantages, sizes


def group_estimate(batch: Batch, scores: Tensor, compare: Comparison) -> Estimate:
    """Every token of an answer gets the answer's score relative to its group.

    Answers that are not valid are not compared. The only valid answer of a group has nothing to be
    compared with and is not trained on.

    Args:
        batch: The rollout.
        scores: [N].
        compare: How the valid answers of a group are compared.
    """
    valid = batch.valid
    advantages, sizes = torch.zeros_like(scores), torch.zeros_like(batch.groups)
    advantages[valid], sizes[valid] = compare(scores[valid], batch.groups[valid])
    return Estimate(advantages=advantages.unsqueeze(1).expand(batch.mask.shape), trained=sizes > 1)


class GroupObjective(PolicyObjective):
    """Advantages by comparison of the answers to one prompt."""

    def _estimate(self, batch: Batch) -> Estimate:
        return group_estimate(batch, self._scores(batch), self._compare)

    def _scores(self, batch: Batch) -> Tensor:
        """[N] float64 rewards without the KL divergence of the sequence."""
        return batch.rewards.double() - self._reward_kl(batch).sum(dim=1)

    def _compare(self, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """See :data:`Comparison`."""
        return relative_to_group(scores, groups)


class GRPO(GroupObjective, ClippedObjective):
    """(R − mean of group) / (std of group + 1e-6), Shao et al. 2024, §4.1.2; clipped surrogate."""
