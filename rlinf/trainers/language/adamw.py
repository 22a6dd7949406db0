"""AdamW over lists of tensors, which may be the local parts of larger ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlinf.trainers.config import OptimizerConfig


class ListAdamW:
    """AdamW (Loshchilov and Hutter 2019) by torch's functional form.

    It works on each number by itself, so a rank can step its part of a tensor alone.

    Args:
        tensors: What is trained, float32.
        config: Rates and moments.
        blank: The moments are going to be set, and need not be 0.

    Attributes:
        config: The same.
        steps: Steps that were applied.
        averages: First moments.
        squares: Second moments.
    """

    def __init__(
        self, tensors: Sequence[Tensor], config: OptimizerConfig, *, blank: bool = False
    ) -> None:
        self.config = config
        self._tensors = list(tensors)
        self.steps = 0
        make = torch.empty_like if blank else torch.zeros_like
        self.averages = [make(tensor) for tensor in self._tensors]
        self.squares = [make(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], *, factor: float) -> None:
        """Apply one gradient per tensor at ``factor`` times the learning rate."""
        config = self.config
        used = [number for number, tensor in enumerate(self._tensors) if tensor.numel()]
        if used:
            device = self._tensors[used[0]].device
            adamw(
                [self._tensors[number] for number in used],
                [gradients[number] for number in used],
                [self.averages[number] for number in used],
                [self.squares[number] for number in used],
                [],
                [torch.tensor(float(self.steps), device=device) for _ in used],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=config.lr * factor,
                weight_decay=config.weight_decay,
                eps=config.eps,
                maximize=False,
            )
        self.steps += 1
