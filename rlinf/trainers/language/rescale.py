"""Another number of ranks for a trainer, between two optimizer steps.

The former layout stays as it is until the new one is complete, so that a move which fails is undone
by forgetting the new one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rlinf.trainers.language.config import ComputeConfig
from rlinf.trainers.language.core import SequenceCore, repeated_layers
from rlinf.trainers.language.hollow import replace_parameters
from rlinf.trainers.language.parallel import Grid
from rlinf.trainers.language.trained import PlainModule, Source, TrainedModule
from rlinf.trainers.language.transfer import Transfer


class Skeleton:
    """The structure of a scoring module: buffers, but no weights.

    Args:
        module: It is not changed, and is to be whole.
    """

    def __init__(self, module: nn.Module) -> None:
        hollow = {
            id(parameter): nn.Parameter(
                torch.empty(parameter.shape, device="meta"), requires_grad=parameter.requires_grad
            )
            for parameter in module.parameters()
        }
        self._module = copy.deepcopy(module, cast(dict[int, Any], hollow))

    def build(self, config: ComputeConfig, ranks: Grid) -> TrainedModule:
        """A module with memory for this rank's part of the weights, whose contents are not set."""
        module: Any = copy.deepcopy(self._module)
        if ranks.world_size == 1:
            _give_placeholders(module, ranks.device)
            return PlainModule(module, config, blank=True)
        from rlinf.trainers.language.sharded import ShardedModule

        return ShardedModule(module, repeated_layers(module.model), config, ranks)


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
    """A layout that was made and is not in use yet."""

    trained: TrainedModule | None
    reference: Source | None
    ranks: Grid | None
    transfer: Transfer


class Rescalable(ABC):
    """A trainer the number of whose ranks can change.

    A rank that has no part of the model keeps its skeleton alone, and computes nothing.
    """

    _core: SequenceCore
    _ranks: Grid
    _reference: Source | None
    _skeleton: Skeleton | None = None

    @abstractmethod
    def moving_numbers(self) -> dict[str, Any]:
        """Small state that goes to ranks which join, ``steps`` of the optimizer among it."""

    @abstractmethod
    def _load_moving_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from :meth:`moving_numbers`."""

    @abstractmethod
    def _adopted(self) -> None:
        """Called when another layout is in use."""

    @property
    @abstractmethod
    def _keeps_reference(self) -> bool:
        """Whether weights of a reference policy are kept beside those that are trained."""

    @property
    def has_part(self) -> bool:
        """Whether this rank has a part of the model."""
        return self._core.trained is not None

    def make_movable(self, *, keep: bool) -> None:
        """Remember the structure of the model, which lies whole on this rank.

        Args:
            keep: Go on with the weights; otherwise this rank has no part until it joins.
        """
        import rlinf.trainers.language.sharded  # noqa: F401 - half a second less for the first move

        self._skeleton = Skeleton(self._core.trained.module)
        if not keep:
            self._core.trained = cast(TrainedModule, None)
            self._reference = self._reference and []
            self._adopted()

    def prepare_move(self, *, before: int, after: int, rank: int, ranks: Grid | None) -> Prepared:
        """Make the layout of another number of ranks beside the present one.

        Args:
            before: Ranks that divide the model now.
            after: Ranks that are to.
            rank: This rank.
            ranks: The new ranks; None where this one is not among them.
        """
        if self._skeleton is None:
            raise RuntimeError("make_movable was not called")
        old = self._core.trained if rank < before else None
        new, reference = None, None
        if ranks is not None:
            new = self._skeleton.build(self._core.config, ranks)
            if self._keeps_reference:
                reference = [torch.empty_like(t, device="cpu") for t in new.used()]
        elif self._keeps_reference:
            reference = []
        transfer = Transfer(
            old, new, (self._reference, reference), sizes=(before, after), rank=rank
        )
        return Prepared(new, reference, ranks, transfer)

    def finish_move(self, prepared: Prepared, numbers: Mapping[str, Any] | None) -> None:
        """Go on with a layout whose transfer is over; the former one is given up.

        Args:
            prepared: From :meth:`prepare_move`.
            numbers: From :meth:`moving_numbers` of a rank that had a part, where this one joins.
        """
        steps = self._core.trained.optimizer.steps if self.has_part else 0
        self._core.trained = cast(TrainedModule, prepared.trained)
        if self._keeps_reference:
            self._reference = prepared.reference
        if prepared.trained is None or prepared.ranks is None:
            self._adopted()
            return
        self._core.ranks = self._ranks = prepared.ranks
        if numbers is not None:
            self._load_moving_numbers(numbers)
            steps = int(numbers["steps"])
        prepared.trained.optimizer.steps = steps
        prepared.trained.changed()
        self._adopted()
