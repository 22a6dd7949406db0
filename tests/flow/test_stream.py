"""What a stage sees of its input."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rlinf.flow.stream import InputPort, InputStream, Item

COUNT, DELAY = 50, 1e-4


class Answer:
    """As an AsyncWork, without a process to wait in."""

    def __init__(self, future: Future[Item]) -> None:
        self._future = future

    def done_within(self, seconds: float) -> bool:
        return bool(wait([self._future], timeout=seconds).done)

    def wait(self) -> Item:
        return self._future.result()


class AnsweringChannel:
    """Answers from another thread and a moment later, as a channel of a worker does."""

    def __init__(self, items: list[Item]) -> None:
        self._items, self._pool = items, ThreadPoolExecutor(1)

    def get(self, key: int, *, async_op: bool) -> Answer:
        assert async_op
        return Answer(self._pool.submit(self._first))

    def _first(self) -> Item:
        time.sleep(DELAY)
        while not self._items:
            time.sleep(DELAY)
        return self._items.pop(0)


def stream_of(items: list[Item]) -> InputStream:
    channel: Any = AnsweringChannel(items)
    return InputStream(InputPort("edge", channel, producers=1), step=3)


def test_a_look_sees_all_items_that_are_there() -> None:
    """Not one, where the reader asks for an item and finds no answer yet."""
    items = [Item(step=3, source=number) for number in range(COUNT)]
    stream, seen, looks = stream_of([*items, Item(step=3, source=-1, end=True)]), [], 0
    while len(seen) < COUNT:
        looks += 1
        while stream.ready():
            seen.append(next(stream).source)
        time.sleep(10 * DELAY)  # the reader does other things
    assert seen == list(range(COUNT))
    assert looks < COUNT / 2


def test_an_item_that_comes_is_waited_for() -> None:
    items: list[Item] = []
    stream = stream_of(items)
    begin = time.perf_counter()
    assert not stream.ready(0.1)
    assert time.perf_counter() - begin >= 0.1
    items.append(Item(step=3, source=7))
    assert stream.ready(30.0)
    assert next(stream).source == 7
