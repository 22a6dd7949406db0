"""Training on global batches as they become known, by a number of ranks that changes meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from rlinf.data.sequences import PromptGroup
from rlinf.rescale.decisions import DeviceChoice, TrainerState, largest_size, resize
from rlinf.rescale.joining_ranks import Instruction, JoiningRanks, Kind, MoveFailed
from rlinf.rescale.leader import TrainingSeconds
from rlinf.rescale.measured import TrainerTimes
from rlinf.rescale.movable_trainer import MovableTrainer
from rlinf.scheduler import Channel
from rlinf.scheduler.services.leases import LeaseTicket
from rlinf.trainers.trainer import Trainer
from rlinf.workers.global_batches import GlobalBatches

_PATIENCE = 0.1
"""Seconds to wait for devices where no move was timed yet."""
_POLL = 0.0005
"""Fewest seconds between two looks of a rank that trains, for which others wait."""
_WAITED = 0.1
"""Part of the time that it has waited already, after which it looks again: looking takes time from
those that it waits for."""
_SOON = 0.05
"""Seconds in which the devices of a rollout are free that has ended."""
_POLL_OFFERED = 0.01
"""Of one that could train, and the most."""
_POLL_BUSY = 0.05
"""Of one whose device is the rollout's: nobody waits for it, and a look takes time from both."""


@dataclass(frozen=True, kw_only=True)
class TrainerDevices:
    """How a trainer shares devices with the rollout inside a step; rank r has device r."""

    leases: tuple[LeaseTicket, ...]  # of each rank's device
    leader: Channel  # mailbox of the rollout worker that decides
    sizes: tuple[int, ...]  # ranks that the trainer can have, ascending
    offload: bool  # whether a rank frees its device when the phase is over


class RescaledTraining:
    """One rank of a trainer whose ranks change; see :class:`JoiningRanks` and
    :class:`~rlinf.workers.global_batches.TrainingHook`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Store | None,
        device: torch.device | str,
        timeout_s: float,
    ) -> None:
        if store is None:
            raise ValueError("one rank has no others to change with")
        self._ranks = JoiningRanks(
            rank, world_size, store=store, device=device, timeout_s=timeout_s
        )
        self._trainer: MovableTrainer
        self._times = TrainerTimes()

    def attach(self, trainer: Any) -> None:
        """See :meth:`TrainingHook.attach`; a TypeError where a trainer's ranks cannot change."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"the ranks of a {type(trainer).__name__} cannot change in a run")
        self._trainer = MovableTrainer(trainer, keep=self._ranks.rank == 0)

    @property
    def has_part(self) -> bool:
        """See :attr:`TrainingHook.has_part`."""
        return self._trainer.has_part

    def train(
        self,
        batches: GlobalBatches,
        prepare: Callable[[list[PromptGroup]], Any],
        *,
        step: int,
        shared: TrainerDevices,
    ) -> dict[str, Any] | None:
        """See :meth:`TrainingHook.train`; ``choices`` among the metrics is what was decided."""
        phase = Phase(self._ranks, self._trainer, shared, batches, step, prepare, self._times)
        if self._ranks.rank > 0:
            phase.follow()
            return None
        metrics = phase.lead()
        metrics["choices"] = [asdict(choice) for choice in phase.choices]
        return metrics

    def close(self) -> None:
        """See :meth:`TrainingHook.close`."""
        self._ranks.close()


@dataclass
class Phase:
    """One training phase on one rank."""

    ranks: JoiningRanks
    movable: MovableTrainer  # this rank's part of the trainer
    shared: TrainerDevices
    groups: GlobalBatches  # as they become known
    step: int
    prepare: Callable[[list[PromptGroup]], Any]  # a batch with everything that the loss needs
    times: TrainerTimes  # of phases so far
    choices: list[DeviceChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count, self.trainer = len(self.groups), self.movable.trainer
        self._waited, self._most = 0.0, 1
        # Whether it was not waited yet for devices that the rollout, which has ended, gives up.
        self._patient = True

    # -- rank 0 ---------------------------------------------------------------------------------

    def lead(self) -> dict[str, Any]:
        """Train, as rank 0; returns the metrics of the phase and what was decided."""
        self.groups.batch(0)  # before it the device is of no use
        with self.shared.leases[0]:
            if self.shared.offload:
                self.trainer.onload()
            self._settle()
            first, early = self.ranks.size, self.groups.known() < self.count
            begin = time.perf_counter()
            metrics: dict[str, Any] = self.trainer.train(self._batches(), self.step)
            metrics["time/update"] = time.perf_counter() - begin - self._waited
            if early and first < self.ranks.size:
                # The next step is likely to begin so too, when the other ranks' devices are busy.
                self._move(first, self.count)
            self._say("end", self.count)
            if self.shared.offload:
                self.trainer.offload()
        self.times.end_phase()
        whole = self.times.seconds_left(0, self.count)
        last = self.times.seconds_left(self.count - 1, self.count)
        speeds = self.times.speeds(self.shared.sizes)
        if whole is not None and last is not None:
            self.shared.leader.post(TrainingSeconds(whole, last, speeds))
        metrics["actor/ranks_most"] = float(self._most)
        return metrics

    def _settle(self) -> None:
        """Wait for the devices of all that have a part, or let fewer ranks have the model.

        Where the rollout has ended, all devices are about to be free. Where it goes on, waiting is
        given up after as long as a move takes.
        """
        wanted, begin = self.ranks.size, time.perf_counter()
        patience: float = self.times.move_seconds or _PATIENCE
        while (offered := self.ranks.offered(self.step)) < wanted:
            ended = self.groups.known() == self.count
            if not ended and time.perf_counter() - begin > patience:
                size = largest_size(self.shared.sizes, offered)
                if self._move(size, 0):
                    reason = f"the rollout goes on; {offered} of {wanted} devices are free"
                    cost = self.times.move_seconds or 0.0
                    self.choices.append(
                        DeviceChoice(action="resize", count=size, reason=reason, cost_seconds=cost)
                    )
                    return
                patience = math.inf
            time.sleep(_POLL)

    def _batches(self) -> Iterator[Any]:
        for number in range(self.count):
            begin = time.perf_counter()
            groups = self.groups.batch(number)
            self._waited += time.perf_counter() - begin
            self._decide(number)
            if self.ranks.size > 1:
                self._say("go", number)
            self._most = max(self._most, self.ranks.size)
            begin = time.perf_counter()
            yield self.prepare(groups)
            seconds = time.perf_counter() - begin
            tokens = sum(len(g.prompt_tokens) + len(c) for g in groups for c in g.completions)
            self.times.note_batch(number, tokens, seconds, self.ranks.size)

    def _decide(self, done: int) -> None:
        choice = self._choice(done, self.ranks.offered(self.step))
        if choice.action == "stay" and self._patient and self.groups.known() == self.count:
            self._patient = False
            hoped = self._choice(done, self.ranks.world_size)
            untimed = hoped.action == "resize" and self.times.move_seconds is None
            if untimed or hoped.gain_seconds > _SOON:
                end = time.perf_counter() + _SOON
                while (offered := self.ranks.offered(self.step)) < self.ranks.world_size:
                    if time.perf_counter() >= end:
                        break
                    time.sleep(_POLL)
                choice = self._choice(done, offered)
        if choice.action == "resize":
            self.choices.append(choice)
            self._move(choice.count, done)  # where it fails, fewer ranks go on

    def _choice(self, done: int, offered: int) -> DeviceChoice:
        return resize(
            TrainerState(
                size=self.ranks.size,
                offered=offered,
                sizes=self.shared.sizes,
                batches=self.count - done,
                seconds_left=self.times.seconds_left(done, self.count),
                move_seconds=self.times.move_seconds,
                speeds=self.times.speeds(self.shared.sizes),
            )
        )

    def _move(self, size: int, done: int) -> bool:
        """Change the number of ranks; whether that succeeded."""
        before = self.ranks.size
        self.ranks.send(Instruction("move", size, before, done))
        try:
            report = self.ranks.move(self.movable, before, size)
        except MoveFailed as error:
            reason = f"the move to {size} ranks failed and was undone: {error}"
            self.choices.append(DeviceChoice(action="stay", count=before, reason=reason))
            return False
        self.times.note_move(report.seconds)
        return True

    def _say(self, kind: Kind, done: int) -> None:
        self.ranks.send(Instruction(kind, self.ranks.size, self.ranks.size, done))

    # -- other ranks ----------------------------------------------------------------------------

    def follow(self) -> None:
        """Train when rank 0 asks for it, as any other rank, until the phase is over."""
        self._offered = False
        self._got = threading.Event()
        self._error: BaseException | None = None
        lease = self.shared.leases[self.ranks.rank]
        threading.Thread(target=self._get_device, args=(lease,), daemon=True).start()
        self._over = False
        if self.shared.offload and self.movable.has_part:
            self.trainer.onload()
        while not self._over:
            said = self._next()
            if said.kind == "go":
                self.trainer.train(self._given(said), self.step)
            else:
                self._carry_out(said)
        if self.shared.offload and self.movable.has_part:
            self.trainer.offload()
        # A lease that was not granted yet is nobody's: it would be granted to a rank that left.
        lease.cancel()

    def _get_device(self, lease: LeaseTicket) -> None:
        try:
            lease.acquire()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that can tell it
            self._error = error
        self._got.set()

    def _next(self) -> Instruction:
        self._since = time.perf_counter()
        said = self.ranks.next_instruction(self._meanwhile)
        self._over = said.kind == "end"
        return said

    def _meanwhile(self) -> None:
        """Wait a little; offer the device once it is there; notice that the step was aborted."""
        self.groups.receive()
        if self._offered:
            waited = _WAITED * (time.perf_counter() - self._since)
            trains = self.ranks.rank < self.ranks.size
            time.sleep(min(max(waited, _POLL), _POLL_OFFERED) if trains else _POLL_OFFERED)
        elif self._got.wait(_POLL_BUSY):
            if self._error is not None:
                raise self._error
            self._offered = True
            self.ranks.offer(self.step)

    def _carry_out(self, said: Instruction) -> None:
        if said.kind == "move":
            with suppress(MoveFailed):  # rank 0 says so
                self.ranks.move(self.movable, said.before, said.size)

    def _given(self, said: Instruction) -> Iterator[Any]:
        """Batches that this rank takes part in, from the first one to leaving."""
        while self.movable.has_part and not self._over:
            if said.kind == "go":
                yield self.prepare(self.groups.batch(said.done))
            else:
                self._carry_out(said)
            if self.movable.has_part and not self._over:
                said = self._next()
