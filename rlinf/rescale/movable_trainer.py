"""A trainer whose model moves to another number of ranks, between two optimizer steps.

The former division of the model stays as it is until the new one is complete, so that a move which
fails is undone by forgetting the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlinf.rescale.transfer import Transfer
from rlinf.trainers.modules import POLICY, TrainedModules
from rlinf.trainers.ranks import Grid
from rlinf.trainers.sharded import replace_parameters
from rlinf.trainers.trained import Source, TrainedModule
from rlinf.trainers.trainer import Trainer


class Skeleton:
    """The structure of a whole scoring module: buffers, but no weights."""

    def __init__(self, module: nn.Module) -> None:
        empty: dict[int, Any] = {
            id(given): nn.Parameter(torch.empty(given.shape, device="meta"), given.requires_grad)
            for given in module.parameters()
        }
        self._module = copy.deepcopy(module, empty)

    def build(self, modules: TrainedModules, ranks: Grid) -> TrainedModule:
        """The policy with memory for this rank's part of the weights, whose contents are unset."""
        module: Any = copy.deepcopy(self._module)
        if ranks.world_size == 1:
            _give_placeholders(module, ranks.device)
        return modules.hold(POLICY, module, ranks, blank=True)


def _give_placeholders(module: nn.Module, device: torch.device) -> None:
    """Parameters on a device that cost nothing yet: every number of them is the same one."""
    one = torch.zeros((), device=device)

    def placeholder(parameter: nn.Parameter) -> nn.Parameter:
        filled = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
        if not parameter.requires_grad:
            filled.data = torch.empty(parameter.shape, device=device)
        return filled

    replace_parameters(module, placeholder)


@dataclass
class Prepared:
    """A division of the model over ranks that was made and is not in use yet."""

    trained: TrainedModule | None
    reference: Source | None
    ranks: Grid | None
    transfer: Transfer


class MovableTrainer:
    """One rank's trainer, with or without a part of the model.

    A rank that has no part keeps the skeleton of the model alone, and computes nothing.

    Args:
        trainer: Built with the whole model on one rank.
        keep: Go on with the weights; otherwise this rank has no part until it joins.
    """

    def __init__(self, trainer: Trainer, *, keep: bool) -> None:
        trained, reference = trainer.parts
        if trained is None:
            raise ValueError("the trainer has no part of the model")
        self.trainer = trainer
        self._skeleton = Skeleton(trained.module)
        if not keep:
            trainer.adopt(None, reference and [], None, None)

    @property
    def has_part(self) -> bool:
        """Whether this rank has a part of the model."""
        return self.trainer.parts[0] is not None

    def numbers(self) -> dict[str, Any]:
        """Small state that goes to ranks which join."""
        return self.trainer.numbers_to_join()

    def prepare(self, *, before: int, after: int, rank: int, ranks: Grid | None) -> Prepared:
        """Divide the model over ``after`` ranks, beside its present division over ``before``.

        ``ranks`` are the new ones; None where this one is not among them.
        """
        keeps, (trained, present) = self.trainer.keeps_reference, self.trainer.parts
        old = trained if rank < before else None
        new: TrainedModule | None = None
        reference: Source | None = [] if keeps else None
        if ranks is not None:
            new = self._skeleton.build(self.trainer.modules, ranks)
            if keeps:
                reference = [torch.empty_like(t, device="cpu") for t in new.used()]
        transfer = Transfer(old, new, (present, reference), sizes=(before, after), rank=rank)
        return Prepared(new, reference if keeps else present, ranks, transfer)

    def finish(self, prepared: Prepared, numbers: Mapping[str, Any] | None) -> None:
        """Go on with a division whose transfer is over; the former one is given up.

        ``numbers`` are those of a rank that had a part, where this one joins.
        """
        self.trainer.adopt(prepared.trained, prepared.reference, prepared.ranks, numbers)
