"""Which groups are in which global batch, and when that is known."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from rlinf.data.sequences import PromptGroup
from rlinf.flow.stream import Item
from rlinf.workers.global_batches import GlobalBatches, LengthBounds
from tests.workers.groups import scored_group


def group(draw: int, *lengths: int) -> PromptGroup:
    return scored_group(draw, [[0] * length for length in lengths])


class Stream:
    """Items of which each arrives when it is taken."""

    def __init__(self, *items: tuple[int, Any]) -> None:
        self.left = deque(Item(0, source, payload) for source, payload in items)

    def __next__(self) -> Item:
        return self.left.popleft()

    def ready(self, within: float = 0.0) -> bool:
        return False


def batches(stream: Any, *, by_length: bool) -> GlobalBatches:
    return GlobalBatches(stream, positions=4, size=2, by_length=by_length)


def test_groups_come_in_the_order_of_their_positions_as_soon_as_they_may() -> None:
    stream = Stream(*((position, group(10 + position, 9 - position)) for position in (1, 3, 0, 2)))
    found = batches(stream, by_length=False)
    assert len(found) == 2
    seen = [([g.draw for g in batch], len(stream.left)) for batch in found]
    assert seen == [([10, 11], 1), ([12, 13], 0)]


def test_the_shortest_groups_come_first_once_the_others_are_known_to_be_longer() -> None:
    bounds = ((1, 3), (3, 5))
    stream = Stream(
        (2, group(12, 2, 1)), (0, group(10, 4)), (1, LengthBounds(bounds)), (1, group(11, 9)),
        (3, group(13, 7)),
    )  # fmt: skip
    found = batches(stream, by_length=True)
    seen = [([g.draw for g in batch], len(stream.left)) for batch in found]
    assert seen == [([12, 10], 1), ([13, 11], 0)]
    assert found.known() == 2


@pytest.mark.parametrize("by_length", [True, False])
def test_all_groups_are_read_of_a_phase_that_trains_on_none(by_length: bool) -> None:
    stream = Stream(*((position, group(position, 5)) for position in (3, 1, 0, 2)))
    found = batches(stream, by_length=by_length)
    assert [g.draw for g in found.groups()] == [0, 1, 2, 3]
    assert not stream.left
