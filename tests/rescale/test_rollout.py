"""A rollout that can give its device up: decoding steps, guests, and how it waits."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest
from rlinf.engines.requests import given_tokens
from rlinf.flow.stream import Item
from rlinf.rescale.leader import GroupsToAdopt, ReleaseDevice, RolloutSizes
from rlinf.rescale.rollout import RescaledRollout, RolloutDevices
from rlinf.workers.filling import Filling
from rlinf.workers.group_book import GenerationReport, PositionBook, completion_seed
from tests.workers.test_partial_rollout import Letters, length_of

CAPACITY = 64
SAMPLING = SamplingConfig(max_new_tokens=64)


class Busy:
    """An engine with more to do than it runs at once."""

    unfinished = 200

    def __init__(self) -> None:
        self.submitted: list[GenerationRequest] = []

    def step(self) -> list[Any]:
        return []

    def submit(self, request: GenerationRequest) -> None:
        self.submitted.append(request)

    carries_caches = True

    def progress(self) -> dict[int, int]:
        return {request.request_id: given_tokens(request) for request in self.submitted}


class Lease:
    """A device that is free."""

    def acquire(self) -> None:
        """At once."""


def rollout_on(engine: Any, *, leader: Any = None, workers: int = 2) -> Any:
    """The first of some workers, at the beginning of a step."""
    sizes = RolloutSizes(
        workers=workers,
        positions=3,
        group_size=2,
        global_batches=1,
        max_new_tokens=64,
        capacity=CAPACITY,
        trainer_sizes=(1, 2),
    )
    lease: Any = Lease()
    devices = RolloutDevices(leases=(lease,), mailboxes=(), sizes=sizes, offload=False)
    nobody: Any = None
    rollout = RescaledRollout(0, engine, sizes, nobody)
    rollout.begin(devices, new_book(), 0, lambda: None)
    rollout._leader = leader
    return rollout


def new_book() -> PositionBook:
    return PositionBook(2, SAMPLING, lambda draw: (2 * draw, 2 * draw + 1))


def test_sequences_that_wait_for_a_place_do_not_count() -> None:
    engine = Busy()
    rollout = rollout_on(engine)
    times = rollout.step_times
    rollout.before_step()
    engine.unfinished = 20
    rollout.before_step()
    engine.unfinished = 0
    rollout.before_step()
    assert times.mean()[0] == CAPACITY  # the last step's time is not known
    for engine.unfinished in (20, 20):
        rollout.before_step()
    assert times.mean()[0] == pytest.approx((CAPACITY + 20) / 2, rel=0.01)


def test_a_step_takes_as_long_as_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking groups of others in is no part of it."""
    clock = iter((10.0, 10.5, 30.0, 30.5))
    now = SimpleNamespace(perf_counter=lambda: next(clock))
    rollout = rollout_on(Busy(), leader=SimpleNamespace(receive=lambda _: None))
    with monkeypatch.context() as patched:
        patched.setattr("rlinf.rescale.rollout.time", now)
        for _ in range(2):
            rollout.before_step()
        list(rollout._receive(GroupsToAdopt(())))
        for _ in range(2):
            rollout.before_step()
    assert rollout.step_times.mean() == (CAPACITY, 0.5)
    assert rollout.step_times.weight == pytest.approx(2, rel=0.01)


def partial(request: GenerationRequest, tokens: int) -> FinishedCompletion:
    completion = Completion(
        tokens=np.full(tokens, 5),
        log_probs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int64),
        stop_reason="abort",
        seed=request.seed,
    )
    return FinishedCompletion(request_id=request.request_id, completion=completion)


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=number, text="", tokens=np.array([7, 8]), answer=None)


def test_of_groups_of_others_those_of_middling_length_wait() -> None:
    giver = new_book()
    lengths = iter((3, 40, 0, 17, 50, 3))
    requests = giver.begin({position: (position, prompt(position)) for position in range(3)})
    interrupted = [partial(request, next(lengths)) for request in requests]
    mailbox: list[Any] = []
    leader: Any = SimpleNamespace(receive=mailbox.append)
    engine = Busy()
    rollout = rollout_on(engine, leader=leader)
    told = list(rollout._receive(GroupsToAdopt(tuple(giver.give(interrupted)))))
    assert [given_tokens(request) for request in engine.submitted] == [50, 0, 40, 3, 17, 3]
    assert [request.seed for request in engine.submitted] == [4, 2, 1, 5, 3, 0]
    assert [emit.payload.bounds for emit in told] == [((0, 40), (1, 17), (2, 50))]
    assert sorted(mailbox[0].running) == [0, 3, 3, 17, 40, 50]


@pytest.mark.parametrize(("has_device", "seconds"), [(True, 0.005), (False, 0.03)])
def test_a_worker_without_a_device_looks_seldom(has_device: bool, seconds: float) -> None:
    waited: list[float] = []
    engine: Any = Busy()
    engine.unfinished = 0
    rollout = rollout_on(engine)
    rollout._has_device = has_device
    rollout._book.begin({0: (0, prompt(0))})
    scored: Any = SimpleNamespace(ready=lambda within: bool(waited.append(within)))
    assert list(Filling(rollout._book, engine, rollout)._take_scores(scored)) == []
    assert waited == [seconds]


class Mailbox:
    """Of a worker in this process."""

    def __init__(self) -> None:
        self._messages: Queue[Any] = Queue()

    def post(self, message: Any) -> None:
        self._messages.put(pickle.loads(pickle.dumps(message)))

    def take_all(self) -> list[Any]:
        return [self._messages.get() for _ in range(self._messages.qsize())]


class Scored(Mailbox):
    """Scored groups of a worker."""

    def ready(self, within: float = 0.0) -> bool:
        end = time.monotonic() + within
        while not self._messages.qsize() and time.monotonic() < end:
            time.sleep(within / 10)
        return bool(self._messages.qsize())

    def __next__(self) -> Any:
        return self._messages.get(timeout=30)


class Slow(Letters):
    """Takes long enough for what workers tell each other to arrive."""

    def step(self) -> list[FinishedCompletion]:
        time.sleep(0.005)
        return super().step()


class Given(Lease):
    """Counts who has it."""

    def __init__(self) -> None:
        self.held = 0

    def acquire(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1


def test_one_worker_ends_what_another_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position gets the group that it would have got, at the worker whose position it is."""
    monkeypatch.setattr("rlinf.workers.filling._PAUSE", 0.0)
    workers, positions, size = 2, 8, 4
    sizes = RolloutSizes(
        workers=workers, positions=positions, group_size=size, global_batches=4, max_new_tokens=64,
        capacity=CAPACITY, trainer_sizes=(1, 2),
    )  # fmt: skip
    leases, mailboxes = [Given() for _ in range(workers)], [Mailbox() for _ in range(workers)]
    shared: Any = (tuple(leases), tuple(mailboxes))
    devices = RolloutDevices(leases=shared[0], mailboxes=shared[1], sizes=sizes, offload=False)
    scored = [Scored() for _ in range(workers)]
    prompts = {position: (100 + position, prompt(position)) for position in range(positions)}

    def seeds(draw: int) -> list[int]:
        return [completion_seed(7, draw, place) for place in range(size)]

    hooks: list[Any] = []
    for rank in range(workers):
        mailbox: Any = mailboxes[rank]
        hooks.append(RescaledRollout(rank, Slow(), sizes, mailbox))

    def fill(rank: int, step: int) -> tuple[dict[int, PromptGroup], GenerationReport]:
        book = PositionBook(size, SAMPLING, seeds)
        hooks[rank].begin(devices, book, step, lambda: None)
        filling = Filling(book, hooks[rank]._engine, hooks[rank], True)
        share = positions // workers
        own = range(rank * share, (rank + 1) * share)
        found: dict[int, PromptGroup] = {}
        stream: Any = scored[rank]
        for emitted in filling.run(
            book.begin({position: prompts[position] for position in own}), stream
        ):
            if emitted.edge == "completions":
                group = emitted.payload.scored((Score(reward=1.0),) * size)
                scored[emitted.source // share].post(Item(0, emitted.source, group))
            elif isinstance(emitted.payload, PromptGroup):
                assert emitted.source in own
                found[emitted.source] = emitted.payload
        return found, book.report

    moved = 0
    for step in range(3):
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(fill, range(workers), [step] * workers))
        groups = {position: group for found, _ in results for position, group in found.items()}
        assert sorted(groups) == list(range(positions))
        for position, group in groups.items():
            assert group.draw == 100 + position
            for completion, seed in zip(group.completions, seeds(group.draw), strict=True):
                assert completion.tokens.tolist() == [
                    (seed + n) % 997 for n in range(length_of(seed))
                ]
        assert [lease.held for lease in leases] == [0, 0]
        tokens = sum(len(c) for group in groups.values() for c in group.completions)
        assert sum(report.tokens for _, report in results) == tokens
        moved += sum(report.moved for _, report in results)
    assert moved > 0


def test_answers_that_end_when_they_are_interrupted_do_not_move() -> None:
    """A group that is complete by them goes to the reward, others with what they lack."""

    class Interrupted(Busy):
        def interrupt(self) -> list[FinishedCompletion]:
            found = [partial(request, 5) for request in self.submitted]
            return [
                replace(item, completion=item.completion.ended("length")) if place < 3 else item
                for place, item in enumerate(found)
            ]

    engine = Interrupted()
    mailbox, lease = Mailbox(), Given()
    rollout = rollout_on(engine, leader=SimpleNamespace(receive=lambda _: None))
    leases, mailboxes = cast("Any", ((lease,), (Mailbox(), mailbox)))
    rollout._devices = replace(rollout._devices, leases=leases, mailboxes=mailboxes)
    lease.acquire()
    for request in rollout._book.begin({place: (place, prompt(place)) for place in range(2)}):
        engine.submit(request)
    sent = list(rollout._receive(ReleaseDevice({1: 0})))
    assert [(emit.edge, emit.source) for emit in sent] == [("completions", 0)]
    assert [len(completion) for completion in sent[0].payload.completions] == [5, 5]
    (adopted,) = [group for message in mailbox.take_all() for group in message.groups]
    assert (adopted.group.draw, adopted.group.unfinished) == (1, 1)
    assert (rollout._book.report.completions, rollout._book.report.moved) == (3, 1)
    assert lease.held == 0
