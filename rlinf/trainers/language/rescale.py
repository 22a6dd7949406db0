"""Moves weights and moments of a model between numbers of ranks, in memory.

A parameter [n, …] is divided by rows as FSDP2 does: rank r of w has rows r·⌈n/w⌉ up to (r+1)·⌈n/w⌉.
A move sends each row from the rank that had it to the one that is to have it, and nothing twice.
The former layout stays as it is until the new one is complete, so that a move which fails is undone
by forgetting the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.trainers.language.config import ComputeConfig
from rlinf.trainers.language.core import SequenceCore, repeated_layers
from rlinf.trainers.language.parallel import Grid
from rlinf.trainers.language.trained import PlainModule, Source, TrainedModule

_WIRE = torch.float32
"""What travels; lossless for weights in bfloat16, of which some layouts keep float32 copies."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` that go from one rank to another, or stay."""

    source: int
    target: int
    start: int
    stop: int


def rows_of(rows: int, size: int, rank: int) -> range:
    """Rows of a parameter that a rank has.

    Args:
        rows: Of the whole parameter.
        size: Ranks that divide it.
        rank: One of them; beyond ``size`` it has none.
    """
    if rank >= size:
        return range(0)
    step = -(-rows // size)
    return range(min(rank * step, rows), min((rank + 1) * step, rows))


def pieces(rows: int, before: int, after: int) -> list[Piece]:
    """What goes where when the ranks that divide some rows become others.

    Args:
        rows: Of the whole parameter.
        before: Ranks that divide it, from 0 on.
        after: Ranks that are to divide it.
    """
    found = []
    for source in range(before):
        has = rows_of(rows, before, source)
        for target in range(after):
            wants = rows_of(rows, after, target)
            start, stop = max(has.start, wants.start), min(has.stop, wants.stop)
            if start < stop:
                found.append(Piece(source, target, start, stop))
    return found


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
            _give_memory(module, ranks.device)
            return PlainModule(module, config, blank=True)
        from rlinf.trainers.language.sharded import ShardedModule

        return ShardedModule(module, repeated_layers(module.model), config, ranks)


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Parameters on a device that cost nothing yet: every number of them is the same one."""
    one = torch.zeros((), device=device)
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            filled = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
            if not parameter.requires_grad:
                filled.data = torch.empty(parameter.shape, device=device)
            # A tied weight is one parameter in two places, and has to stay one.
            setattr(part, name, found.setdefault(id(parameter), filled))


class Transfer:
    """The tensors of one move on one rank.

    Args:
        before: The former layout; None on a rank that had no part.
        after: The new layout; None on a rank that is to have none.
        references: Copies of a reference policy's weights in either layout.
        sizes: Ranks before and after.
        rank: This rank.
    """

    def __init__(
        self,
        before: TrainedModule | None,
        after: TrainedModule | None,
        references: tuple[Source | None, Source | None],
        *,
        sizes: tuple[int, int],
        rank: int,
    ) -> None:
        self._sizes, self._rank = sizes, rank
        self._before = _parts(before, references[0]) if before is not None else {}
        self._after = _parts(after, references[1]) if after is not None else {}
        shapes = _shapes(after if before is None else before)
        self._widths = {name: shape[1:].numel() for name, shape in shapes.items()}
        self._exchanged = False
        kinds = self._before or self._after
        self._plan = {key: pieces(shapes[key[1]][0], *sizes) for key in kinds if key[1] in shapes}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank hands to others."""
        return sum(
            part.numel() * part.element_size()
            for key, piece in self._mine()
            if piece.source == self._rank != piece.target
            for part in [self._view(self._before, 0, key, piece)]
        )

    def _mine(self) -> Iterator[tuple[tuple[str, str], Piece]]:
        for key, found in self._plan.items():
            for piece in found:
                if self._rank in (piece.source, piece.target):
                    yield key, piece

    def _view(
        self, parts: Mapping[tuple[str, str], Tensor], side: int, key: tuple[str, str], piece: Piece
    ) -> Tensor:
        """The rows of a piece in this rank's part; shares its memory."""
        rows = self._whole_rows(key)
        first = rows_of(rows, self._sizes[side], self._rank).start
        return parts[key][piece.start - first : piece.stop - first]

    def _whole_rows(self, key: tuple[str, str]) -> int:
        return max(piece.stop for piece in self._plan[key])

    @torch.no_grad()
    def run(self, group: Any, device: torch.device) -> None:
        """Send, receive and copy everything; every rank of ``group`` calls it.

        Args:
            group: Process group of the ranks before and after.
            device: Where tensors lie that the group exchanges.

        Raises:
            RuntimeError: A connection was lost.
        """
        operations, arriving = [], []
        for key, piece in self._mine():
            if piece.source == piece.target:
                self._view(self._after, 1, key, piece).copy_(
                    self._view(self._before, 0, key, piece)
                )
            elif piece.source == self._rank:
                sent = self._view(self._before, 0, key, piece).to(device, _WIRE).contiguous()
                operations.append(dist.P2POp(dist.isend, sent, piece.target, group))
            else:
                target = self._view(self._after, 1, key, piece)
                taken = target
                if not _may_receive(target, device):
                    taken = torch.empty(target.shape, device=device, dtype=_WIRE)
                    arriving.append((target, taken))
                operations.append(dist.P2POp(dist.irecv, taken, piece.source, group))
        self._exchange(operations)
        for target, taken in arriving:
            target.copy_(taken)

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        self._exchanged = True
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def exchange_nothing(self, group: Any, device: torch.device) -> None:
        """Let the others come to their end where :meth:`run` failed on this rank.

        They receive what means nothing, and learn afterwards that it does.
        """
        if self._exchanged:
            return  # what failed is the exchange itself: the connection is lost for all
        sizes = [
            (piece, (piece.stop - piece.start) * self._row(key))
            for key, piece in self._mine()
            if piece.source != piece.target
        ]
        scratch = torch.zeros(max((size for _, size in sizes), default=0), device=device)
        self._exchange(
            [
                dist.P2POp(dist.isend, scratch[:size], piece.target, group)
                if piece.source == self._rank
                else dist.P2POp(dist.irecv, scratch[:size], piece.source, group)
                for piece, size in sizes
            ]
        )

    def _row(self, key: tuple[str, str]) -> int:
        """Numbers in a row."""
        return self._widths[key[1]]


def _may_receive(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.dtype == _WIRE and tensor.is_contiguous()


def _parts(trained: TrainedModule, reference: Source | None) -> dict[tuple[str, str], Tensor]:
    """This rank's rows of everything that training goes on from, by kind and parameter."""
    found = {
        (kind, name): part
        for kind, source in trained.sources().items()
        for name, part in _by_name(trained, source)
    }
    for name, parameter in trained.module.named_parameters():
        if not parameter.requires_grad:
            found["frozen", name] = _local(parameter.detach())
    for name, part in _by_name(trained, reference) if reference else ():
        found["reference", name] = part
    return found


def _by_name(trained: TrainedModule, source: Source) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of each parameter in a source; they share its memory."""
    if isinstance(trained, PlainModule):
        for name in trained.named:
            yield name, trained.part(name, source)
    else:
        yield from zip(trained.named, source, strict=True)


def _shapes(trained: TrainedModule | None) -> dict[str, torch.Size]:
    assert trained is not None
    return {name: parameter.shape for name, parameter in trained.module.named_parameters()}


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass
class Prepared:
    """A layout that was made and is not in use yet."""

    trained: TrainedModule | None
    reference: Source | None
    ranks: Grid | None
    transfer: Transfer


class Rescalable:
    """What policy and critic share to change the number of their ranks; a base of both.

    A rank that has no part of the model keeps its skeleton alone, and computes nothing.
    """

    _core: SequenceCore
    _ranks: Grid
    _reference: Source | None = None
    _skeleton: Skeleton | None = None

    def _moving_numbers(self) -> dict[str, Any]:
        """Small state that goes to ranks which join."""
        raise NotImplementedError

    def _load_moving_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from :meth:`_moving_numbers`."""
        raise NotImplementedError

    def _adopted(self) -> None:
        """Called when another layout is in use."""

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

    @property
    def _keeps_reference(self) -> bool:
        """Whether weights of a reference policy are kept beside those that are trained."""
        return False

    def finish_move(self, prepared: Prepared, numbers: Mapping[str, Any] | None) -> None:
        """Go on with a layout whose transfer is over; the former one is given up.

        Args:
            prepared: From :meth:`prepare_move`.
            numbers: From :meth:`_moving_numbers` of a rank that had a part, where this one joins.
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


def forget_group(group: Any) -> None:
    """Leave a process group, also one whose peers are gone."""
    with suppress(Exception):  # what broke it is told elsewhere
        dist.destroy_process_group(group)
