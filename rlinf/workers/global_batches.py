"""The global batches of a training step, each as soon as it is known which groups are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf.data.sequences import PromptGroup
from rlinf.flow.stream import InputStream


@dataclass(frozen=True)
class LengthBounds:
    """What the longest answer of some groups that are not complete has at least.

    Pairs of a position and tokens: as keys, checkpoints keep no whole numbers.
    """

    bounds: tuple[tuple[int, int], ...]


def complete_batches(
    arrived: Mapping[int, int], bounds: Mapping[int, int], size: int
) -> list[list[int]]:
    """The global batches whose members are known: groups by their longest answer, shortest first.

    Which group is in which batch is a function of lengths alone: not of who was faster, or where it
    was generated. Where all lengths are given as equal, it is the order of the positions.

    Args:
        arrived: Longest answer of each group that is complete, by position.
        bounds: What the longest answer of each other group has at least, by position.
        size: Groups of a global batch.
    """
    open_from = min(((bound, position) for position, bound in bounds.items()), default=None)
    order = sorted((longest, position) for position, longest in arrived.items())
    known = [
        position for key in order if open_from is None or key < open_from for position in [key[1]]
    ]
    return [known[first : first + size] for first in range(0, len(known) - size + 1, size)]


class GlobalBatches:
    """Scored groups as global batches; the same ones wherever and whenever groups are generated.

    Args:
        stream: Groups, the source of each its position, and :class:`LengthBounds` of those to come.
        positions: Groups of the step.
        size: Groups of a global batch.
        by_length: Whether those with the shortest longest answers come first; else by position.
    """

    def __init__(self, stream: InputStream, *, positions: int, size: int, by_length: bool) -> None:
        self._stream, self._size, self._by_length = stream, size, by_length
        self._bounds = dict.fromkeys(range(positions), 0)
        self._longest: dict[int, int] = {}
        self._groups: dict[int, PromptGroup] = {}
        self._count = positions // size

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[PromptGroup]]:
        return (self.batch(number) for number in range(self._count))

    def _take(self, item: Any) -> None:
        if isinstance(item.payload, LengthBounds):
            for position, bound in item.payload.bounds:
                if position in self._bounds:
                    self._bounds[position] = max(self._bounds[position], bound)
            return
        longest = max(len(completion) for completion in item.payload.completions)
        self._groups[item.source] = item.payload
        self._longest[item.source] = longest if self._by_length else 0
        self._bounds.pop(item.source)

    def receive(self) -> None:
        """Take in what has arrived; raises where the step was aborted."""
        while self._stream.ready():
            self._take(next(self._stream))

    def known(self) -> int:
        """How many batches are complete now."""
        self.receive()
        return len(complete_batches(self._longest, self._bounds, self._size))

    def batch(self, number: int) -> list[PromptGroup]:
        """A global batch, once its members are known."""
        while True:
            found = complete_batches(self._longest, self._bounds, self._size)
            if len(found) > number:
                return [self._groups[position] for position in found[number]]
            self._take(next(self._stream))

    def groups(self) -> list[PromptGroup]:
        """The groups of all positions in their order, also of a phase that trained on none."""
        while self._bounds:
            self._take(next(self._stream))
        return [self._groups[position] for position in sorted(self._groups)]


class TrainingHook(Protocol):
    """Lets other ranks of a trainer take part in one global batch than in another."""

    @property
    def has_part(self) -> bool:
        """Whether this rank has a part of the model now."""

    def attach(self, trainer: Any) -> None:
        """Remember this rank's trainer, which was built on one rank."""

    def train(
        self,
        batches: GlobalBatches,
        prepare: Callable[[list[PromptGroup]], Any],
        *,
        step: int,
        shared: Any,
    ) -> dict[str, Any] | None:
        """Train on the batches of a phase, each with some ranks; rank 0 returns its metrics.

        ``prepare`` makes of groups a batch with everything that the loss needs.
        """

    def close(self) -> None:
        """Leave the other ranks."""
