"""How old the weights were that made the data of a training phase."""

from __future__ import annotations

import torch
from torch import Tensor


def staleness_metrics(staleness: Tensor) -> dict[str, float]:
    """Mean and largest staleness, and the share of each value that occurs.

    Args:
        staleness: [N] int64 of samples or tokens: training phases between the weights that made
            them and those that the phase began with.
    """
    if not staleness.numel():
        return {}
    values, counts = torch.unique(staleness, return_counts=True)
    metrics = {
        f"rollout/staleness_share/{value}": count / staleness.numel()
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }
    metrics["rollout/staleness"] = staleness.double().mean().item()
    metrics["rollout/staleness_max"] = float(values[-1])
    return metrics
