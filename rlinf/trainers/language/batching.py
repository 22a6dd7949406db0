"""Which sequences are computed together, on which rank: pure functions of lengths in tokens.

Every rank computes the same plan from the lengths of the whole batch, so nothing is communicated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Parts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class MicroBatchRule:
    """How the sequences of a rank become micro batches.

    Args:
        sequences: Most sequences of one; None: any number.
        tokens: Most tokens of one; None: any number. A longer sequence is alone.
        padded: Count the padding up to the longest sequence of a micro batch.
    """

    sequences: int | None
    tokens: int | None
    padded: bool


def balanced_parts(lengths: Sequence[int], parts: int, *, equal_count: bool) -> Parts:
    """Divide numbers so that their sums differ little (Karmarkar and Karp 1982, "differencing").

    The two divisions with the largest differences are merged, the largest part of one with the
    smallest of the other, until one is left.

    Args:
        lengths: [N].
        parts: Number of parts, ≥ 1.
        equal_count: Let the sizes of the parts differ by at most 1.

    Returns:
        Indices of each part, ascending; a part is empty where there are more parts than numbers.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    width = parts if equal_count else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, first in enumerate(range(0, len(order), width)):
        division = [(lengths[index], [index]) for index in order[first : first + width]]
        division += [(0, []) for _ in range(parts - len(division))]
        heap.append((division[-1][0] - division[0][0], number, division))
    heapq.heapify(heap)
    fresh = len(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + c, b + d) for (a, b), (c, d) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], fresh, merged))
        fresh += 1
    return [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(parts)]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    prompts: Sequence[int],
    ranks: int,
    balance: bool,
    rule: MicroBatchRule,
) -> list[Parts]:
    """The micro batches of each rank, as indices of sequences; the same number for each rank.

    Where a rank has too little for that number, some of its micro batches are empty. Without
    padding a prompt is computed once in a micro batch, so that answers to it stay together where
    they can.

    Args:
        lengths: [N] tokens of each sequence.
        prompts: [N] equal numbers where sequences have the same prompt.
        ranks: Data-parallel ranks.
        balance: Divide by tokens over ranks; otherwise in consecutive blocks.
        rule: How the sequences of a rank are divided.
    """
    if ranks == 1:
        shares = [list(range(len(lengths)))]
    elif balance:
        shares = balanced_parts(lengths, ranks, equal_count=True)
    else:
        bounds = [len(lengths) * rank // ranks for rank in range(ranks + 1)]
        shares = [list(range(a, b)) for a, b in pairwise(bounds)]
    plans = [_micro_batches(share, lengths, prompts, rule) for share in shares]
    count = max(map(len, plans))
    return [_split_up(plan, count, lengths) for plan in plans]


def _micro_batches(
    share: list[int], lengths: Sequence[int], prompts: Sequence[int], rule: MicroBatchRule
) -> Parts:
    if rule.tokens is not None and rule.padded:
        return _padded_budget(share, lengths, rule.tokens)
    together: dict[int, list[int]] = {}
    for index in share:
        together.setdefault(prompts[index], []).append(index)
    if rule.tokens is not None:
        return _packed_budget(list(together.values()), lengths, rule.tokens)
    if not rule.padded:
        share = [index for group in together.values() for index in group]
    size = rule.sequences or max(len(share), 1)
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
    """Few parts of about equal sums within the budget; a size that is larger is alone."""
    count = max(1, -(-sum(sizes) // budget))
    while True:
        parts = balanced_parts(sizes, count, equal_count=False)
        fits = all(len(part) <= 1 or sum(sizes[i] for i in part) <= budget for part in parts)
        if fits or count >= len(sizes):
            # Sizes beyond the budget can make more parts than there are sizes.
            return [part for part in parts if part] or [[]]
        count += 1


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
