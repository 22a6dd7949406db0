"""Sums of gradients in one fixed order, so that the result does not depend on who computed what.

Floating-point addition is not associative. The sum over micro batches is therefore always the same
balanced binary tree over their numbers: a data-parallel rank sums the subtree of its own block, and
the ranks' results are summed by the upper part of the tree. With a number of ranks that is a power
of two and divides the number of micro batches, any number of ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def tree_sum(first: int, last: int, leaf: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Sum ``leaf(first) … leaf(last - 1)`` as a balanced binary tree.

    Leaves are computed from left to right; at most log2(last − first) + 1 sums are alive at once.
    """
    if last - first == 1:
        return leaf(first)
    middle = (first + last) // 2
    left = tree_sum(first, middle, leaf)
    return left.add_(tree_sum(middle, last, leaf))


def block_of(rank: int, world_size: int, count: int) -> tuple[int, int]:
    """First and one past the last micro batch of a rank.

    Raises:
        ValueError: If ``count`` does not divide by ``world_size``.
    """
    if count % world_size:
        raise ValueError(f"{count} micro batches do not divide over {world_size} ranks")
    size = count // world_size
    return rank * size, (rank + 1) * size


def sum_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the ranks' partial sums by the upper part of the same tree."""
    return tree_sum(0, len(parts), lambda rank: parts[rank].clone())
