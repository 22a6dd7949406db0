"""The rollout worker that decides when others give their devices up, and what workers tell it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlinf.rescale.choices import DecodeCost, DeviceChoice, RolloutState, borrow, release
from rlinf.rescale.length_forecast import LengthForecast
from rlinf.rescale.measured import PredictionBias
from rlinf.workers.global_batches import complete_batches
from rlinf.workers.group_book import MovingGroup


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """What a worker tells the one that decides."""

    rank: int
    step: int
    running: tuple[int, ...]  # tokens of each unfinished sequence
    ended: tuple[int, ...]  # tokens of sequences that ended, or were cut off, since the last time
    bounds: Mapping[int, int]  # what groups not complete have at least, by position
    complete: Mapping[int, int]  # longest answers of groups completed since then, by position
    given: int  # groups that it has sent to others in this step
    adopted: int  # groups that it has got from others
    left: bool = False  # whether it has given its device up


@dataclass(frozen=True)
class ReleaseDevice:
    """Give the device up and bring what runs to others, by rank with what runs there already."""

    loads: Mapping[int, int]


@dataclass(frozen=True)
class GroupsToAdopt:
    """Groups from another worker, to be ended here."""

    groups: tuple[MovingGroup, ...]


@dataclass(frozen=True)
class RolloutEnded:
    """Every group of the step is complete."""


@dataclass(frozen=True)
class TrainingSeconds:
    """What the last training phase took, as if by one rank."""

    seconds: float  # of all batches
    last_seconds: float  # of the last one, whose answers are the longest
    speeds: Mapping[int, float]  # how many times as fast as one rank each number of ranks trains


@dataclass(frozen=True, kw_only=True)
class RolloutSizes:
    """What is known of a rollout before it begins."""

    workers: int  # that generate; each has a device
    positions: int  # groups of a step
    group_size: int
    global_batches: int  # optimizer steps of a training step
    max_new_tokens: int
    capacity: int  # sequences that one worker runs at once
    trainer_sizes: tuple[int, ...]  # ranks that the trainer can have, ascending


@dataclass(eq=False)
class RolloutLeader:
    """What is known of all workers in one step, and what follows from it."""

    sizes: RolloutSizes
    step: int  # number of the training step
    forecast: LengthForecast  # from the steps before; goes on learning
    bias: PredictionBias  # of the time predicted once workers have left, likewise
    trained: TrainingSeconds | None  # by the last training phase; None: not known
    handover_seconds: float  # of bringing one sequence elsewhere, but for computing tokens again
    reads_again: bool  # whether its tokens are computed again, and do not go along
    choices: list[DeviceChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._batch = self.sizes.positions // self.sizes.global_batches  # groups of a global batch
        self._status: dict[int, WorkerStatus] = {}
        self._ended: list[int] = []  # tokens of each
        self._complete: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._news = False
        self._over = False
        self._released: tuple[float, float] | None = None  # when last, and seconds predicted then

    def receive(self, message: WorkerStatus | TrainingSeconds) -> None:
        """Take in what a worker tells, or the trainer."""
        if isinstance(message, TrainingSeconds):
            self.trained = message
            return
        if message.step != self.step:
            return  # it was on its way when the step before ended
        self._status[message.rank] = message
        self._ended += message.ended
        self.forecast.note(message.ended)
        self._complete.update(message.complete)
        self._news = True

    def decide(
        self, cost: Callable[[], DecodeCost]
    ) -> list[tuple[int, ReleaseDevice | RolloutEnded]]:
        """Messages to workers, by rank; mostly none. ``cost`` tells what a decoding step takes."""
        if not self._news or self._over:
            return []
        self._news = False
        workers = self.sizes.workers
        if len(self._complete) == self.sizes.positions:
            self._over = True
            if self._released is not None:
                begin, predicted = self._released
                self.bias.note(predicted, time.perf_counter() - begin)
            self._note_borrowed(cost())
            return [(rank, RolloutEnded()) for rank in range(workers)]
        status = self._status.values()
        going = self._leaving - {each.rank for each in status if each.left}
        on_their_way = sum(s.given for s in status) - sum(s.adopted for s in status)
        if going or on_their_way or len(self._status) < workers:
            return []  # what runs where is not known
        live = [rank for rank in range(workers) if rank not in self._leaving]
        most = max(len(self._status[rank].running) for rank in live)
        incomplete = len(self._complete) < self._batch
        if len(live) == 1 or incomplete or most > self.sizes.capacity:
            # Nobody can leave, or there would be nothing to train on, so that the gain need not be
            # known.
            return []
        choice = release(self._state(live, cost()))
        if choice.action != "release":
            return []
        self.choices.append(choice)
        if "rollout_seconds" in choice.numbers:
            self._released = time.perf_counter(), choice.numbers["rollout_seconds"]
        leaving, staying = live[: choice.count], live[choice.count :]
        self._leaving.update(leaving)
        loads = {rank: len(self._status[rank].running) for rank in staying}
        return [(rank, ReleaseDevice(loads)) for rank in leaving]

    def _note_borrowed(self, decode: DecodeCost) -> None:
        """Write down what it was worth that the rollout began on all devices, one of them its own.

        An account, which comes first among the decisions of the run although it is known last.
        """
        others = self.sizes.workers - 1
        choice = borrow(
            sequences=self.sizes.positions * self.sizes.group_size,
            tokens=sum(self._ended) / max(len(self._ended), 1),
            own=1,
            trainers=others,
            decode=decode,
        )
        if choice.action == "borrow":
            self.choices.insert(0, choice)

    def _state(self, live: list[int], decode: DecodeCost) -> RolloutState:
        running = [token for rank in live for token in self._status[rank].running]
        bounds: dict[int, int] = dict.fromkeys(range(self.sizes.positions), 0)
        for status in self._status.values():
            bounds.update(status.bounds)
        for position in self._complete:
            bounds.pop(position, None)
        left = self.forecast.left(running)
        trained = self.trained or TrainingSeconds(0.0, 0.0, {})
        return RolloutState(
            running=tuple(len(self._status[rank].running) for rank in live),
            total=self.sizes.positions * self.sizes.group_size,
            capacity=self.sizes.capacity,
            left=left,
            decode=decode,
            handover_seconds=self.handover_seconds + self._again(running, left.mean),
            train_seconds=trained.seconds if self.trained else None,
            last_seconds=trained.last_seconds,
            ready=len(complete_batches(self._complete, bounds, self._batch)),
            trainer_sizes=self.sizes.trainer_sizes,
            speeds=trained.speeds,
            trainer_devices=len(self._leaving),
            rollout_bias=self.bias.factor,
        )

    def _again(self, running: list[int], left: float) -> float:
        """Seconds to compute the tokens again that a running sequence has, on average.

        A third of what training on them takes: a backward pass costs as much as two forward passes.
        """
        has = sum(running)
        tokens = has + sum(self._ended) + left * len(running)
        if self.trained is None or not has or not self.reads_again:
            return 0.0
        return self.trained.seconds / 3 / tokens * has / len(running)
