"""Parameters laid out one after the other in memory, so that an update is a few calls.

A small network has a dozen parameters of a few thousand numbers. What an optimizer does to each of
them costs more in calls than in arithmetic; one vector costs one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatParameters:
    """Views of one vector take the place of parameters; the optimizer works on pieces of it.

    Args:
        groups: Parameters by optimizer group; all of one dtype and device. Their values stay.
    """

    def __init__(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self.parameters = [parameter for group in groups for parameter in group]
        vector = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        sizes = [sum(parameter.numel() for parameter in group) for group in groups]
        self.pieces = [torch.nn.Parameter(piece) for piece in torch.split(vector, sizes)]
        places = torch.split(vector, [parameter.numel() for parameter in self.parameters])
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

    def set_gradient(self, gradient: torch.Tensor) -> None:
        """Give every piece its part of a gradient [P]."""
        parts = torch.split(gradient, [piece.numel() for piece in self.pieces])
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.grad = part
