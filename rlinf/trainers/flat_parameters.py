"""Parameters laid out one after the other in memory, so that an update is a few calls.

A small network has a dozen parameters of a few thousand numbers. What an optimizer does to each of
them costs more in calls than in arithmetic; one vector costs one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatParameters:
    """Views of one vector take the place of parameters.

    Args:
        groups: Parameters by optimizer group; all of one dtype and device. Their values stay.

    Attributes:
        parameters: All of them, in order.
        vectors: The parameters of each group as one vector.
    """

    def __init__(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self.parameters = [parameter for group in groups for parameter in group]
        whole = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self._sizes = [sum(parameter.numel() for parameter in group) for group in groups]
        self.vectors = self.by_group(whole)
        places = torch.split(whole, [parameter.numel() for parameter in self.parameters])
        for parameter, place in zip(self.parameters, places, strict=True):
            parameter.data = place.view_as(parameter)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradient of a scalar as one vector [P], 0 for what it does not depend on."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for p, g in zip(self.parameters, gradients, strict=True)
            ]
        )

    def by_group(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The part of each group of a vector [P], as views."""
        return torch.split(vector, self._sizes)
