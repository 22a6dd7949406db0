"""The rollout worker that decides when others give their devices up."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlinf.rescale.decisions import (
    Choice,
    DecodeCost,
    RolloutState,
    borrow,
    complete_batches,
    release,
)
from rlinf.rescale.length_forecast import LengthForecast
from rlinf.rescale.prediction_bias import PredictionBias
from rlinf.workers.moving_round import Leave, Over, SharedDevices, Standing, Trained


class RolloutLeader:
    """What is known of all workers in one step, and what follows from it.

    Args:
        devices: How devices are shared.
        step: Number of the training step.
        slots: Groups of the step.
        group_size: Sequences of a group.
        global_batches: Optimizer steps of the step.
        forecast: Of the lengths of sequences, from the steps before; goes on learning.
        bias: Of the predicted time of a rollout after workers left, from the steps before; goes on
            learning.
        trained: What the last training phase took; None: not known.
        handover_seconds: What bringing one sequence elsewhere takes, but for computing its tokens
            again.
        reads_again: Whether they are computed again, and do not go along.
    """

    def __init__(
        self,
        devices: SharedDevices,
        *,
        step: int,
        slots: int,
        group_size: int,
        global_batches: int,
        forecast: LengthForecast,
        bias: PredictionBias,
        trained: Trained | None,
        handover_seconds: float,
        reads_again: bool,
    ) -> None:
        self._devices, self._step = devices, step
        self._slots, self._group_size = slots, group_size
        self._size = slots // global_batches  # groups of a batch
        self._forecast, self._bias = forecast, bias
        self._handover_seconds = handover_seconds
        self._reads_again = reads_again
        self.trained = trained
        self._standing: dict[int, Standing] = {}
        self._ended: list[int] = []  # tokens of each
        self._complete: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._news = False
        self._over = False
        self._released: tuple[float, float] | None = None  # when last, and seconds predicted then
        self.choices: list[Choice] = []

    def hear(self, message: Standing | Trained) -> None:
        """Take in what a worker tells, or the trainer."""
        if isinstance(message, Trained):
            self.trained = message
            return
        if message.step != self._step:
            return  # it was on its way when the step before ended
        self._standing[message.rank] = message
        self._ended += message.ended
        self._forecast.note(message.ended)
        self._complete.update(message.complete)
        self._news = True

    def decide(self, cost: Callable[[], DecodeCost]) -> list[tuple[int, Leave | Over]]:
        """Messages to workers, by rank; mostly none.

        Args:
            cost: Tells what a decoding step takes.
        """
        if not self._news or self._over:
            return []
        self._news = False
        workers = len(self._devices.mailboxes)
        if len(self._complete) == self._slots:
            self._over = True
            if self._released is not None:
                begin, predicted = self._released
                self._bias.note(predicted, time.perf_counter() - begin)
            self._note_borrowed(cost())
            return [(rank, Over()) for rank in range(workers)]
        gone = [rank for rank in self._leaving if not self._has_left(rank)]
        standing = self._standing.values()
        on_their_way = sum(s.given for s in standing) - sum(s.adopted for s in standing)
        if gone or on_their_way or len(self._standing) < workers:
            return []  # what runs where is not known
        live = [rank for rank in range(workers) if rank not in self._leaving]
        most = max(len(self._standing[rank].running) for rank in live)
        incomplete = len(self._complete) < self._size
        if len(live) == 1 or incomplete or most > self._devices.capacity:
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
        loads = {rank: len(self._standing[rank].running) for rank in staying}
        return [(rank, Leave(loads)) for rank in leaving]

    def _note_borrowed(self, decode: DecodeCost) -> None:
        """Write down what it was worth that the rollout began on all devices, one of them its own.

        An account for the decisions of the run, in which it comes first although it is known last.
        That it began there needs no choice: before a batch is complete nobody else could use them.
        """
        others = len(self._devices.mailboxes) - 1
        choice = borrow(
            sequences=self._slots * self._group_size,
            tokens=sum(self._ended) / max(len(self._ended), 1),
            own=1,
            trainers=others,
            decode=decode,
        )
        if choice.action == "borrow":
            self.choices.insert(0, choice)

    def _has_left(self, rank: int) -> bool:
        return rank in self._standing and self._standing[rank].left

    def _state(self, live: list[int], decode: DecodeCost) -> RolloutState:
        running = [token for rank in live for token in self._standing[rank].running]
        bounds: dict[int, int] = dict.fromkeys(range(self._slots), 0)
        for standing in self._standing.values():
            bounds.update(standing.bounds)
        for slot in self._complete:
            bounds.pop(slot, None)
        left = self._forecast.left(running)
        return RolloutState(
            running=tuple(len(self._standing[rank].running) for rank in live),
            total=self._slots * self._group_size,
            capacity=self._devices.capacity,
            left=left,
            decode=decode,
            handover_seconds=self._handover_seconds + self._again(running, left.mean),
            train_seconds=self.trained.seconds if self.trained else None,
            last_seconds=self.trained.last_seconds if self.trained else 0.0,
            ready=len(complete_batches(self._complete, bounds, self._size)),
            trainer_sizes=self._devices.trainer_sizes,
            speeds=self.trained.speeds if self.trained else {},
            trainer_devices=len(self._leaving),
            rollout_bias=self._bias.factor,
        )

    def _again(self, running: list[int], left: float) -> float:
        """Seconds to compute the tokens again that a running sequence has, on average.

        A third of what training on them takes: a backward pass costs as much as two forward passes.
        """
        has = sum(running)
        tokens = has + sum(self._ended) + left * len(running)
        if self.trained is None or not has or not self._reads_again:
            return 0.0
        return self.trained.seconds / 3 / tokens * has / len(running)
