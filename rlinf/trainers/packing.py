"""Which rows are computed together, on which rank. Every rank computes the same plan from the whole
batch, so nothing is communicated."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.supervised import demonstrations_of
from rlinf.trainers.config import SequenceConfig
from rlinf.trainers.forward_inputs import lengths_of, prompts_of, window_of

Parts = list[list[int]]
_Division = list[tuple[int, list[int]]]  # sums and indices of its parts that are not empty


class Rows:
    """How a batch becomes micro batches: rows of one size, in their order, in consecutive blocks
    over the ranks.

    Args:
        size: Rows of a micro batch; None: all of a rank.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size

    def plan(self, batch: Batch, ranks: int) -> list[Parts]:
        """The micro batches of each data-parallel rank, as indices of the rows of the whole batch;
        the same number for each rank."""
        shares = _blocks(len(batch), ranks)
        size = self._size or max(map(len, shares))
        plans = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]
        count = max(map(len, plans))
        return [plan + [[]] * (count - len(plan)) for plan in plans]

    def trained(self, batch: Batch) -> Batch:
        """The rows that a training step must read: all, as which micro batch a row is in must not
        depend on the others; none where nothing counts."""
        counted = (batch.mask > 0).any(dim=1)
        if batch.weights is not None:
            counted &= batch.weights > 0
        nothing = not bool(counted.any()) and demonstrations_of(batch) is None
        return batch.select(slice(0, 0)) if nothing else batch

    def place(self, batch: Batch, device: torch.device) -> Batch:
        """A micro batch where it is computed."""
        return batch.to(device)

    def tokens(self, batch: Batch) -> int | None:
        """Tokens that a forward pass on a micro batch reads; None where rows are no text."""
        del batch
        return None

    def micro_batches(self, batch: Batch, rank: int, ranks: int) -> list[tuple[list[int], Batch]]:
        """The rows of each micro batch of a rank; an empty one holds a row that counts nowhere."""
        mine = self.plan(batch, ranks)[rank]
        return [(indices, _select(batch, indices)) for indices in mine]


def _select(batch: Batch, indices: list[int]) -> Batch:
    """Consecutive rows stay views."""
    if indices:
        first, last = indices[0], indices[0] + len(indices)
        if indices != list(range(first, last)):
            return batch.select(torch.tensor(indices))
        return batch if len(indices) == len(batch) else batch.select(slice(first, last))
    filler = batch.select(slice(0, 1))
    weights = None if filler.weights is None else torch.zeros_like(filler.weights)
    return replace(filler, mask=torch.zeros_like(filler.mask), weights=weights)


def _blocks(rows: int, ranks: int) -> Parts:
    bounds = [rows * rank // ranks for rank in range(ranks + 1)]
    return [list(range(first, last)) for first, last in pairwise(bounds)]


class Sequences(Rows):
    """Token sequences, of which only those are read that count.

    Args:
        config: Bounds of a micro batch, and how sequences are divided over ranks.
    """

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__(config.micro_batch_size)
        self._config = config
        self._latest: tuple[tuple[Sequence[int], Sequence[int], int], list[Parts]] | None = None

    def plan(self, batch: Batch, ranks: int) -> list[Parts]:
        """See :meth:`Rows.plan`; kept, as a batch is scored several times before it is trained."""
        lengths, prompts = lengths_of(batch), prompts_of(batch)
        asked = lengths, prompts, ranks
        if self._latest is None or self._latest[0] != asked:
            plan = plan_micro_batches(lengths, prompts, ranks=ranks, config=self._config)
            self._latest = asked, plan
        return self._latest[1]

    def trained(self, batch: Batch) -> Batch:
        """Those of which a token counts."""
        rows = (batch.mask > 0).any(dim=1)
        return batch if bool(rows.all()) else batch.select(rows)

    def place(self, batch: Batch, device: torch.device) -> Batch:
        """Its tokens stay on the host, where they are packed."""
        return replace(batch.to(device), inputs=batch.inputs)

    def tokens(self, batch: Batch) -> int:
        """With the padding of a forward pass that has some."""
        lengths = lengths_of(batch)
        return sum(lengths) if self._config.packing else len(batch) * window_of(batch)


def balanced_parts(lengths: Sequence[int], parts: int, *, equal_count: bool) -> Parts:
    """Divide numbers [N] so that their sums differ little (Karmarkar and Karp 1982).

    The two divisions with the largest differences are merged, the largest part of one with the
    smallest of the other, until one is left. With ``equal_count`` the sizes of the parts differ by
    at most 1.

    Returns:
        Indices of each part, ascending; a part is empty where there are more parts than numbers.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    width = parts if equal_count else 1
    heap: list[tuple[int, int, _Division]] = []
    for number, first in enumerate(range(0, len(order), width)):
        division = [(lengths[index], [index]) for index in order[first : first + width]]
        heap.append((_difference(division, parts), number, division))
    heapq.heapify(heap)
    fresh = len(heap)
    while len(heap) > 1:
        merged = _merged(heapq.heappop(heap)[2], heapq.heappop(heap)[2], parts)
        heapq.heappush(heap, (_difference(merged, parts), fresh, merged))
        fresh += 1
    divided = [sorted(indices) for _, indices in heap[0][2]] if heap else []
    return divided + [[] for _ in range(parts - len(divided))]


def _difference(division: _Division, parts: int) -> int:
    """Of the smallest part to the largest; negative, so that a heap has the largest first."""
    smallest = division[-1][0] if len(division) == parts else 0
    return smallest - division[0][0]


def _merged(left: _Division, right: _Division, parts: int) -> _Division:
    """The largest part of one with the smallest of the other, of which the first may be empty."""
    rising = right[::-1]
    shared = max(0, len(left) + len(right) - parts)
    alone = len(left) - shared
    both = zip(left[alone:], rising[:shared], strict=True)
    merged = [*left[:alone], *((a + c, b + d) for (a, b), (c, d) in both), *rising[shared:]]
    merged.sort(key=lambda part: -part[0])
    return merged


def plan_micro_batches(
    lengths: Sequence[int], prompts: Sequence[int], *, ranks: int, config: SequenceConfig
) -> list[Parts]:
    """The micro batches of each data-parallel rank, as indices of sequences; equally many for each.

    Where a rank has too little for that number, some of its micro batches are empty. Without
    padding a prompt is computed once in a micro batch, so that answers to it, which have equal
    numbers in ``prompts`` [N], stay together where they can.
    """
    if config.balance and ranks > 1:
        shares = balanced_parts(lengths, ranks, equal_count=True)
    else:
        shares = _blocks(len(lengths), ranks)
    plans = [_micro_batches(share, lengths, prompts, config) for share in shares]
    count = max(map(len, plans))
    return [_split_up(plan, count, lengths) for plan in plans]


def _micro_batches(
    share: list[int], lengths: Sequence[int], prompts: Sequence[int], config: SequenceConfig
) -> Parts:
    budget = config.max_tokens_per_micro_batch
    if budget is not None and not config.packing:
        return _padded_budget(share, lengths, budget)
    together: dict[int, list[int]] = {}
    for index in share:
        together.setdefault(prompts[index], []).append(index)
    if budget is not None:
        return _packed_budget(list(together.values()), lengths, budget)
    if config.packing:
        share = [index for group in together.values() for index in group]
    size = config.micro_batch_size or max(len(share), 1)
    return [share[i : i + size] for i in range(0, len(share), size)] or [[]]


def _packed_budget(groups: Parts, lengths: Sequence[int], budget: int) -> Parts:
    """Parts of about equal sums within the budget; a group that is larger is divided first."""
    items = []
    for group in groups:
        parts = _within([lengths[index] for index in group], budget)
        items += [[group[i] for i in part] for part in parts]
    parts = _within([sum(lengths[index] for index in item) for item in items], budget)
    return [[index for i in part for index in items[i]] for part in parts]


def _within(sizes: Sequence[int], budget: int) -> Parts:
    """Few parts of about equal sums within the budget; a size that is larger is alone.

    A division into as many parts as the sum needs is tried first, then one into as many as surely
    suffice. No count between is tried: where most sizes are above half the budget there are
    hundreds, and a division takes as long as there are sizes times parts.
    """
    packed = _best_fit(sizes, budget)
    # Where sizes are beyond the budget, the sum may need more parts than there are sizes.
    least = min(max(1, -(-sum(sizes) // budget)), max(1, len(sizes)))
    for count in dict.fromkeys((least, len(packed))):
        parts = balanced_parts(sizes, count, equal_count=False)
        if all(len(part) <= 1 or sum(sizes[i] for i in part) <= budget for part in parts):
            return [part for part in parts if part] or [[]]
    return packed


def _best_fit(sizes: Sequence[int], budget: int) -> Parts:
    """Parts within the budget, at most 11/9 of the fewest and one more (best fit decreasing,
    Johnson et al. 1974): each size, largest first, goes where it leaves the least room."""
    parts: Parts = []
    rooms: list[tuple[int, int]] = []  # what each part has left, and its number; ascending
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect.bisect_left(rooms, (sizes[index], 0))
        room, number = rooms.pop(at) if at < len(rooms) else (budget, len(parts))
        if number == len(parts):
            parts.append([])
        parts[number].append(index)
        bisect.insort(rooms, (room - sizes[index], number))
    return [sorted(part) for part in parts] or [[]]


def _padded_budget(share: list[int], lengths: Sequence[int], budget: int) -> Parts:
    """Parts of similar lengths, the number of sequences times the longest within the budget."""
    parts: Parts = []
    for index in sorted(share, key=lambda i: (lengths[i], i)):
        if parts and (len(parts[-1]) + 1) * lengths[index] <= budget:
            parts[-1].append(index)
        else:
            parts.append([index])
    return [sorted(part) for part in parts] or [[]]


def _split_up(plan: Parts, count: int, lengths: Sequence[int]) -> Parts:
    """Halve the largest parts until there are ``count``; empty ones where nothing can be halved."""
    parts = list(plan)
    while len(parts) < count:
        divisible = [number for number, part in enumerate(parts) if len(part) > 1]
        if not divisible:
            parts.append([])
            continue
        largest = max(divisible, key=lambda number: sum(lengths[i] for i in parts[number]))
        part = parts[largest]
        parts[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts
