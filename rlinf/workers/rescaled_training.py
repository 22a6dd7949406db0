"""Training on global batches as they become known, by a number of ranks that changes meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rlinf.data.sequences import PromptGroup
from rlinf.flow.stream import InputStream
from rlinf.rescale.decisions import Choice, TrainerState, complete_batches, largest_size, resize
from rlinf.scheduler import Channel
from rlinf.scheduler.device_lock import LeaseTicket
from rlinf.trainers.language.company import Command, Company, MoveFailed
from rlinf.trainers.language.protocol import LanguageTrainer
from rlinf.trainers.language.rescale import Rescalable
from rlinf.workers.moving_round import Progress, Trained
from rlinf.workers.training_times import Timings

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
class SharedTrainer:
    """How trainer and rollout share devices inside a step; rank r of either has device r.

    Args:
        leases: Of each trainer rank's device.
        leader: Mailbox of the rollout worker that decides.
        sizes: Ranks that the trainer can have, ascending.
        offload: Whether a rank frees its device when the phase is over.
    """

    leases: tuple[LeaseTicket, ...]
    leader: Channel
    sizes: tuple[int, ...]
    offload: bool


class GroupsByLength:
    """Scored groups as global batches, those with the shortest longest answers first.

    Args:
        stream: Groups, the source of each its slot, and :class:`Progress` of those to come.
        slots: Groups of the step.
        size: Groups of a global batch.
    """

    def __init__(self, stream: InputStream, *, slots: int, size: int) -> None:
        self._stream, self._size = stream, size
        self._bounds = dict.fromkeys(range(slots), 0)
        self._longest: dict[int, int] = {}
        self.groups: dict[int, PromptGroup] = {}

    def _take(self, item: Any) -> None:
        if isinstance(item.payload, Progress):
            for slot, bound in item.payload.bounds.items():
                if slot in self._bounds:
                    self._bounds[slot] = max(self._bounds[slot], bound)
            return
        self.groups[item.source] = item.payload
        self._longest[item.source] = max(len(c) for c in item.payload.completions)
        self._bounds.pop(item.source)

    def hear(self) -> None:
        """Take in what has arrived; raises where the step was aborted."""
        while self._stream.ready():
            self._take(next(self._stream))

    def known(self) -> int:
        """How many batches are complete now."""
        self.hear()
        return len(complete_batches(self._longest, self._bounds, self._size))

    def batch(self, number: int) -> list[PromptGroup]:
        """A global batch, once its members are known."""
        while True:
            found = complete_batches(self._longest, self._bounds, self._size)
            if len(found) > number:
                return [self.groups[slot] for slot in found[number]]
            self._take(next(self._stream))


@dataclass
class Phase:
    """One training phase on one rank of a company.

    Args:
        company: All ranks of the trainer.
        trainer: This rank's.
        shared: How devices are shared.
        groups: Batches as they become known.
        count: Global batches of the phase.
        step: Its number.
        prepare: From groups to a batch with everything that the loss needs.
        timings: Of phases so far.
    """

    company: Company
    trainer: Any
    shared: SharedTrainer
    groups: GroupsByLength
    count: int
    step: int
    prepare: Callable[[list[PromptGroup]], Any]
    timings: Timings
    choices: list[Choice] = field(default_factory=list)

    # -- rank 0 ---------------------------------------------------------------------------------

    def lead(self) -> dict[str, Any]:
        """Train, as rank 0; returns the metrics of the phase and what was decided."""
        self.groups.batch(0)  # before it the device is of no use
        with self.shared.leases[0]:
            if self.shared.offload:
                self.trainer.onload()
            self._settle()
            first, early = self.company.size, self.groups.known() < self.count
            begin = time.perf_counter()
            metrics: dict[str, Any] = self.trainer.train_stream(self._batches(), self.step)
            metrics["time/update"] = time.perf_counter() - begin - self._waited
            if early and first < self.company.size:
                # The next step is likely to begin so too, when the other ranks' devices are busy.
                self._move(first, self.count)
            self.company.say(self._command("end", self.count))
            if self.shared.offload:
                self.trainer.offload()
        self.timings.end_phase()
        whole = self.timings.seconds_left(0, self.count)
        last = self.timings.seconds_left(self.count - 1, self.count)
        if whole is not None and last is not None:
            self.shared.leader.post(Trained(whole, last, self._speeds()))
        metrics["actor/ranks_most"] = float(self._most)
        return metrics

    _waited = 0.0
    _most = 1
    _patient = True
    """Whether it was not waited yet for devices that the rollout, which has ended, gives up."""

    def _settle(self) -> None:
        """Wait for the devices of all that have a part, or let fewer ranks have the model.

        Where the rollout has ended, all devices are about to be free. Where it goes on, waiting is
        given up after as long as a move takes.
        """
        wanted, begin = self.company.size, time.perf_counter()
        patience: float = self.timings.move_seconds or _PATIENCE
        while (offered := self.company.offered(self.step)) < wanted:
            ended = self.groups.known() == self.count
            if not ended and time.perf_counter() - begin > patience:
                size = largest_size(self.shared.sizes, offered)
                if self._move(size, 0):
                    reason = f"the rollout goes on; {offered} of {wanted} devices are free"
                    cost = self.timings.move_seconds or 0.0
                    self.choices.append(
                        Choice(action="resize", count=size, reason=reason, cost_seconds=cost)
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
            if self.company.size > 1:
                self.company.say(self._command("go", number))
            self._most = max(self._most, self.company.size)
            begin = time.perf_counter()
            yield self.prepare(groups)
            seconds, tokens = time.perf_counter() - begin, sum(map(_tokens, groups))
            self.timings.note_batch(number, tokens, seconds, self.company.size)

    def _decide(self, done: int) -> None:
        choice = self._choice(done, self.company.offered(self.step))
        if choice.action == "stay" and self._patient and self.groups.known() == self.count:
            self._patient = False
            hoped = self._choice(done, self.company.world_size)
            untimed = hoped.action == "resize" and self.timings.move_seconds is None
            if untimed or hoped.gain_seconds > _SOON:
                self._wait_for_devices(self.company.world_size, _SOON)
                choice = self._choice(done, self.company.offered(self.step))
        if choice.action == "resize":
            self.choices.append(choice)
            self._move(choice.count, done)  # where it fails, fewer ranks go on

    def _choice(self, done: int, offered: int) -> Choice:
        return resize(
            TrainerState(
                size=self.company.size,
                offered=offered,
                sizes=self.shared.sizes,
                batches=self.count - done,
                seconds_left=self.timings.seconds_left(done, self.count),
                move_seconds=self.timings.move_seconds,
                speeds=self._speeds(),
            )
        )

    def _speeds(self) -> dict[int, float]:
        return {size: self.timings.speed(size) for size in self.shared.sizes}

    def _wait_for_devices(self, wanted: int, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while self.company.offered(self.step) < wanted and time.perf_counter() < end:
            time.sleep(_POLL)

    def _move(self, size: int, done: int) -> bool:
        """Change the number of ranks; whether that succeeded."""
        before = self.company.size
        self.company.say(Command("move", size, before, done))
        try:
            report = self.company.move(self.trainer, before, size)
        except MoveFailed as error:
            reason = f"the move to {size} ranks failed and was undone: {error}"
            self.choices.append(Choice(action="stay", count=before, reason=reason))
            return False
        self.timings.note_move(report.seconds)
        return True

    def _command(self, kind: Any, done: int) -> Command:
        return Command(kind, self.company.size, self.company.size, done)

    # -- other ranks ----------------------------------------------------------------------------

    def help(self) -> None:
        """Train when rank 0 asks for it, as any other rank, until the phase is over."""
        self._offered = False
        self._got = threading.Event()
        self._error: BaseException | None = None
        lease = self.shared.leases[self.company.rank]
        threading.Thread(target=self._get_device, args=(lease,), daemon=True).start()
        self._over = False
        if self.shared.offload and self.trainer.has_part:
            self.trainer.onload()
        while not self._over:
            command = self._listen()
            if command.kind == "go":
                self.trainer.train_stream(self._given(command), self.step)
            else:
                self._obey(command)
        if self.shared.offload and self.trainer.has_part:
            self.trainer.offload()
        # A lease that was not granted yet is nobody's: it would be granted to a rank that left.
        lease.cancel()

    def _get_device(self, lease: LeaseTicket) -> None:
        try:
            lease.acquire()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that can tell it
            self._error = error
        self._got.set()

    def _listen(self) -> Command:
        self._since = time.perf_counter()
        command = self.company.listen(self._meanwhile)
        self._over = command.kind == "end"
        return command

    def _meanwhile(self) -> None:
        """Wait a little; offer the device once it is there; notice that the step was aborted."""
        self.groups.hear()
        if self._offered:
            waited = _WAITED * (time.perf_counter() - self._since)
            trains = self.company.rank < self.company.size
            time.sleep(min(max(waited, _POLL), _POLL_OFFERED) if trains else _POLL_OFFERED)
        elif self._got.wait(_POLL_BUSY):
            if self._error is not None:
                raise self._error
            self._offered = True
            self.company.offer(self.step)

    def _obey(self, command: Command) -> None:
        if command.kind != "move":
            return
        try:
            self.company.move(self.trainer, command.before, command.size)
        except MoveFailed:
            return  # rank 0 says so

    def _given(self, command: Command) -> Iterator[Any]:
        """Batches that this rank takes part in, from the first one to leaving."""
        while self.trainer.has_part and not self._over:
            if command.kind == "go":
                yield self.prepare(self.groups.batch(command.done))
            else:
                self._obey(command)
            if self.trainer.has_part and not self._over:
                command = self._listen()


def _tokens(group: PromptGroup) -> int:
    """That are trained on, prompts included."""
    return sum(len(group.prompt_tokens) + len(completion) for completion in group.completions)


def choices_as_data(choices: list[Choice]) -> list[dict[str, Any]]:
    """For a report that travels."""
    return [asdict(choice) for choice in choices]


def rescalable(trainer: LanguageTrainer) -> Rescalable:
    """The trainer, if its ranks can change.

    Raises:
        TypeError: They cannot.
    """
    if not isinstance(trainer, Rescalable):
        raise TypeError(f"the ranks of a {type(trainer).__name__} cannot change in a run")
    return trainer
