"""What a reader sees of a channel without waiting."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rlinf.flow.stream import InputPort, InputStream, Item, NextItem, StepAborted
from rlinf.monitor.timeline import Timeline

COUNT, DELAY = 50, 1e-4


class Answer:
    """As an AsyncWork, which is there a moment after it was asked for."""

    def __init__(self, channel: AnsweringChannel) -> None:
        self._channel, self._looked_at = channel, False

    def done_within(self, seconds: float) -> bool:
        self._channel.waits.append(seconds)
        there = seconds >= DELAY or self._looked_at
        self._looked_at = True
        return there and bool(self._channel.items)

    def wait(self) -> Any:
        return self._channel.items.pop(0)


class AnsweringChannel:
    """Has what is in its list; remembers how long was waited."""

    def __init__(self, items: list[Any], *, here: bool = False) -> None:
        self.items, self.waits, self._here = items, list[float](), here

    def is_here(self, key: int = 0) -> bool:
        return self._here

    def get(self, key: int = 0, *, async_op: bool) -> Answer:
        assert async_op
        return Answer(self)


def stream_of(items: list[Item]) -> InputStream:
    channel: Any = AnsweringChannel(items)
    return InputStream(InputPort("edge", channel, producers=1), step=3)


def test_a_look_sees_all_items_that_are_there() -> None:
    """Not one, where the reader asks for an item and finds no answer yet."""
    items = [Item(step=3, source=number) for number in range(COUNT)]
    stream, seen = stream_of([*items, Item(step=3, source=-1, end=True)]), []
    while stream.ready():
        seen.append(next(stream).source)
    assert seen == list(range(COUNT))
    assert stream.items == COUNT
    assert list(stream) == []


def test_an_item_that_comes_is_waited_for() -> None:
    channel: Any = AnsweringChannel([])
    following = NextItem(channel)
    assert not following.arrived(0.1)
    assert not following.arrived()
    channel.items.append("late")
    assert following.arrived(30.0)
    # The answer was given time once; whoever looks again does not wait unless told to.
    assert channel.waits == [0.1, 0.0, 30.0]
    assert following.take() == "late"


def test_no_item_of_a_channel_of_this_process_is_waited_for() -> None:
    """It gives what it has at once: to wait would hold up every exchange."""
    channel: Any = AnsweringChannel([], here=True)
    assert NextItem(channel).take_all() == []
    assert channel.waits == [0.0]


def test_what_was_asked_for_is_not_lost() -> None:
    channel: Any = AnsweringChannel([])
    following = NextItem(channel)
    assert following.take_all() == []
    channel.items += ["first", "second"]
    assert following.take_all() == ["first", "second"]


def test_a_look_tells_that_the_step_was_aborted() -> None:
    stream = stream_of([Item(step=3, source=-1, aborted="the env crashed")])
    with pytest.raises(StepAborted, match="the env crashed"):
        stream.ready()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_changes_no_wait(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    channel: Any = AnsweringChannel([])
    timeline, system_clock = Timeline(), time.time_ns

    def get(key: int) -> Item:
        monkeypatch.setattr(time, "time_ns", lambda: system_clock() + hours * 3600 * 10**9)
        return Item(step=3, source=0)

    monkeypatch.setattr(channel, "get", get)
    stream = InputStream(InputPort("edge", channel, producers=1), step=3, timeline=timeline)
    next(stream)
    assert 0 < stream.seconds_waiting < 60
    (wait,) = timeline.drain()
    assert (wait["end_ns"] - wait["begin_ns"]) / 1e9 == stream.seconds_waiting
