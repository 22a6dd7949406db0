"""AdamW over tensors, which may be vectors of many parameters or the local parts of larger ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rlinf.trainers.config import OptimizerConfig


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) by torch's functional form.

    It works on each number by itself, so a rank can step its part of a tensor alone. Torch's class
    of that name imports the compiler on the first step, which costs a second and 65 MB per process,
    and twice the time of every step of a small network. With ``blank`` the moments are going to be
    set, and need not be 0.

    Attributes:
        steps: Steps that were applied.
        averages: First moments.
        squares: Second moments.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        config: OptimizerConfig,
        *,
        rates: Sequence[float],
        blank: bool = False,
    ) -> None:
        self.config = config
        self._tensors, self._rates = list(tensors), list(rates)
        self.steps = 0
        make = torch.empty_like if blank else torch.zeros_like
        self.averages = [make(tensor) for tensor in self._tensors]
        self.squares = [make(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], *, factor: float) -> None:
        """Apply one gradient per tensor at ``factor`` times the learning rates."""
        config = self.config
        for rate in dict.fromkeys(self._rates):
            used = [
                number
                for number, tensor in enumerate(self._tensors)
                if self._rates[number] == rate and tensor.numel()
            ]
            if not used:
                continue
            weights, summed, averages, squares = (
                [column[number] for number in used]
                for column in (self._tensors, gradients, self.averages, self.squares)
            )
            adamw(
                weights,
                summed,
                averages,
                squares,
                [],
                [torch.tensor(float(self.steps), device=weights[0].device) for _ in used],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=rate * factor,
                weight_decay=config.weight_decay,
                eps=config.eps,
                maximize=False,
            )
        self.steps += 1


def learning_rates(
    module: nn.Module, named: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> dict[str, float]:
    """The rate of each trained parameter, by name: ``config.value_lr`` of those that the module,
    a :class:`~rlinf.models.policy.Policy`, names as ``value_parameters``."""
    of_values = getattr(module, "value_parameters", None)
    values: set[int] = set()
    if config.value_lr is not None and of_values is not None:
        values = {id(parameter) for parameter in of_values()}
    return {
        name: config.value_lr if config.value_lr and id(parameter) in values else config.lr
        for name, parameter in named.items()
    }
