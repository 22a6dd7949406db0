"""When a rank that kept its part between two phases takes its memory on the device again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from rlinf.rescale.joining_ranks import Instruction
from rlinf.rescale.training import RescaledTraining, TrainerDevices


class Lease:
    """A device that the rollout has until ``given``."""

    def __init__(self, events: list[str]) -> None:
        self.given, self._events = threading.Event(), events

    def acquire(self) -> None:
        self.given.wait(30)
        self._events.append("granted")

    def cancel(self) -> None:
        """Nobody asks for it any more."""


class Trainer:
    """Says what it does with its memory."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def onload(self) -> None:
        self._events.append("onload")

    def offload(self) -> None:
        self._events.append("offload")


class Ranks:
    """Rank 1 of two, which hears one instruction."""

    rank, size, world_size = 1, 2, 2

    def __init__(self, events: list[str], said: list[Callable[[Any], Instruction]]) -> None:
        self._events, self._said = events, said
        self.offered = threading.Event()

    def offer(self, step: int) -> None:
        self._events.append("offer")
        self.offered.set()

    def next_instruction(self, meanwhile: Callable[[], None]) -> Instruction:
        return self._said.pop(0)(meanwhile)

    def move(self, movable: Any, before: int, size: int) -> None:
        self._events.append("move")
        movable.has_part = size > self.rank


class Movable:
    has_part = True


class Groups:
    """Of a step without batches."""

    def __len__(self) -> int:
        return 0

    def receive(self) -> None:
        """Nothing comes."""


@pytest.mark.parametrize("early", [False, True])
def test_a_part_is_loaded_once_the_device_is_there_or_a_move_needs_it(early: bool) -> None:
    events: list[str] = []
    lease = Lease(events)

    def move(meanwhile: Callable[[], None]) -> Instruction:
        return Instruction("move", 1, 2, 0)

    def end(meanwhile: Callable[[], None]) -> Instruction:
        for _ in range(3):
            meanwhile()
        lease.given.set()
        while not ranks.offered.is_set():
            meanwhile()
        return Instruction("end", 2, 2, 0)

    ranks = Ranks(events, [move, end] if early else [end])
    training = cast("Any", RescaledTraining.__new__(RescaledTraining))
    training._ranks, training._movable, training._trainer = ranks, Movable(), Trainer(events)
    leases = cast("Any", (Lease(events), lease))
    shared = TrainerDevices(leases=leases, leader=cast("Any", None), sizes=(1, 2), offload=True)
    training.train(Groups(), None, step=1, shared=shared)
    if early:
        assert events == ["onload", "move", "granted", "offer"]
    else:
        assert events == ["granted", "onload", "offer", "offload"]
