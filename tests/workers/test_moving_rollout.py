"""A rollout that can give its device up: decoding steps, guests, and how it waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import Completion
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest
from rlinf.engines.requests import given_tokens
from rlinf.workers.moving_rollout import MovingRollout, step_times
from rlinf.workers.moving_round import Guests, MovingRound, SharedDevices

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

    def progress(self) -> dict[int, int]:
        return {request.request_id: given_tokens(request) for request in self.submitted}


def rollout_on(engine: Any, **changes: Any) -> Any:
    devices = SharedDevices(
        leases=(), mailboxes=(), trainer_sizes=(1, 2), capacity=CAPACITY, offload=False
    )
    plain: dict[str, Any] = {
        "step": 0,
        "rank": 0,
        "devices": devices,
        "mailbox": None,
        "times": step_times(),
        "leader": None,
        "release": lambda: None,
    }
    scored: Any = SimpleNamespace()
    return MovingRollout(engine, MovingRound(2, SAMPLING), scored, **plain | changes)


def test_sequences_that_wait_for_a_place_do_not_count() -> None:
    times, engine = step_times(), Busy()
    rollout = rollout_on(engine, times=times)
    assert list(rollout._generate()) == []
    engine.unfinished = 20
    assert list(rollout._generate()) == []
    engine.unfinished = 0
    assert list(rollout._generate()) == []
    assert times.mean()[0] == CAPACITY  # the last step's time is not known
    for engine.unfinished in (20, 20):
        assert list(rollout._generate()) == []
    assert times.mean()[0] == pytest.approx((CAPACITY + 20) / 2, rel=0.01)


def test_a_step_takes_as_long_as_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking guests in is no part of it."""
    clock = iter((10.0, 10.5, 30.0, 30.5))
    now = SimpleNamespace(perf_counter=lambda: next(clock))
    times = step_times()
    rollout = rollout_on(Busy(), times=times, leader=SimpleNamespace(hear=lambda _: None))
    with monkeypatch.context() as patched:
        patched.setattr("rlinf.workers.moving_rollout.time", now)
        for _ in range(2):
            list(rollout._generate())
        list(rollout._hear(Guests(())))
        for _ in range(2):
            list(rollout._generate())
    assert times.mean() == (CAPACITY, 0.5)
    assert times.weight == pytest.approx(2, rel=0.01)


def partial(request: GenerationRequest, tokens: int) -> FinishedCompletion:
    completion = Completion(
        tokens=np.full(tokens, 5),
        log_probs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int64),
        stop_reason="abort",
        seed=request.seed,
    )
    return FinishedCompletion(request_id=request.request_id, completion=completion)


def test_of_guests_those_of_middling_length_wait() -> None:
    giver = MovingRound(2, SAMPLING)
    interrupted, lengths = [], iter((3, 40, 0, 17, 50, 3))
    for slot in range(3):
        prompt = Prompt(prompt_id=slot, text="", tokens=np.array([7, 8]), answer=None)
        for request in giver.begin(slot, (slot, prompt), (2 * slot, 2 * slot + 1)):
            interrupted.append(partial(request, next(lengths)))
    mailbox: list[Any] = []
    leader: Any = SimpleNamespace(hear=mailbox.append)
    engine = Busy()
    rollout = rollout_on(engine, leader=leader)
    told = list(rollout._hear(Guests(tuple(giver.give(interrupted)))))
    assert [given_tokens(request) for request in engine.submitted] == [50, 0, 40, 3, 17, 3]
    assert [request.seed for request in engine.submitted] == [4, 2, 1, 5, 3, 0]
    assert [emit.payload.bounds for emit in told] == [{0: 40, 1: 17, 2: 50}]
    assert sorted(mailbox[0].running) == [0, 3, 3, 17, 40, 50]


@pytest.mark.parametrize(("has_device", "seconds"), [(True, 0.005), (False, 0.03)])
def test_a_worker_without_a_device_looks_seldom(has_device: bool, seconds: float) -> None:
    waited: list[float] = []
    engine = Busy()
    engine.unfinished = 0
    rollout = rollout_on(engine)
    prompt = Prompt(prompt_id=0, text="", tokens=np.array([7, 8]), answer=None)
    rollout._round.begin(0, (0, prompt), (0, 1))
    rollout._scored.ready = lambda within: bool(waited.append(within))
    rollout._has_device = has_device
    assert list(rollout._take_scores()) == []
    assert waited == [seconds]
