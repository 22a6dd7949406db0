"""Processes of which some train: who does, how their number changes, and what if that fails.

All processes exist from the start. Those that train at present are ranks 0 to n − 1, and rank 0
leads: what it writes into a key-value store all others read in order. Waiting for the store takes
no device and depends on nobody but rank 0, so that a rank can be busy with getting its device while
it waits. What ranks exchange in training and in a move goes through process groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlinf.errors import RLinfError
from rlinf.rescale.movable_trainer import MovableTrainer, Prepared
from rlinf.scheduler.accelerators import collective_backend, set_current_device
from rlinf.trainers.ranks import Grid

Kind = Literal["go", "move", "end"]

_KEPT = 4096
"""Instructions that stay in the store; every rank has read what is older."""


class MoveFailed(RLinfError):  # noqa: N818 - what happened, as StepAborted
    """A change of the number of ranks did not succeed; everything is as it was before."""


@dataclass(frozen=True)
class Instruction:
    """What rank 0 wants of all.

    ``go``: the ranks that train take the next global batch; ``move``: their number changes;
    ``end``: the phase is over.
    """

    kind: Kind
    size: PositiveInt  # ranks that train, after it
    before: PositiveInt  # ranks that train, before it
    done: NonNegativeInt = 0  # global batches of the phase that were trained on


_INSTRUCTION = TypeAdapter(Instruction)


@dataclass(frozen=True)
class MoveReport:
    """What a move took on one rank."""

    seconds: float
    prepared: float  # part of it in which the groups and the new division were made
    transferred: float  # part of it in which tensors travelled
    bytes_sent: int  # by this rank, everything in float32


class JoiningRanks:
    """All ranks of one trainer, of which a number that changes has the model.

    Args:
        rank: Of this process.
        world_size: Processes.
        store: torch's key-value store at which they meet; its values are plain data, whoever wrote
            them.
        device: Where this process computes.
        timeout_s: Seconds after which a lost process is given up.

    Attributes:
        size: Ranks that train at present.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Store,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        self.size = 1
        self._timeout = timedelta(seconds=timeout_s)
        set_current_device(str(self.device))
        self._store = store
        dist.init_process_group(
            collective_backend(str(self.device)),
            store=PrefixStore("joining_ranks", self._store),
            rank=rank,
            world_size=world_size,
            timeout=self._timeout,
        )
        self._group: Any = None
        self._offer: str | None = None
        self._read = 0
        self._moves = 0

    # -- what rank 0 says -----------------------------------------------------------------------

    def send(self, instruction: Instruction) -> None:
        """Tell all ranks, of which rank 0 is the one that may."""
        self._store.set(f"instruction/{self._read}", json.dumps(asdict(instruction)))
        # Otherwise all would stay in memory for the whole run.
        if self._read >= _KEPT:
            self._delete(f"instruction/{self._read - _KEPT}")
        self._read += 1

    def _delete(self, *keys: str) -> None:
        """Give the memory of keys back that nobody reads any more."""
        with suppress(RuntimeError):  # a store that cannot delete keeps them
            for key in keys:
                self._store.delete_key(key)

    def next_instruction(self, while_waiting: Callable[[], None]) -> Instruction:
        """The next instruction of rank 0; an RLinfError where something else was written.

        ``while_waiting`` is called between two looks, lets some time pass, may raise to stop it.
        """
        key = f"instruction/{self._read}"
        while not self._store.check([key]):
            while_waiting()
        self._read += 1
        data = self._store.get(key)
        try:
            said = _INSTRUCTION.validate_json(data)
        except ValidationError as error:
            raise RLinfError(f"the store holds no instruction, but {data[:80]!r}") from error
        if max(said.size, said.before) > self.world_size:
            raise RLinfError(f"{said} is for more than {self.world_size} ranks")
        self.size = said.before
        return said

    def offer(self, phase: int) -> None:
        """Say that this rank has its device, and may be made to train in a phase."""
        key = f"offer/{phase}/{self.rank}"
        self._store.set(key, "1")
        former, self._offer = self._offer, key
        if former not in (None, key):
            self._delete(former)

    def offered(self, phase: int) -> int:
        """The largest n for which ranks 0 to n − 1 have offered; rank 0 always has."""
        count = 1
        while count < self.world_size and self._store.check([f"offer/{phase}/{count}"]):
            count += 1
        return count

    # -- a move ---------------------------------------------------------------------------------

    def move(self, trainer: MovableTrainer, before: int, after: int) -> MoveReport:
        """Let another number of ranks train; all ranks call it, each with its own trainer.

        The new group is made before the old one is left, and left only when every rank has its
        part of the model.

        Raises:
            MoveFailed: A rank could not get ready or not transfer, or did not answer in time. All
                that were to take part raise it, with what went wrong on which; those that trained
                have their division still, and may go on with it.
            RuntimeError: The process groups could not be made, or a rank was lost after all had
                agreed.
        """
        begin = time.perf_counter()
        number, members = self._moves, max(before, after)
        self._moves += 1
        # By all ranks in the same order, or the names of the groups would not match.
        union = own = dist.new_group(range(members), timeout=self._timeout)
        if after < before:
            own = dist.new_group(range(after), timeout=self._timeout) if after > 1 else None
        if self.rank == 0 and number:
            # New groups are made by all ranks together: all have left the last move.
            self._delete(*_keys_of(number - 1, self.world_size))
        if self.rank >= members:
            self.size = after
            return MoveReport(0.0, 0.0, 0.0, 0)
        trial = _Trial(number, members, union, own if 1 < after > self.rank else None)
        prepared = self._prepare(trial, trainer, before, after)
        ready = time.perf_counter()
        self._transfer(trial, prepared)
        moved = time.perf_counter()
        joins = before <= self.rank < after
        numbers = json.loads(self._store.get(f"numbers/{number}")) if joins else None
        trainer.finish(prepared, numbers)
        former, self._group, self.size = self._group, trial.own, after
        _forget_groups(*(group for group in (former, union) if group is not trial.own))
        seconds = time.perf_counter() - begin
        return MoveReport(seconds, ready - begin, moved - ready, prepared.transfer.bytes_sent)

    def _prepare(self, trial: _Trial, trainer: MovableTrainer, before: int, after: int) -> Prepared:
        prepared: Prepared | None = None
        error: Exception | None = None
        try:
            ranks = None
            if self.rank < after:
                ranks = Grid.over(trial.own, rank=self.rank, size=after, device=self.device)
            prepared = trainer.prepare(before=before, after=after, rank=self.rank, ranks=ranks)
            if self.rank == 0:
                numbers = json.dumps(trainer.numbers())
                self._store.set(f"numbers/{trial.number}", numbers)
        except Exception as caught:  # noqa: BLE001 - told to all ranks, whatever it is
            error = caught
        self._agree(trial, "prepared", error)
        assert prepared is not None
        return prepared

    def _transfer(self, trial: _Trial, prepared: Prepared) -> None:
        error: Exception | None = None
        try:
            prepared.transfer.run(trial.union, self.device)
        except Exception as caught:  # noqa: BLE001
            error = caught
            with suppress(Exception):  # then the others miss this rank, which is as good
                prepared.transfer.exchange_nothing(trial.union, self.device)
        self._agree(trial, "moved", error)

    def _agree(self, trial: _Trial, phase: str, error: Exception | None) -> None:
        """Learn from rank 0, who asks all, whether every member came so far; else MoveFailed.

        Rank 0 waits for all votes together as long as for a lost process, from its own on. The
        others wait for what it says, which must be the same for all: also where it is as late as
        that itself.
        """
        place = f"vote/{trial.number}/{phase}"
        words = "ok" if error is None else f"{type(error).__name__}: {error}"
        self._store.set(f"{place}/{self.rank}", words)
        if self.rank == 0:
            end = time.monotonic() + self._timeout.total_seconds()
            found = [
                self._vote(f"{place}/{rank}", end - time.monotonic())
                for rank in range(trial.members)
            ]
            bad = [f"rank {rank}: {vote}" for rank, vote in enumerate(found) if vote != "ok"]
            self._store.set(place, "; ".join(bad) or "ok")
        verdict = self._vote(place, 3 * self._timeout.total_seconds())
        if verdict != "ok":
            _forget_groups(trial.union, trial.own)
            raise MoveFailed(verdict) from error

    def _vote(self, key: str, seconds: float) -> str:
        try:
            # What is there already is found in any time; no time at all would mean for ever.
            self._store.wait([key], timedelta(seconds=max(seconds, 0.01)))
        except (RuntimeError, ValueError):
            return "does not answer"
        return bytes(self._store.get(key)).decode()

    def close(self) -> None:
        """End all process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass
class _Trial:
    """A move that is not over."""

    number: int
    members: int  # ranks that take part, from 0 on
    union: Any  # process group of them
    own: Any  # process group of the ranks that are to train, where this is one of several


def _keys_of(number: int, members: int) -> list[str]:
    """What the ranks wrote into the store for a move."""
    places = [f"vote/{number}/{phase}" for phase in ("prepared", "moved")]
    votes = [f"{place}/{rank}" for place in places for rank in range(members)]
    return [f"numbers/{number}", *places, *votes]


def _forget_groups(*groups: Any) -> None:
    """Leave process groups, also such whose peers are gone, each once; None is none."""
    for group in dict.fromkeys(groups):
        if group is not None:
            with suppress(Exception):  # what broke it is told elsewhere
                dist.destroy_process_group(group)
