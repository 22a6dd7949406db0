"""A rollout worker whose device goes to the trainer while others generate what it had begun.

Each worker generates its own positions. The last worker decides: it knows from the others what runs
where, and lets the first ones give their devices up when that makes the step shorter. Unfinished
groups go with their partial tokens to other workers, under the same weights; scores come back to
the worker whose position it is, so that no group is lost or counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from rlinf.engines.protocol import Engine, FinishedCompletion
from rlinf.engines.requests import given_tokens
from rlinf.flow.stream import Emit, NextItem
from rlinf.rescale.choices import DecodeCost, from_both_ends, shares
from rlinf.rescale.leader import (
    GroupsToAdopt,
    ReleaseDevice,
    RolloutEnded,
    RolloutLeader,
    RolloutSizes,
    TrainingSeconds,
    WorkerStatus,
)
from rlinf.rescale.length_forecast import LengthForecast
from rlinf.rescale.measured import PredictionBias, RunningLine
from rlinf.scheduler import Channel
from rlinf.scheduler.services.leases import LeaseTicket
from rlinf.workers.filling import RolloutHook, bounds_told
from rlinf.workers.group_book import PositionBook

_IDLE = 0.005
"""Seconds between two looks of a worker that generates nothing."""
_LEFT = 0.03
"""The same after its device was given up, for nothing but the end and scores, which wake it: each
look takes time from who has the device now."""


@dataclass(frozen=True, kw_only=True)
class RolloutDevices:
    """How a rollout shares its devices with the trainer inside a step; rank r has device r."""

    leases: tuple[LeaseTicket, ...]  # of each worker's device
    mailboxes: tuple[Channel, ...]  # of each worker
    sizes: RolloutSizes
    offload: bool  # whether a worker frees its device when it gives it up

    def begin(
        self,
        former: RolloutHook | None,
        *,
        engine: Engine,
        book: PositionBook,
        step: int,
        rank: int,
        release: Callable[[], None],
    ) -> RolloutHook:
        """See :meth:`rlinf.workers.filling.DeviceSharing.begin`."""
        hook = cast("RescaledRollout | None", former)
        if hook is None:
            hook = RescaledRollout(rank, engine, self.sizes, NextItem(self.mailboxes[rank]))
        hook.begin(self, book, step, release)
        return hook


class RescaledRollout:
    """One worker's part of the steps of a run; see :class:`RolloutHook`."""

    def __init__(self, rank: int, engine: Engine, sizes: RolloutSizes, mailbox: NextItem) -> None:
        self._rank, self._engine, self._sizes, self._mailbox = rank, engine, sizes, mailbox
        # Seconds of decoding steps against the number of sequences, mostly of the last thousand.
        self.step_times = RunningLine(memory=0.999)
        self._leader: RolloutLeader | None = None
        self._trained: TrainingSeconds | None = None
        self._forecast = LengthForecast(sizes.max_new_tokens)
        self._bias = PredictionBias()

    def begin(
        self, devices: RolloutDevices, book: PositionBook, step: int, release: Callable[[], None]
    ) -> None:
        """Get this worker's device for a step, as in :meth:`RolloutDevices.begin`."""
        self._devices, self._book, self._step, self._release = devices, book, step, release
        self._over = False
        self._ended: list[int] = []  # tokens of each, since the last report
        self._reported: set[int] = set()  # positions of complete groups
        self._last_step: tuple[int, float] | None = None  # what ran in it, and when it began
        if self._rank == self._sizes.workers - 1:
            self._leader = RolloutLeader(
                self._sizes,
                step=step,
                forecast=self._forecast,
                bias=self._bias,
                trained=self._trained,
                handover_seconds=self.step_times.at(1),
                reads_again=not self._engine.carries_caches,
            )
        devices.leases[self._rank].acquire()
        self._has_device = True

    @property
    def goes_on(self) -> bool:
        """See :attr:`RolloutHook.goes_on`: until every group of the step is complete."""
        return not self._over

    @property
    def idle_seconds(self) -> float:
        """See :attr:`RolloutHook.idle_seconds`."""
        return _IDLE if self._has_device else _LEFT

    def before_step(self) -> None:
        """See :meth:`RolloutHook.before_step`: note what the step before took."""
        unfinished = self._engine.unfinished
        if not unfinished:
            self._last_step = None
            return
        now = time.perf_counter()
        if self._last_step is not None:
            # To the next step, as groups that end and what is told take their time as well.
            running, begin = self._last_step
            self.step_times.note(running, now - begin)
        # Those that wait for a place cost nothing.
        self._last_step = min(unfinished, self._sizes.capacity), now

    def after_step(self, ended: Sequence[FinishedCompletion]) -> None:
        """See :meth:`RolloutHook.after_step`."""
        self._ended += [len(item.completion) for item in ended]

    def tell(self, bounds: Mapping[int, int]) -> None:
        """See :meth:`RolloutHook.tell`: the worker that decides hears of it."""
        if self._engine.unfinished or self._ended or self._book.complete.keys() - self._reported:
            self._report(tuple(self._engine.progress().values()), bounds)

    def _report(
        self, running: tuple[int, ...], bounds: Mapping[int, int], *, left: bool = False
    ) -> None:
        """Tell the worker that decides how things stand, and what ended since the last time."""
        complete = self._book.complete
        status = WorkerStatus(
            rank=self._rank,
            step=self._step,
            running=running,
            ended=tuple(self._ended),
            bounds=bounds,
            complete={
                position: n for position, n in complete.items() if position not in self._reported
            },
            given=self._book.given,
            adopted=self._book.adopted,
            left=left,
        )
        self._ended.clear()
        self._reported.update(status.complete)
        if self._leader is not None:
            self._leader.receive(status)
        else:
            self._devices.mailboxes[-1].post(status)

    def exchange(self) -> Iterator[Emit]:
        """See :meth:`RolloutHook.exchange`: carry out what was decided; decide."""
        for message in self._mailbox.take_all():
            yield from self._receive(message)
        if self._leader is not None and not self._over:
            for rank, message in self._leader.decide(self._cost):
                if rank == self._rank:
                    yield from self._receive(message)
                else:
                    self._devices.mailboxes[rank].post(message)

    def _cost(self) -> DecodeCost:
        fixed, per_sequence = self.step_times.coefficients()
        return DecodeCost(fixed=fixed, per_sequence=per_sequence)

    def _receive(self, message: Any) -> Iterator[Emit]:
        if isinstance(message, WorkerStatus | TrainingSeconds):
            assert self._leader is not None
            self._leader.receive(message)
        elif isinstance(message, GroupsToAdopt):
            self._last_step = None  # taking them in is no part of a step
            requests = [r for group in message.groups for r in self._book.adopt(group)]
            # Where not all find a place at once, the end of the step waits for the longest, and
            # the next global batch for the shortest.
            for request in from_both_ends(sorted(requests, key=given_tokens, reverse=True)):
                self._engine.submit(request)
            # Nothing is decided before the groups are known to have arrived.
            yield from bounds_told(self._book, self._engine, self)
        elif isinstance(message, ReleaseDevice):
            yield from self._leave(message)
        elif isinstance(message, RolloutEnded):
            self._over = True
            self._give_device_up()

    def _leave(self, message: ReleaseDevice) -> Iterator[Emit]:
        """Bring everything that runs to others, then give the device up."""
        interrupted = self._engine.interrupt()
        # A conversation ends there whose tool replies with more than there is room for.
        unfinished = [item for item in interrupted if item.completion.stop_reason == "abort"]
        ended = [item for item in interrupted if item.completion.stop_reason != "abort"]
        for group in self._book.take(ended):
            yield Emit("completions", self._book.source(group.draw), group)
        self.after_step(ended)
        groups = self._book.give(unfinished)
        ranks = list(message.loads)
        targets = shares([each.group.unfinished for each in groups], list(message.loads.values()))
        for number, rank in enumerate(ranks):
            mine = tuple(g for g, t in zip(groups, targets, strict=True) if t == number)
            if mine:
                self._devices.mailboxes[rank].post(GroupsToAdopt(mine))
        self._give_device_up()
        self._report((), {}, left=True)

    def _give_device_up(self) -> None:
        if not self._has_device:
            return
        self._has_device = False
        if self._devices.offload:
            self._release()
        self._devices.leases[self._rank].release()

    def end(self) -> None:
        """See :meth:`RolloutHook.end`: keep what was learned for the next step."""
        self._give_device_up()
        if self._leader is not None:
            self._book.report.choices = [asdict(choice) for choice in self._leader.choices]
            self._trained = self._leader.trained
            self._forecast.next_step()
            self._bias.next_step()
