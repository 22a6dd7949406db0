"""What a rollout that can give its device up remembers of its decoding steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.engines.config import SamplingConfig
from rlinf.workers.moving_rollout import MovingRollout, step_times
from rlinf.workers.moving_round import MovingRound, SharedDevices

CAPACITY = 64


class Busy:
    """An engine with more to do than it runs at once."""

    unfinished = 200

    def step(self) -> list[Any]:
        return []


def test_sequences_that_wait_for_a_place_do_not_count() -> None:
    times, engine = step_times(), Busy()
    devices = SharedDevices(
        leases=(), mailboxes=(), trainer_sizes=(1, 2), capacity=CAPACITY, offload=False
    )
    rollout: Any = MovingRollout(
        engine,  # type: ignore[arg-type]
        MovingRound(2, SamplingConfig(max_new_tokens=8)),
        SimpleNamespace(),  # type: ignore[arg-type]
        step=0,
        rank=0,
        devices=devices,
        mailbox=None,
        times=times,
        leader=None,
        release=lambda: None,
    )
    assert list(rollout._generate()) == []
    engine.unfinished = 20
    assert list(rollout._generate()) == []
    assert times.mean()[0] == pytest.approx((CAPACITY + 20) / 2, rel=0.01)
