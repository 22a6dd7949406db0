"""Fills the slots of a step while devices come and go.

Each worker generates its own slots. The last worker decides: it knows from the others what runs
where, and lets the first ones give their devices up when that makes the step shorter. Unfinished
groups go with their partial tokens to other workers, under the same weights; scores come back to
the worker whose slot it is, so that no group is lost or counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rlinf.data.sequences import PromptGroup
from rlinf.engines.protocol import Engine, GenerationRequest
from rlinf.engines.requests import given_tokens
from rlinf.flow.stream import Emit, InputStream, NextItem
from rlinf.rescale.decisions import DecodeCost, from_both_ends, shares
from rlinf.rescale.running_line import RunningLine
from rlinf.workers.generation_round import Drawn, GenerationReport
from rlinf.workers.moving_round import (
    Guests,
    Leave,
    MovingRound,
    Over,
    Progress,
    SharedDevices,
    Standing,
    Trained,
)
from rlinf.workers.rollout_leader import RolloutLeader

_SHARE = 0.02
"""Part of the time that reports of progress may take; all who hear one need about as long again."""
_PAUSE = 0.05
"""Most seconds between two of them."""
_AT_FIRST = 4
"""Factor on the pause while no own group is complete: little could be trained on or decided."""
_IDLE = 0.005
"""Seconds between two looks of a worker that generates nothing."""
_LEFT = 0.03
"""The same after its device was given up, for nothing but the end and scores, which wake it: each
look takes time from who has the device now."""


def step_times() -> RunningLine:
    """Seconds of decoding steps against the number of sequences, mostly of the last thousand."""
    return RunningLine(memory=0.999)


class MovingRollout:
    """One worker's part of one step.

    Args:
        engine: Generates.
        round_: The groups.
        scored: Stream of scored groups.
        step: Number of the training step.
        rank: Of this worker.
        devices: How devices are shared; None: they stay where they are.
        mailbox: This worker's own; None likewise.
        times: Of decoding steps, see :func:`step_times`.
        leader: Decides, on the last worker; None on the others, and without shared devices.
        release: Frees the device.
    """

    def __init__(
        self,
        engine: Engine,
        round_: MovingRound,
        scored: InputStream,
        *,
        step: int,
        rank: int,
        devices: SharedDevices | None,
        mailbox: NextItem | None,
        times: RunningLine,
        leader: RolloutLeader | None,
        release: Callable[[], None],
    ) -> None:
        self._engine, self._round, self._scored = engine, round_, scored
        self._step, self._rank = step, rank
        self._devices, self._mailbox, self._times = devices, mailbox, times
        self._leader, self._release = leader, release
        self._has_device = True
        self._over = devices is None
        self._ended: list[int] = []
        self._complete: dict[int, int] = {}
        self._told, self._pause = time.perf_counter(), 0.0
        self._last_step: tuple[int, float] | None = None  # what ran in it, and when it began

    def fill(
        self, prompts: Iterable[tuple[int, Drawn, list[int]]]
    ) -> Generator[Emit, None, GenerationReport]:
        """Generate groups until every own slot has a scored one, and no guest is left.

        Args:
            prompts: Slot, prompt and seeds of each group.
        """
        if self._devices is not None:
            self._devices.leases[self._rank].acquire()
        for slot, drawn, seeds in prompts:
            self._submit(self._round.begin(slot, drawn, seeds))
            self._round.report.begun += 1
        while self._round.open or not self._over:
            yield from self._generate()
            yield from self._take_scores()
            yield from self._talk()
        self._give_device_up()
        if self._leader is not None:
            self._round.report.choices = [asdict(choice) for choice in self._leader.choices]
        return self._round.report

    def _submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._engine.submit(request)

    def _generate(self) -> Generator[Emit, None, None]:
        unfinished = self._engine.unfinished
        if not unfinished:
            self._last_step = None
            return
        if self._devices is not None:
            now = time.perf_counter()
            if self._last_step is not None:
                # To the next step, as groups that end and what is said take their time as well.
                running, begin = self._last_step
                self._times.note(running, now - begin)
            # Those that wait for a place cost nothing.
            self._last_step = min(unfinished, self._devices.capacity), now
        ended = self._engine.step()
        self._ended += [len(item.completion) for item in ended]
        for group, slot in self._round.take(ended):
            self._complete[slot] = self._round.complete[slot]
            yield Emit("completions", slot, group)

    def _take_scores(self) -> Generator[Emit, None, None]:
        idle, shares = not self._engine.unfinished, self._devices is not None
        wait = (_IDLE if self._has_device else _LEFT) if idle and shares else 0.0
        # Without shared devices there is nothing else to wait for.
        while self._round.open and (self._scored.ready(wait) or (idle and not shares)):
            item = next(self._scored)
            group: PromptGroup = item.payload
            self._round.close(item.source)
            wait = 0.0
            yield Emit("groups", item.source, group)
        if wait and not self._round.open:
            time.sleep(wait)

    def _talk(self) -> Generator[Emit, None, None]:
        """Tell how far the groups are; hear and carry out what was decided."""
        begin = time.perf_counter()
        pause = self._pause if self._round.complete else _AT_FIRST * self._pause
        if not self._engine.unfinished or begin - self._told >= pause:
            bounds = self._round.bounds(self._engine) if self._engine.unfinished else {}
            if bounds:
                yield Emit("groups", min(bounds), Progress(bounds))
            self._tell(bounds)
            self._told = time.perf_counter()
            self._pause = min((self._told - begin) / _SHARE, _PAUSE)
        if self._devices is None or self._mailbox is None:
            return
        for message in self._mailbox.take_all():
            yield from self._hear(message)
        if self._leader is not None and not self._over:
            for rank, message in self._leader.decide(self._cost):
                if rank == self._rank:
                    yield from self._hear(message)
                else:
                    self._devices.mailboxes[rank].post(message)

    def _cost(self) -> DecodeCost:
        fixed, per_sequence = self._times.coefficients()
        return DecodeCost(fixed=fixed, per_sequence=per_sequence)

    def _tell(self, bounds: Mapping[int, int]) -> None:
        if self._devices is None:
            return
        if self._engine.unfinished or self._complete or self._ended:
            self._report(tuple(self._engine.progress().values()), bounds)

    def _report(
        self, running: tuple[int, ...], bounds: Mapping[int, int], *, left: bool = False
    ) -> None:
        """Tell the worker that decides how things stand, and what ended since the last time."""
        standing = Standing(
            rank=self._rank,
            step=self._step,
            running=running,
            ended=tuple(self._ended),
            bounds=bounds,
            complete=dict(self._complete),
            given=self._round.given,
            adopted=self._round.adopted,
            left=left,
        )
        self._ended.clear()
        self._complete.clear()
        self._say_to_leader(standing)

    def _say_to_leader(self, standing: Standing) -> None:
        assert self._devices is not None
        if self._leader is not None:
            self._leader.hear(standing)
        else:
            self._devices.mailboxes[-1].post(standing)

    def _hear(self, message: Any) -> Generator[Emit, None, None]:
        if isinstance(message, Standing | Trained):
            assert self._leader is not None
            self._leader.hear(message)
        elif isinstance(message, Guests):
            self._last_step = None  # taking them in is no part of a step
            requests = [r for group in message.groups for r in self._round.adopt(group)]
            # Where not all find a place at once, the end of the step waits for the longest, and
            # the next global batch for the shortest.
            self._submit(from_both_ends(sorted(requests, key=given_tokens, reverse=True)))
            bounds = self._round.bounds(self._engine)
            if bounds:
                yield Emit("groups", min(bounds), Progress(bounds))
            # Nothing is decided before the groups are known to have arrived.
            self._tell(bounds)
        elif isinstance(message, Leave):
            self._leave(message)
        elif isinstance(message, Over):
            self._over = True
            self._give_device_up()

    def _leave(self, message: Leave) -> None:
        """Bring everything that runs to others, then give the device up."""
        assert self._devices is not None
        groups = self._round.give(self._engine.interrupt())
        self._round.report.moved += sum(group.unfinished for group in groups)
        ranks = list(message.loads)
        targets = shares([group.unfinished for group in groups], list(message.loads.values()))
        for number, rank in enumerate(ranks):
            mine = tuple(g for g, t in zip(groups, targets, strict=True) if t == number)
            if mine:
                self._devices.mailboxes[rank].post(Guests(mine))
        self._give_device_up()
        self._report((), {}, left=True)

    def _give_device_up(self) -> None:
        if self._devices is None or not self._has_device:
            return
        self._has_device = False
        if self._devices.offload:
            self._release()
        self._devices.leases[self._rank].release()
