"""What handing devices over inside a step would save, on a cluster that need not exist.

The same choices as in a run (:mod:`rlinf.rescale.choices`) act on simulated engines and a
simulated trainer. Engines decode as
:class:`~rlinf.planner.simulation.answer_lengths.GenerationModel` says; time
advances in small steps. Nothing here is measured but how long a choice takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlinf.planner.simulation.answer_lengths import GenerationModel
from rlinf.rescale.choices import (
    DecodeCost,
    RolloutState,
    TrainerState,
    largest_size,
    release,
    resize,
)
from rlinf.rescale.length_forecast import LengthForecast
from rlinf.workers.global_batches import complete_batches

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One step of training on a cluster.

    Args:
        generation: How long decoding takes, and how long answers are.
        devices: Of the cluster.
        groups: Prompts of the step.
        group_size: Answers to each.
        batches: Optimizer steps.
        train_seconds: Of the whole step, log-probs included, by one device.
        trainer_sizes: Devices that the trainer can have, ascending.
        scaling: Factor on the trainer's work for each doubling of its devices.
        move_seconds: Of the trainer, from one number of devices to another.
        tokens_per_second: Of reading a partial answer on the device that takes it over.
        switch_seconds: Offloading one component and loading another, on a device they share.
        tick: Step of the simulation [s].
    """

    generation: GenerationModel
    devices: int
    groups: int
    group_size: int
    batches: int
    train_seconds: float
    trainer_sizes: tuple[int, ...]
    scaling: float = 1.03
    move_seconds: float = 1.0
    tokens_per_second: float = 50_000.0
    switch_seconds: float = 0.5
    tick: float = 0.5

    def batch_seconds(self, devices: int) -> float:
        """Training of a global batch on so many devices."""
        work = self.train_seconds * self.scaling ** np.log2(devices)
        return float(work / self.batches / devices)

    @property
    def speeds(self) -> dict[int, float]:
        """How many times as fast as one device each number of them trains."""
        return {size: size / self.scaling ** np.log2(size) for size in self.trainer_sizes}

    @property
    def decode(self) -> DecodeCost:
        """Of one engine."""
        model = self.generation
        return DecodeCost(fixed=model.seconds_fixed, per_sequence=model.seconds_per_sequence)


@dataclass
class Played:
    """What a simulated step took.

    Args:
        seconds: Until rollout and training had ended.
        rollout_seconds: Until the rollout had.
        releases: Times at which workers gave devices up, and how many [s].
        sizes: Times at which the trainer's devices changed, and to how many.
        decision_seconds: Measured processor time of the slowest choice.
    """

    seconds: float = 0.0
    rollout_seconds: float = 0.0
    releases: list[tuple[float, int]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    decision_seconds: float = 0.0


class _Engines:
    """All engines of a rollout, as arrays over the sequences of the step."""

    def __init__(self, setting: Setting, lengths: Ints, engines: int) -> None:
        self._setting = setting
        self.lengths = lengths.astype(float)  # [groups, group_size]
        self.tokens = np.zeros(lengths.shape)
        block = np.arange(setting.groups) * engines // setting.groups
        self.engine = np.broadcast_to(block[:, None], lengths.shape).copy()
        self.stalled = np.zeros(engines)
        self.engines = engines

    @property
    def unfinished(self) -> NDArray[np.bool_]:
        """[groups, group_size] what has not ended."""
        return self.tokens < self.lengths

    def running(self) -> NDArray[np.bool_]:
        """[groups, group_size] what is in a batch: of each engine those that have most tokens."""
        waiting = self.unfinished.ravel()
        engine = self.engine.ravel()
        order = np.lexsort((-self.tokens.ravel(), engine))  # stable
        counted = np.cumsum(waiting[order])
        before = np.zeros(self.engines)
        firsts = np.searchsorted(engine[order], np.arange(self.engines))
        inside = firsts < len(order)
        before[inside] = (counted - waiting[order])[firsts[inside]]
        place = np.empty(len(order))
        place[order] = counted - before[engine[order]]
        found: NDArray[np.bool_] = waiting & (place <= self._setting.generation.max_running)
        return found.reshape(self.tokens.shape)

    def advance(self, seconds: float) -> None:
        """Let time go by."""
        running = self.running()
        count = np.bincount(self.engine[running], minlength=self.engines)
        decode = self._setting.decode
        working = np.maximum(seconds - self.stalled, 0.0)
        self.stalled = np.maximum(self.stalled - seconds, 0.0)
        steps = working / (decode.fixed + decode.per_sequence * np.maximum(count, 1))
        self.tokens[running] += steps[self.engine[running]]
        np.minimum(self.tokens, self.lengths, out=self.tokens)

    def move(self, leaving: range, staying: range) -> None:
        """Bring what runs on some engines to the least loaded of others."""
        moved = np.argwhere(self.unfinished & np.isin(self.engine, leaving))
        loads = np.bincount(self.engine[self.unfinished], minlength=self.engines).astype(float)
        for group, place in moved:
            target = staying.start + int(np.argmin(loads[staying.start : staying.stop]))
            loads[target] += 1
            self.engine[group, place] = target
            self.stalled[target] += self.tokens[group, place] / self._setting.tokens_per_second

    def ready(self, size: int) -> int:
        """Global batches whose groups are known."""
        longest = np.where(self.unfinished, 0, self.lengths).max(axis=1)
        bounds = self.tokens.max(axis=1)
        complete = ~self.unfinished.any(axis=1)
        arrived = {int(s): int(longest[s]) for s in np.flatnonzero(complete)}
        to_come = {int(s): int(bounds[s]) for s in np.flatnonzero(~complete)}
        return len(complete_batches(arrived, to_come, size))


def play(
    setting: Setting,
    lengths: Ints,
    *,
    trainer: int | None,
    shared: bool = False,
    before: Iterable[Ints] = (),
) -> Played:
    """One step.

    Args:
        setting: Cluster and work.
        lengths: [groups, group_size] tokens of each answer.
        trainer: Devices of the trainer from beginning to end; 0: all devices take turns; None:
            devices are handed over by choice.
        shared: The rollout has the trainer's devices too, which the trainer gets when what was
            begun on them has ended.
        before: Lengths of the steps before, of which choices know.
    """
    forecast = LengthForecast(setting.generation.lengths.maximum)
    for drawn in before:
        forecast.note(drawn.ravel().tolist())
        forecast.next_step()
    rescaled = trainer is None
    fixed = trainer or 0
    engines = _Engines(setting, lengths, setting.devices - (0 if shared else fixed))
    size = setting.groups // setting.batches
    played, now, gone = Played(), 0.0, 0
    ranks, trained, busy_until, idle_until = fixed, 0, 0.0, 0.0
    while engines.unfinished.any():
        engines.advance(setting.tick)
        now += setting.tick
        if not rescaled and not fixed:
            continue
        ready = engines.ready(size)
        if rescaled:
            count = _released(
                setting, engines, forecast, gone=gone, ready=ready, played=played, now=now
            )
            if count:
                engines.move(range(gone, gone + count), range(gone + count, setting.devices))
                gone += count
                idle_until = now + setting.switch_seconds
        offered = gone if rescaled else fixed
        if shared and idle_until == 0.0:
            if engines.unfinished[engines.engine < fixed].any():
                offered = 0
            else:
                idle_until = now + setting.switch_seconds
        if now >= max(busy_until, idle_until) and trained < ready and offered:
            ranks, moved = _ranks(
                setting, ranks=ranks, offered=offered, trained=trained, played=played, now=now
            )
            busy_until = now + moved + setting.batch_seconds(ranks)
            trained += 1
    played.rollout_seconds = now
    # All devices are free for what is left to be trained on, where they may be.
    now = max(now, busy_until, idle_until if shared else 0.0)
    last = fixed or setting.devices
    if trained < setting.batches and last != ranks:
        now += setting.switch_seconds + (setting.move_seconds if ranks else 0.0)
        ranks = last
        played.sizes.append((now, ranks))
    now += (setting.batches - trained) * setting.batch_seconds(max(ranks, 1))
    played.seconds = now + (setting.move_seconds if rescaled else 0.0)
    return played


def _released(
    setting: Setting,
    engines: _Engines,
    before: LengthForecast,
    *,
    gone: int,
    ready: int,
    played: Played,
    now: float,
) -> int:
    """How many more workers give their devices up."""
    unfinished = engines.unfinished
    running = np.bincount(engines.engine[unfinished], minlength=setting.devices)[gone:]
    tokens = engines.tokens[unfinished].astype(int).tolist()
    ended = engines.lengths[~unfinished].astype(int).tolist()
    mean = float(np.mean(tokens)) if tokens else 0.0
    begin = time.thread_time()
    forecast = deepcopy(before)
    forecast.note(ended)
    choice = release(
        RolloutState(
            running=tuple(running.tolist()),
            total=engines.lengths.size,
            capacity=setting.generation.max_running,
            left=forecast.left(tokens),
            decode=setting.decode,
            handover_seconds=mean / setting.tokens_per_second / max(setting.devices - gone, 1),
            train_seconds=setting.train_seconds,
            last_seconds=setting.train_seconds / setting.batches,
            ready=ready,
            trainer_sizes=setting.trainer_sizes,
            speeds=setting.speeds,
            trainer_devices=gone,
        )
    )
    played.decision_seconds = max(played.decision_seconds, time.thread_time() - begin)
    if choice.action != "release":
        return 0
    played.releases.append((now, choice.count))
    return choice.count


def _ranks(
    setting: Setting, *, ranks: int, offered: int, trained: int, played: Played, now: float
) -> tuple[int, float]:
    """Devices of the trainer for its next batch, and what getting there takes."""
    if not ranks:
        ranks = largest_size(setting.trainer_sizes, offered)
        played.sizes.append((now, ranks))
        return ranks, 0.0
    choice = resize(
        TrainerState(
            size=ranks,
            offered=offered,
            sizes=setting.trainer_sizes,
            batches=setting.batches - trained,
            seconds_left=setting.train_seconds * (1 - trained / setting.batches),
            move_seconds=setting.move_seconds,
            speeds=setting.speeds,
        )
    )
    if choice.action != "resize":
        return ranks, 0.0
    played.sizes.append((now, choice.count))
    return choice.count, setting.move_seconds


def best_static(setting: Setting, lengths: Ints) -> tuple[str, Played]:
    """The fastest placement that stays, in words, and its step.

    Tried are all numbers of devices that the trainer can have, alone or shared with the rollout.
    """
    played = {"taking turns": play(setting, lengths, trainer=0)}
    for size in (size for size in setting.trainer_sizes if size < setting.devices):
        played[f"{size} of them train"] = play(setting, lengths, trainer=size)
        played[f"{size} of them generate and train"] = play(
            setting, lengths, trainer=size, shared=True
        )
    best = min(played, key=lambda place: played[place].seconds)
    return best, played[best]
