"""GRPO done right (Liu et al. 2025, "Understanding R1-Zero-like training", §3.2)."""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.credit import group_advantages
from rlinf.algorithms.grpo import GRPO, GroupCredit


class _CentredCredit(GroupCredit):
    def _compare(self, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        advantages, _, sizes = group_advantages(scores=scores, groups=groups, divide_by_std=False)
        return advantages, sizes


class DrGRPO(GRPO):
    """R − mean of group; the loss is divided by a constant and not by the response's length."""

    credit = _CentredCredit
