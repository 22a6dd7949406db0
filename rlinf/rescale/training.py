"""Training on global batches as they become known, by a number of ranks that changes meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from rlinf.data.sequences import PromptGroup
from rlinf.rescale.choices import DeviceChoice, TrainerState, largest_size, resize
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
        self._movable: MovableTrainer
        self._times = TrainerTimes()

    def attach(self, trainer: Any) -> None:
        """See :meth:`TrainingHook.attach`; a TypeError where a trainer's ranks cannot change."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"the ranks of a {type(trainer).__name__} cannot change in a run")
        self._trainer, self._movable = trainer, MovableTrainer(trainer, keep=self._ranks.rank == 0)

    @property
    def has_part(self) -> bool:
        """See :attr:`TrainingHook.has_part`."""
        return self._movable.has_part

    def train(
        self,
        batches: GlobalBatches,
        prepare: Callable[[list[PromptGroup]], Any],
        *,
        step: int,
        shared: TrainerDevices,
    ) -> dict[str, Any] | None:
        """See :meth:`TrainingHook.train`; ``choices`` among the metrics is what was decided."""
        self._groups, self._prepare, self._step, self._shared = batches, prepare, step, shared
        self._count, self._choices = len(batches), list[DeviceChoice]()
        if self._ranks.rank > 0:
            self._follow()
            return None
        self._waited, self._most = 0.0, 1
        # Whether it was not waited yet for devices that the rollout, which has ended, gives up.
        self._patient = True
        metrics = self._lead()
        metrics["choices"] = [asdict(choice) for choice in self._choices]
        return metrics

    def close(self) -> None:
        """See :meth:`TrainingHook.close`."""
        self._ranks.close()

    # -- rank 0 ---------------------------------------------------------------------------------

    def _lead(self) -> dict[str, Any]:
        """Train, as rank 0; returns the metrics of the phase and what was decided."""
        self._groups.batch(0)  # before it the device is of no use
        with self._shared.leases[0]:
            if self._shared.offload:
                self._trainer.onload()
            self._settle()
            first, early = self._ranks.size, self._groups.known() < self._count
            begin = time.perf_counter()
            metrics: dict[str, Any] = self._trainer.train(self._batches(), self._step)
            metrics["time/update"] = time.perf_counter() - begin - self._waited
            if early and first < self._ranks.size:
                # The next step is likely to begin so too, when the other ranks' devices are busy.
                self._move(first, self._count)
            self._say("end", self._count)
            if self._shared.offload:
                self._trainer.offload()
        self._times.end_phase()
        whole = self._times.seconds_left(0, self._count)
        last = self._times.seconds_left(self._count - 1, self._count)
        speeds = self._times.speeds(self._shared.sizes)
        if whole is not None and last is not None:
            self._shared.leader.post(TrainingSeconds(whole, last, speeds))
        metrics["actor/ranks_most"] = float(self._most)
        return metrics

    def _settle(self) -> None:
        """Wait for the devices of all that have a part, or let fewer ranks have the model.

        Where the rollout has ended, all devices are about to be free. Where it goes on, waiting is
        given up after as long as a move takes.
        """
        wanted, begin = self._ranks.size, time.perf_counter()
        patience: float = self._times.move_seconds or _PATIENCE
        while (offered := self._ranks.offered(self._step)) < wanted:
            ended = self._groups.known() == self._count
            if not ended and time.perf_counter() - begin > patience:
                size = largest_size(self._shared.sizes, offered)
                if self._move(size, 0):
                    reason = f"the rollout goes on; {offered} of {wanted} devices are free"
                    cost = self._times.move_seconds or 0.0
                    self._choices.append(
                        DeviceChoice(action="resize", count=size, reason=reason, cost_seconds=cost)
                    )
                    return
                patience = math.inf
            time.sleep(_POLL)

    def _batches(self) -> Iterator[Any]:
        for number in range(self._count):
            begin = time.perf_counter()
            groups = self._groups.batch(number)
            self._waited += time.perf_counter() - begin
            self._decide(number)
            if self._ranks.size > 1:
                self._say("go", number)
            self._most = max(self._most, self._ranks.size)
            begin = time.perf_counter()
            yield self._prepare(groups)
            seconds = time.perf_counter() - begin
            tokens = sum(len(g.prompt_tokens) + len(c) for g in groups for c in g.completions)
            self._times.note_batch(number, tokens, seconds, self._ranks.size)

    def _decide(self, done: int) -> None:
        choice = self._choice(done, self._ranks.offered(self._step))
        if choice.action == "stay" and self._patient and self._groups.known() == self._count:
            self._patient = False
            hoped = self._choice(done, self._ranks.world_size)
            untimed = hoped.action == "resize" and self._times.move_seconds is None
            if untimed or hoped.gain_seconds > _SOON:
                end = time.perf_counter() + _SOON
                while (offered := self._ranks.offered(self._step)) < self._ranks.world_size:
                    if time.perf_counter() >= end:
                        break
                    time.sleep(_POLL)
                choice = self._choice(done, offered)
        if choice.action == "resize":
            self._choices.append(choice)
            self._move(choice.count, done)  # where it fails, fewer ranks go on

    def _choice(self, done: int, offered: int) -> DeviceChoice:
        return resize(
            TrainerState(
                size=self._ranks.size,
                offered=offered,
                sizes=self._shared.sizes,
                batches=self._count - done,
                seconds_left=self._times.seconds_left(done, self._count),
                move_seconds=self._times.move_seconds,
                speeds=self._times.speeds(self._shared.sizes),
            )
        )

    def _move(self, size: int, done: int) -> bool:
        """Change the number of ranks; whether that succeeded."""
        before = self._ranks.size
        self._ranks.send(Instruction("move", size, before, done))
        try:
            report = self._ranks.move(self._movable, before, size)
        except MoveFailed as error:
            reason = f"the move to {size} ranks failed and was undone: {error}"
            self._choices.append(DeviceChoice(action="stay", count=before, reason=reason))
            return False
        self._times.note_move(report.seconds)
        return True

    def _say(self, kind: Kind, done: int) -> None:
        self._ranks.send(Instruction(kind, self._ranks.size, self._ranks.size, done))

    # -- other ranks ----------------------------------------------------------------------------

    def _follow(self) -> None:
        """Train when rank 0 asks for it, as any other rank, until the phase is over."""
        self._offered = False
        self._got = threading.Event()
        self._error: BaseException | None = None
        lease = self._shared.leases[self._ranks.rank]
        threading.Thread(target=self._get_device, args=(lease,), daemon=True).start()
        self._over = False
        while not self._over:
            said = self._next()
            if said.kind == "go":
                self._trainer.train(self._given(said), self._step)
            else:
                self._carry_out(said)
        self._offload()
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
        said = self._ranks.next_instruction(self._meanwhile)
        self._over = said.kind == "end"
        return said

    def _meanwhile(self) -> None:
        """Wait a little; offer the device once it is there; notice that the step was aborted."""
        self._groups.receive()
        if self._offered:
            waited = _WAITED * (time.perf_counter() - self._since)
            trains = self._ranks.rank < self._ranks.size
            time.sleep(min(max(waited, _POLL), _POLL_OFFERED) if trains else _POLL_OFFERED)
        elif self._got.wait(_POLL_BUSY):
            if self._error is not None:
                raise self._error
            self._onload()  # not before: the rollout may have the device until now
            self._offered = True
            self._ranks.offer(self._step)

    def _carry_out(self, said: Instruction) -> None:
        if said.kind == "move":
            self._onload()  # what is given to others is read from the device
            with suppress(MoveFailed):  # rank 0 says so
                self._ranks.move(self._movable, said.before, said.size)
            if not self._offered:
                self._offload()

    def _onload(self) -> None:
        if self._shared.offload and self._movable.has_part:
            self._trainer.onload()

    def _offload(self) -> None:
        if self._shared.offload and self._movable.has_part:
            self._trainer.offload()

    def _given(self, said: Instruction) -> Iterator[Any]:
        """Batches that this rank takes part in, from the first one to leaving."""
        while self._movable.has_part and not self._over:
            if said.kind == "go":
                yield self._prepare(self._groups.batch(said.done))
            else:
                self._carry_out(said)
            if self._movable.has_part and not self._over:
                said = self._next()
