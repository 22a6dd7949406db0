"""A trainer whose model moves to another number of ranks, between two optimizer steps, in memory.

The former division of the model stays as it is until the new one is complete, so that a move which
fails is undone by forgetting the new one. A parameter [n, …] is divided by rows as FSDP2 does: rank
r of w has rows r·⌈n/w⌉ up to (r+1)·⌈n/w⌉; a move sends each row from the rank that had it to the
one that is to have it, and nothing twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf.scheduler.accelerators import AcceleratorUtil
from rlinf.trainers.modules import POLICY, TrainedModules
from rlinf.trainers.ranks import Grid
from rlinf.trainers.sharded import replace_parameters
from rlinf.trainers.trained import PlainModule, Source, TrainedModule, local_part
from rlinf.trainers.trainer import Trainer

_WIRE = torch.float32
"""What travels; lossless for weights in bfloat16, which several ranks keep float32 copies of."""
_TOGETHER = 2**18
"""Most numbers of pieces that travel in one message: a message costs as much as some copying."""


Key = tuple[str, str]
"""What kind of tensor, and of which parameter."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` that go from one rank to another, or stay."""

    source: int
    target: int
    start: int
    stop: int


def rows_of(rows: int, size: int, rank: int) -> range:
    """Which of the rows of a parameter a rank has of ``size`` that divide it; others have none."""
    if rank >= size:
        return range(0)
    step = -(-rows // size)
    return range(min(rank * step, rows), min((rank + 1) * step, rows))


def pieces(rows: int, before: int, after: int) -> list[Piece]:
    """What goes where when some rows, divided by ranks 0 to ``before``, are to be by ``after``."""
    found = []
    for source in range(before):
        has = rows_of(rows, before, source)
        for target in range(after):
            wants = rows_of(rows, after, target)
            start, stop = max(has.start, wants.start), min(has.stop, wants.stop)
            if start < stop:
                found.append(Piece(source, target, start, stop))
    return found


@dataclass
class _Message:
    """Pieces that travel together, one behind the other."""

    source: int
    target: int
    pieces: list[tuple[Key, Piece]] = field(default_factory=list)
    numbers: int = 0


class Transfer:
    """The tensors of one move on one rank.

    Args:
        before: The former division of the model; None on a rank that had no part.
        after: The new one; None on a rank that is to have none.
        references: Copies of a reference policy's weights in either.
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
        self._sides = [
            {} if trained is None else _parts(trained, reference)
            for trained, reference in zip((before, after), references, strict=True)
        ]
        shapes = _shapes(after if before is None else before)
        # Numbers in a row of each parameter.
        self._widths = {name: shape[1:].numel() for name, shape in shapes.items()}
        self._exchanged = False
        kinds = self._sides[0] or self._sides[1]
        self._plan = {key: pieces(shapes[key[1]][0], *sizes) for key in kinds if key[1] in shapes}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank hands to others, in the type that travels."""
        return sum(
            (piece.stop - piece.start) * self._widths[key[1]] * _WIRE.itemsize
            for key, piece in self._mine()
            if piece.source == self._rank != piece.target
        )

    def _mine(self) -> Iterator[tuple[Key, Piece]]:
        for key, found in self._plan.items():
            for piece in found:
                if self._rank in (piece.source, piece.target):
                    yield key, piece

    def _view(self, side: int, key: Key, piece: Piece) -> Tensor:
        """The rows of a piece in this rank's part, before (0) or after (1); shares its memory."""
        rows = max(each.stop for each in self._plan[key])
        first = rows_of(rows, self._sizes[side], self._rank).start
        return self._sides[side][key][piece.start - first : piece.stop - first]

    def _messages(self) -> list[_Message]:
        """What this rank sends and receives; both sides of a way find the same, in one order."""
        found: list[_Message] = []
        filling: dict[tuple[int, int], _Message] = {}
        for key, piece in self._mine():
            way = piece.source, piece.target
            if piece.source == piece.target:
                continue
            numbers = (piece.stop - piece.start) * self._widths[key[1]]
            message = filling.get(way)
            if message is None or message.numbers + numbers > _TOGETHER:
                message = _Message(*way)
                found.append(message)
                if numbers <= _TOGETHER:
                    filling[way] = message
            message.pieces.append((key, piece))
            message.numbers += numbers
        return found

    @torch.no_grad()
    def run(self, group: Any, device: torch.device) -> None:
        """Send, receive and copy everything; every rank before and after calls it.

        ``device`` is where tensors lie that the group exchanges.
        """
        for key, piece in self._mine():
            if piece.source == piece.target:
                self._view(1, key, piece).copy_(self._view(0, key, piece))
        operations, arriving = [], []
        for message in self._messages():
            if message.source == self._rank:
                views = [self._view(0, *each) for each in message.pieces]
                flat = [view.to(device, _WIRE).flatten() for view in views]
                sent = flat[0] if len(flat) == 1 else torch.cat(flat)
                operations.append(dist.P2POp(dist.isend, sent, message.target, group))
                continue
            targets = [self._view(1, *each) for each in message.pieces]
            first, *more = targets
            taken = first
            direct = first.device == device and first.dtype == _WIRE and first.is_contiguous()
            if more or not direct:
                taken = torch.empty(message.numbers, device=device, dtype=_WIRE)
                arriving.append((targets, taken))
            operations.append(dist.P2POp(dist.irecv, taken, message.source, group))
        self._exchange(operations)
        for targets, taken in arriving:
            parts = torch.split(taken, [target.numel() for target in targets])
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part.view(target.shape))
        if device.type != "cpu":  # there a wait orders what follows, and says of no failure yet
            torch.get_device_module(device).synchronize()

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
        messages = self._messages()
        scratch = torch.zeros(max((m.numbers for m in messages), default=0), device=device)
        self._exchange(
            [
                dist.P2POp(dist.isend, scratch[: message.numbers], message.target, group)
                if message.source == self._rank
                else dist.P2POp(dist.irecv, scratch[: message.numbers], message.source, group)
                for message in messages
            ]
        )


def _parts(trained: TrainedModule, reference: Source | None) -> dict[Key, Tensor]:
    """This rank's rows of everything that training goes on from, by kind and parameter."""
    found = {
        (kind, name): part
        for kind, source in trained.sources().items()
        for name, part in _by_name(trained, source)
    }
    for name, parameter in trained.module.named_parameters():
        if not parameter.requires_grad:
            found["frozen", name] = local_part(parameter)
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
    """One rank's trainer, with or without a part of the model, built with the whole on one rank.

    A rank that has no part keeps the skeleton of the model alone, and computes nothing; without
    ``keep`` this is one until it joins.
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
        AcceleratorUtil.empty_cache(self.trainer.modules.ranks.device)
