"""AdamW over tensors, which may be vectors of many parameters or the local parts of larger ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import EllipsisType

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rlinf.trainers.config import OptimizerConfig

Place = tuple[int, slice | EllipsisType]
"""Number of a tensor that is trained, and where in it a parameter lies."""


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) by torch's functional form.

    It works on each number by itself, so a rank can step its part of a tensor alone. Torch's class
    of that name imports the compiler on the first step, which costs a second and 65 MB per process,
    and twice the time of every step of a small network. With ``blank`` the moments are going to be
    set, and need not be 0.

    A step may be one of the values alone. What is not stepped keeps its moments and its own count
    of steps: with gradients of 0 in its place the correction of the moments' bias would be used up
    by the time that it is trained, and its weights would decay.

    Args:
        tensors: What is stepped, in place.
        config: All but the learning rates.
        rates: Of each tensor.
        values: Places of the parameters that only values depend on.
        rest: Of all others.
        blank: See above.

    Attributes:
        steps: Steps that were applied.
        values_alone: Those of them that left the rest as it was.
        averages: First moments.
        squares: Second moments.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        config: OptimizerConfig,
        *,
        rates: Sequence[float],
        values: Collection[Place] = (),
        rest: Collection[Place] = (),
        blank: bool = False,
    ) -> None:
        self.config = config
        self._tensors, self._rates = list(tensors), list(rates)
        self._values, self._rest = values, rest
        self.steps = self.values_alone = 0
        make = torch.empty_like if blank else torch.zeros_like
        self.averages = [make(tensor) for tensor in self._tensors]
        self.squares = [make(tensor) for tensor in self._tensors]

    def step(
        self, gradients: Sequence[Tensor], *, factor: float, values_alone: bool = False
    ) -> None:
        """Apply one gradient per tensor at ``factor`` times the learning rates, or that of the
        values in it."""
        if values_alone:
            self._apply(gradients, self._values, self.steps, factor)
            self.values_alone += 1
        elif self.values_alone:
            self._apply(gradients, self._values, self.steps, factor)
            self._apply(gradients, self._rest, self.steps - self.values_alone, factor)
        else:
            # Few long vectors, which are stepped sooner than the parameters in them.
            whole: list[Place] = [(number, ...) for number in range(len(self._tensors))]
            self._apply(gradients, whole, self.steps, factor)
        self.steps += 1

    @torch.no_grad()
    def _apply(
        self, gradients: Sequence[Tensor], places: Collection[Place], steps: int, factor: float
    ) -> None:
        """One more step of what had so many."""
        config = self.config
        for rate in dict.fromkeys(self._rates):
            used = [
                (number, place)
                for number, place in places
                if self._rates[number] == rate and self._tensors[number][place].numel()
            ]
            if not used:
                continue
            weights, summed, averages, squares = (
                [column[number][place] for number, place in used]
                for column in (self._tensors, gradients, self.averages, self.squares)
            )
            adamw(
                weights,
                summed,
                averages,
                squares,
                [],
                [torch.tensor(float(steps), device=weights[0].device) for _ in used],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=rate * factor,
                weight_decay=config.weight_decay,
                eps=config.eps,
                maximize=False,
            )


def value_names(module: nn.Module, named: Mapping[str, nn.Parameter]) -> set[str]:
    """Those of the parameters that the module, a :class:`~rlinf.models.policy.Policy`, names as
    ``value_parameters``; none of another module."""
    of_values = getattr(module, "value_parameters", tuple)
    values = {id(parameter) for parameter in of_values()}
    return {name for name, parameter in named.items() if id(parameter) in values}


def learning_rates(
    module: nn.Module, named: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> dict[str, float]:
    """The rate of each trained parameter, by name: ``config.value_lr`` of :func:`value_names`."""
    values = value_names(module, named)
    value_lr = config.lr if config.value_lr is None else config.value_lr
    return {name: value_lr if name in values else config.lr for name in named}
