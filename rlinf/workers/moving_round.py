"""Groups that one worker begins and another ends, and what rollout workers tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlinf.data.sequences import Completion
from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest, KeptCache
from rlinf.scheduler import Channel
from rlinf.scheduler.device_lock import LeaseTicket
from rlinf.workers.generation_round import Drawn, Round


@dataclass(frozen=True, kw_only=True)
class SharedDevices:
    """How rollout and trainer share devices inside a step; rank r of either has device r.

    Args:
        leases: Of each rollout worker's device.
        mailboxes: Of each rollout worker.
        trainer_sizes: Ranks that the trainer can have, ascending.
        capacity: Sequences that one worker runs at once.
        offload: Whether a worker frees its device when it gives it up.
    """

    leases: tuple[LeaseTicket, ...]
    mailboxes: tuple[Channel, ...]
    trainer_sizes: tuple[int, ...]
    capacity: int
    offload: bool


@dataclass(frozen=True)
class Progress:
    """What the longest answer of some groups that are not complete has at least, by slot."""

    bounds: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class MovedGroup:
    """A group on its way to another worker.

    Args:
        slot: Its slot.
        drawn: Its prompt.
        seeds: Of its completions.
        completions: Ended, interrupted (``abort``), or None where not begun.
        caches: Of the interrupted ones, from an engine that gives them along; otherwise None.
    """

    slot: int
    drawn: Drawn
    seeds: tuple[int, ...]
    completions: tuple[Completion | None, ...]
    caches: tuple[KeptCache | None, ...]

    @property
    def unfinished(self) -> int:
        """Completions that go on."""
        return sum(c is None or c.stop_reason == "abort" for c in self.completions)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a worker tells the one that decides.

    Args:
        rank: Of the worker.
        step: Number of the training step that it is about.
        running: Tokens of each unfinished sequence.
        ended: Tokens of sequences that ended, or were cut off, since the last time.
        bounds: As in :class:`Progress`.
        complete: Longest answers of groups that are complete, by slot, since the last time.
        given: Groups that it has sent to others in this step.
        adopted: Groups that it has got from others.
        left: Whether it has given its device up.
    """

    rank: int
    step: int
    running: tuple[int, ...]
    ended: tuple[int, ...]
    bounds: Mapping[int, int]
    complete: Mapping[int, int]
    given: int
    adopted: int
    left: bool = False


@dataclass(frozen=True)
class Leave:
    """Give the device up and bring what runs to others.

    Args:
        loads: Sequences that run on each of those, by rank.
    """

    loads: Mapping[int, int]


@dataclass(frozen=True)
class Guests:
    """Groups from another worker, to be ended here."""

    groups: tuple[MovedGroup, ...]


@dataclass(frozen=True)
class Over:
    """Every group of the step is complete."""


@dataclass(frozen=True)
class Trained:
    """What the last training phase took, as if by one rank.

    Args:
        seconds: All of its batches.
        last_seconds: The last one, whose answers are the longest.
        speeds: How many times as fast as one rank each number of ranks trains.
    """

    seconds: float
    last_seconds: float
    speeds: Mapping[int, float]


class MovingRound(Round):
    """A round whose groups can be brought elsewhere while they are generated."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seeds: dict[int, tuple[int, ...]] = {}
        self._away: set[int] = set()
        self.guests: set[int] = set()
        self.complete: dict[int, int] = {}
        self.given = self.adopted = 0

    def begin(self, slot: int, drawn: Drawn, seeds: Iterable[int]) -> list[GenerationRequest]:
        """See :meth:`Round.begin`."""
        self._seeds[slot] = tuple(seeds)
        return super().begin(slot, drawn, self._seeds[slot])

    def take(self, ended: Iterable[FinishedCompletion]) -> list[Any]:
        """See :meth:`Round.take`; guests leave the round with it."""
        found = super().take(ended)
        for group, slot in found:
            self.complete[slot] = max(len(c) for c in group.completions)
            if slot in self.guests:
                self.guests.discard(slot)
                self.close(slot)
        return found

    def give(self, aborted: Iterable[FinishedCompletion]) -> list[MovedGroup]:
        """The groups that these interrupted completions are of; they are no longer generated here.

        Args:
            aborted: Everything that the engine had not ended.
        """
        partial: dict[int, dict[int, Completion]] = {}
        caches: dict[int, dict[int, KeptCache | None]] = {}
        for item in aborted:
            slot, place = divmod(item.request_id, self._size)
            partial.setdefault(slot, {})[place] = item.completion
            caches.setdefault(slot, {})[place] = item.cache
        moved = []
        for slot in sorted(partial):
            found = {**self._finished[slot], **partial[slot]}
            begun = (found[place] for place in range(self._size))
            moved.append(
                MovedGroup(
                    slot=slot,
                    drawn=self._prompts[slot],
                    seeds=self._seeds[slot],
                    completions=tuple(c if len(c) else None for c in begun),
                    caches=tuple(caches[slot].get(place) for place in range(self._size)),
                )
            )
            if slot in self.guests:
                self.guests.discard(slot)
                self.close(slot)
            else:
                self._away.add(slot)
        self.given += len(moved)
        return moved

    def adopt(self, group: MovedGroup) -> list[GenerationRequest]:
        """What is missing of a group that another worker gave, or this one before."""
        slot = group.slot
        self.adopted += 1
        if slot in self._away:
            self._away.discard(slot)
        else:
            self.guests.add(slot)
        requests = super().begin(slot, group.drawn, group.seeds)
        self._seeds[slot] = group.seeds
        missing = []
        for place, (request, begun) in enumerate(zip(requests, group.completions, strict=True)):
            if begun is not None and begun.stop_reason != "abort":
                self._finished[slot][place] = begun
            else:
                missing.append(replace(request, partial=begun, cache=group.caches[place]))
        return missing

    def bounds(self, engine: Engine) -> dict[int, int]:
        """What the longest answer of each group that is generated here has at least."""
        running = engine.progress()
        found = {}
        for slot, finished in self._finished.items():
            if slot in self._away or slot in self.complete:
                continue
            ended = max((len(completion) for completion in finished.values()), default=0)
            first = slot * self._size
            going = (running.get(first + place, 0) for place in range(self._size))
            found[slot] = max(ended, *going)
        return found
