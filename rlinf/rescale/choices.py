"""When devices change hands inside a step: pure functions of a small state.

A rollout begins on all devices, those of the trainer included. Towards its end few sequences run,
and a decoding step costs almost the same for few as for many: so they are brought together on fewer
workers, and what these leave is trained on at once. Each choice says why, what it costs and what it
is expected to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rlinf.rescale.length_forecast import PARTS, TokensLeft

Action = Literal["stay", "release", "resize", "borrow"]
Item = TypeVar("Item")

_WORTH = 0.02
"""Part of the remaining time below which a gain is not worth a move."""

_QUEUED = 0.5
"""Part of the longest sequence's steps in which all others must be done for some to wait."""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """What a policy decides, and why, in words with the numbers that decided.

    The actions are ``stay``; ``release``: ``count`` workers of the rollout give up their devices;
    ``resize``: the trainer gets another number of ranks; ``borrow``: an account of what the rollout
    gained by devices of the trainer, on which it begins in any case.
    """

    action: Action
    count: int
    reason: str
    cost_seconds: float = 0.0  # of carrying it out
    gain_seconds: float = 0.0  # by which the step is expected to be shorter, the cost taken off
    numbers: Mapping[str, float] = field(default_factory=dict)


def _stay(count: int, reason: str, **numbers: float) -> DeviceChoice:
    return DeviceChoice(action="stay", count=count, reason=reason, numbers=numbers)


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Seconds of a decoding step: ``fixed + sequences · per_sequence``."""

    fixed: float
    per_sequence: float

    def of(self, sequences: float) -> float:
        """Seconds of one step of an engine that runs so many sequences."""
        return self.fixed + self.per_sequence * sequences


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """Where a rollout stands.

    Its workers are those that have their devices, in the order in which they would give them up.
    """

    running: tuple[int, ...]  # unfinished sequences of each worker
    total: int  # sequences of the step
    capacity: int  # sequences that one worker runs at once
    left: TokensLeft  # of the running sequences
    decode: DecodeCost  # of one worker
    handover_seconds: float  # of bringing one sequence to another worker
    train_seconds: float | None  # of the whole step by one rank; None: not known yet
    last_seconds: float  # of these, the last global batch, which waits for the last sequence
    ready: int  # batches that could be trained on now
    trainer_sizes: tuple[int, ...]  # ranks that the trainer can have, ascending
    speeds: Mapping[int, float] = field(default_factory=dict)  # see `speed`
    trainer_devices: int = 0  # that it has already
    rollout_bias: float = 1.0  # factor on the predicted time that it goes on once workers have left


def release(state: RolloutState) -> DeviceChoice:
    """How many workers should give their devices up now.

    Tried is every number that lets the trainer have a legal size, at once and after some of the
    decoding steps that are left: few sequences cost less to bring together, and a trainer that
    would have nothing left to do can begin later. One worker may leave more than the others run at
    once, where all have begun and the longest, which go first, take much longer than the rest.

    Where the trainer is s times as fast as one rank in the last g of the r seconds that the rollout
    goes on, and S times with all devices, the step ends after ``r + max(W − g · s, L) / S``, where
    W is what one rank would train for and L the part of it that is the last batch's, which cannot
    be trained on before the last sequence has ended. What r was beside what the time of decoding
    steps makes of it is learned from steps before: an engine is slower beside a trainer, and does
    more than decode. Until W is known, half of the workers stop when half of the sequences have
    ended.
    """
    live, sequences = len(state.running), sum(state.running)
    if not sequences:
        return _stay(0, "no sequence runs")
    if live == 1 or not state.ready:
        return _stay(0, "one worker is left" if live == 1 else "no global batch is complete")
    if state.train_seconds is None:
        return _by_threshold(state)
    outlook = _Outlook(state, state.train_seconds)
    now = outlook.seconds_left(0)
    # More than a legal size of the trainer needs would only be missed by the rollout.
    counts = {size - state.trainer_devices for size in state.trainer_sizes}
    options = {
        count: outlook.seconds_left(count)
        for count in sorted(counts)
        if 0 < count < live and _legal(state, count)
    }
    best = min(options, key=options.__getitem__, default=0)
    gain = now - options.get(best, now)
    points = range(1, len(PARTS))
    later = min(
        (outlook.seconds_left(count, point) for count in options for point in points), default=now
    )
    numbers = {
        "running": float(sequences), "seconds_left": now, "ready": float(state.ready),
        "steps_left": state.left.longest,
    }  # fmt: skip
    where = f"{sequences} sequences run on {live} workers"
    if gain <= _WORTH * now:
        return _stay(0, f"{where}; moving saves {max(gain, 0.0):.3f} s", **numbers)
    if later < now - gain - _WORTH * gain:
        why = f"{where}; moving later saves {now - later:.3f} s, now {gain:.3f}"
        return _stay(0, why, **numbers)
    return DeviceChoice(
        action="release",
        count=best,
        reason=f"{sequences} of {state.total} sequences run; on {live - best} of {live} workers "
        f"they and the training end {gain:.3f} s earlier",
        cost_seconds=_handover(state, best),
        gain_seconds=gain,
        numbers=numbers
        | {"rollout_seconds": outlook.together(best), "rollout_bias": state.rollout_bias},
    )


def _by_threshold(state: RolloutState) -> DeviceChoice:
    live, sequences = len(state.running), sum(state.running)
    count = live // 2
    fits = sequences <= (live - count) * state.capacity
    while count and not _legal(state, count):
        count -= 1
    if 2 * sequences > state.total or not fits or not count:
        why = f"{sequences} of {state.total} sequences run, and training was not timed yet"
        return _stay(0, why)
    return DeviceChoice(
        action="release",
        count=count,
        reason=f"{sequences} of {state.total} sequences run, not more than half; training was not "
        "timed yet",
        cost_seconds=_handover(state, count),
        numbers={"running": float(sequences), "ready": float(state.ready)},
    )


def _legal(state: RolloutState, count: int) -> bool:
    """Whether the sequences fit on the others, and the trainer gets a size that it had not."""
    left = len(state.running) - count
    fits = sum(state.running) <= left * state.capacity or (count == 1 and _may_wait(state, left))
    before = largest_size(state.trainer_sizes, state.trainer_devices)
    return fits and largest_size(state.trainer_sizes, state.trainer_devices + count) > before


def _may_wait(state: RolloutState, workers: int) -> bool:
    """Whether so many workers, full all the time, have done all but the longest long before it.

    Then some can wait, as long as the longest get the first places: nobody waited yet, and what one
    worker brings comes in order. What several bring could wait behind shorter ones.
    """
    begun = max(state.running) <= state.capacity
    full = sum(state.running) * state.left.mean / (workers * state.capacity)
    return begun and full <= _QUEUED * state.left.longest


def largest_size(sizes: Iterable[int], devices: int) -> int:
    """The largest legal number of ranks on so many devices; 0: none."""
    return max((size for size in sizes if size <= devices), default=0)


def speed(speeds: Mapping[int, float], size: int) -> float:
    """How many times as fast as one rank so many train: as measured, else as many times."""
    return speeds.get(size, float(size))


def _handover(state: RolloutState, count: int) -> float:
    return state.handover_seconds * sum(state.running[:count])


class _Outlook:
    """When rollout and training end, for each number of workers that could leave.

    Many numbers are tried for one state, so what they share is computed once.
    """

    def __init__(self, state: RolloutState, train_seconds: float) -> None:
        self.state, self.train_seconds = state, train_seconds
        self.live, self.sequences = len(state.running), sum(state.running)
        self.most = max(state.running)
        devices = range(state.trainer_devices, state.trainer_devices + self.live + 1)
        sizes = [largest_size(state.trainer_sizes, number) for number in devices]
        self.speeds = [speed(state.speeds, size) for size in sizes]
        self.handovers = [_handover(state, count) for count in range(self.live)]

    def seconds_left(self, count: int, point: int = 0) -> float:
        """Until rollout and training have ended, where ``count`` workers give their devices up.

        They do so after the part ``point`` of the :data:`PARTS` of the decoding steps left.
        """
        state, left = self.state, self.state.left
        tokens = left.mean - left.to_go[point]
        before = self._decoding(PARTS[point] * left.longest, tokens * self.most)
        together = self.together(count, point) * (state.rollout_bias if count else 1.0)
        rest = max(self.train_seconds - together * self.speeds[count], state.last_seconds)
        return before + together + rest / self.speeds[self.live]

    def together(self, count: int, point: int = 0) -> float:
        """Seconds of the rollout after so many workers have left, by the time of decoding steps."""
        left = self.state.left
        busiest = self.sequences / (self.live - count) if count else self.most
        seconds = self._decoding((1 - PARTS[point]) * left.longest, left.to_go[point] * busiest)
        return seconds + self.handovers[count] * left.going[point]

    def _decoding(self, steps: float, tokens: float) -> float:
        """Seconds in which one worker takes so many steps and generates so many tokens in them."""
        return steps * self.state.decode.fixed + tokens * self.state.decode.per_sequence


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a trainer stands between two optimizer steps."""

    size: int  # ranks that train
    offered: int  # devices that it could have
    sizes: tuple[int, ...]  # ranks that it can have, ascending
    batches: int  # optimizer steps that are left
    seconds_left: float | None  # of these by one rank; None: not known yet
    move_seconds: float | None  # of changing the number of ranks; None: not known yet
    speeds: Mapping[int, float] = field(default_factory=dict)  # see `speed`


def resize(state: TrainerState) -> DeviceChoice:
    """How many ranks should take the next optimizer steps.

    A larger number pays where ``seconds_left · (1/s − 1/S)``, with the speeds s of the present and
    S of the larger number, is more than the move there and the move back, which the next step needs
    where it begins with fewer devices.
    """
    size = largest_size(state.sizes, state.offered)
    if size <= state.size or not state.batches:
        return _stay(state.size, "no more devices for it")
    if state.seconds_left is None or state.move_seconds is None:
        why = f"{size} devices are free; moves were not timed yet"
        return DeviceChoice(action="resize", count=size, reason=why)
    present, larger = (speed(state.speeds, number) for number in (state.size, size))
    saved = state.seconds_left * (1 / present - 1 / larger)
    # The way back is another move, unless ranks train already that would make it anyway.
    cost = state.move_seconds * (2 if state.size == state.sizes[0] else 1)
    numbers = {"batches": float(state.batches), "seconds_left": state.seconds_left}
    if saved <= cost:
        why = f"{size} ranks would save {saved:.3f} s, moving takes {cost:.3f} s"
        return _stay(state.size, why, **numbers)
    return DeviceChoice(
        action="resize",
        count=size,
        reason=f"{state.batches} batches are left: {size} ranks save {saved:.3f} s, moving takes "
        f"{cost:.3f} s",
        cost_seconds=cost,
        gain_seconds=saved - cost,
        numbers=numbers,
    )


def borrow(
    *, sequences: int, tokens: float, own: int, trainers: int, decode: DecodeCost
) -> DeviceChoice:
    """What a rollout gained by having begun on the trainer's devices too; ``stay``: nothing.

    This decides nothing: before a batch is complete nobody else could use them.

    Args:
        sequences: Of the step.
        tokens: Mean of a sequence, for the time in which many run.
        own: Devices of the rollout alone, one or more.
        trainers: Devices of the trainer.
        decode: Of one worker.
    """
    alone = tokens * decode.of(sequences / own)
    together = tokens * decode.of(sequences / (own + trainers))
    if alone - together <= _WORTH * together:
        return _stay(0, f"{own + trainers} workers were not faster than {own}")
    why = (
        "an account, not a choice: the rollout began on the trainer's devices, which nobody else "
        f"could use before a batch was complete; {own + trainers} workers decode in about "
        f"{together:.3f} s what would take {own} about {alone:.3f} s"
    )
    return DeviceChoice(action="borrow", count=trainers, reason=why, gain_seconds=alone - together)


def shares(giving: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Which worker takes each group, as an index into ``loads``, by the sequences that run.

    Workers are filled one after the other up to the mean of what will run; the last takes the rest.
    """
    mean = (sum(giving) + sum(loads)) / len(loads)
    filled, found, target = list(loads), [], 0
    for running in giving:
        while target < len(loads) - 1 and filled[target] + running > mean:
            target += 1
        filled[target] += running
        found.append(target)
    return found


def from_both_ends(items: Sequence[Item]) -> list[Item]:
    """The first, the last, the second, the last but one, and so on to those in the middle."""
    ahead, back = iter(items), reversed(items)
    return [next(back if number % 2 else ahead) for number in range(len(items))]
