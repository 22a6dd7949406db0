"""Running statistics of observations, by which policies normalise them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ObservationNormalizer(torch.nn.Module):
    """Running mean and variance of observations, applied as (x − mean) / std, clipped to ±clip.

    The statistics are combined by the parallel algorithm of Chan, Golub and LeVeque (1979) in
    float64. ``mean`` and ``scale`` are what the forward pass uses; all buffers are persistent and
    therefore travel with the weights.

    Args:
        dim: D.
        clip: Bound of the result.
        epsilon: Added to the variance.
        task_sections: Of several simulators, whose states have nothing to do with each other: which
            of them each task is of. Each has statistics of its own, [sections, D], in which its
            padding is 0 and remains 0; empty for one.
    """

    mean: Tensor
    scale: Tensor
    running_mean: Tensor
    running_variance: Tensor
    count: Tensor
    section_of_task: Tensor

    def __init__(
        self,
        dim: int,
        *,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        task_sections: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        each = (max(task_sections) + 1,) if task_sections else ()
        self.register_buffer("mean", torch.zeros(*each, dim))
        self.register_buffer("scale", torch.ones(*each, dim))
        self.register_buffer("running_mean", torch.zeros(*each, dim, dtype=torch.float64))
        self.register_buffer("running_variance", torch.ones(*each, dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(each, dtype=torch.float64))
        of_task = torch.tensor(task_sections, dtype=torch.int64)
        self.register_buffer("section_of_task", of_task, persistent=False)

    def _sections(self, task_ids: Tensor | None) -> Tensor | None:
        """[B] the simulator of each row; None where there is one."""
        if not len(self.section_of_task):
            return None
        if task_ids is None:
            raise ValueError("of several simulators, task_ids must say which one a row is of")
        return self.section_of_task[task_ids]

    def forward(self, observations: Tensor, task_ids: Tensor | None = None) -> Tensor:
        """[B, D] to [B, D]; with several simulators, the tasks [B] of the rows say of which."""
        mean, scale, section = self.mean, self.scale, self._sections(task_ids)
        if section is not None:
            mean, scale = mean[section], scale[section]
        return torch.sub(observations, mean).mul_(scale).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, observations: Tensor, task_ids: Tensor | None = None) -> None:
        """Take [N, D] observations, of the tasks [N], into the statistics."""
        section = self._sections(task_ids)
        if section is None:
            self._take(observations, ...)
            return
        for number in range(len(self.count)):
            self._take(observations[section == number], number)

    def _take(self, observations: Tensor, section: Any) -> None:
        if not len(observations):
            return
        batch = observations.to(torch.float64)
        variance, mean = torch.var_mean(batch, dim=0, correction=0)
        total = self.count[section] + len(batch)
        delta = mean - self.running_mean[section]
        weight = len(batch) / total
        self.running_variance[section].mul_(1 - weight).add_(
            variance * weight + delta.square() * (weight * (1 - weight))
        )
        self.running_mean[section].add_(delta * weight)
        self.count[section].copy_(total)
        self.mean[section].copy_(self.running_mean[section])
        self.scale[section].copy_((self.running_variance[section] + self.epsilon).rsqrt())
