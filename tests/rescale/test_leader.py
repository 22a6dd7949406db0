"""What the rollout worker that decides makes of what it hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.rescale.choices import DecodeCost
from rlinf.rescale.leader import (
    ReleaseDevice,
    RolloutEnded,
    RolloutLeader,
    RolloutSizes,
    TrainingSeconds,
    WorkerStatus,
)
from rlinf.rescale.length_forecast import LengthForecast
from rlinf.rescale.measured import PredictionBias

WORKERS, POSITIONS, GROUP, LIMIT, STEP = 3, 6, 4, 200, 5


def cost() -> DecodeCost:
    return DecodeCost(fixed=0.01, per_sequence=0.0)


def new_leader(*, reads_again: bool, bias: PredictionBias | None = None) -> RolloutLeader:
    sizes = RolloutSizes(
        workers=WORKERS,
        positions=POSITIONS,
        group_size=GROUP,
        global_batches=3,
        max_new_tokens=LIMIT,
        capacity=64,
        trainer_sizes=(1, 2, 3),
    )
    return RolloutLeader(
        sizes,
        step=STEP,
        forecast=LengthForecast(LIMIT),
        bias=bias or PredictionBias(),
        trained=TrainingSeconds(12.0, 1.0, {}),
        handover_seconds=0.0,
        reads_again=reads_again,
    )


@pytest.fixture
def leader() -> RolloutLeader:
    return new_leader(reads_again=True)


def status(rank: int, **changes: Any) -> WorkerStatus:
    """Two of six groups of each worker, of which the first one is complete."""
    plain: dict[str, Any] = {
        "rank": rank,
        "step": STEP,
        "running": (40,) * GROUP,
        "ended": (20,) * GROUP,
        "bounds": {2 * rank + 1: 40},
        "complete": {2 * rank: 20},
        "given": 0,
        "adopted": 0,
    }
    return WorkerStatus(**plain | changes)


def receive_all(leader: RolloutLeader, **changes: Any) -> None:
    for rank in range(WORKERS):
        leader.receive(status(rank, **changes))


def test_workers_leave_once_a_batch_can_be_trained_on(leader: RolloutLeader) -> None:
    receive_all(leader)
    messages = leader.decide(cost)
    assert [rank for rank, _ in messages] == [0, 1]
    assert all(message == ReleaseDevice({2: GROUP}) for _, message in messages)


def test_nothing_is_decided_before_all_were_heard(leader: RolloutLeader) -> None:
    leader.receive(status(0))
    leader.receive(status(1))
    assert leader.decide(cost) == []


def test_nothing_is_computed_before_a_batch_can_be_complete(leader: RolloutLeader) -> None:
    def asked() -> DecodeCost:
        raise AssertionError("the time of a step was asked for")

    receive_all(leader, complete={})
    leader.receive(status(0))  # one group; a batch has two
    assert leader.decide(asked) == []
    receive_all(leader)
    assert leader.decide(cost) != []


def test_nothing_is_decided_while_groups_are_on_their_way(leader: RolloutLeader) -> None:
    leader.receive(status(0, running=(), bounds={}, given=1, left=True))
    leader.receive(status(1))
    leader.receive(status(2))
    assert leader.decide(cost) == []
    leader.receive(status(1, running=(40,) * 2 * GROUP, bounds={1: 40, 3: 40}, adopted=1))
    assert leader.decide(cost)


def test_what_was_said_of_another_step_is_not_taken_for_this_one(leader: RolloutLeader) -> None:
    receive_all(leader, step=STEP - 1, left=True)
    assert leader.decide(cost) == []
    receive_all(leader)
    assert [rank for rank, _ in leader.decide(cost)] == [0, 1]


def test_all_are_told_when_every_group_is_complete(leader: RolloutLeader) -> None:
    for rank in range(WORKERS):
        both = {2 * rank: 20, 2 * rank + 1: 50}
        leader.receive(status(rank, running=(), bounds={}, complete=both))
    assert leader.decide(cost) == [(rank, RolloutEnded()) for rank in range(WORKERS)]
    assert leader.decide(cost) == []


def test_tokens_that_are_computed_again_are_part_of_the_cost(leader: RolloutLeader) -> None:
    receive_all(leader)
    leader.decide(cost)
    (choice,) = leader.choices
    forecast = LengthForecast(LIMIT)
    forecast.note([20] * 12)
    left = forecast.left([40] * 12).mean
    # 12 sequences have 40 tokens each and some to go, 12 have ended after 20.
    forward = 12.0 / 3 / (12 * 40 + 12 * left + 12 * 20)
    assert choice.cost_seconds == pytest.approx(8 * 40 * forward)


def test_tokens_that_go_along_with_what_was_computed_cost_nothing() -> None:
    leader = new_leader(reads_again=False)
    receive_all(leader)
    leader.decide(cost)
    (choice,) = leader.choices
    assert choice.cost_seconds == 0


def test_how_long_the_rollout_went_on_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the release to the last complete group."""
    bias, now = PredictionBias(), [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("rlinf.rescale.leader.time", clock)
    leader = new_leader(reads_again=False, bias=bias)
    receive_all(leader)
    leader.decide(cost)
    (choice,) = leader.choices
    now[0] += 1.25 * choice.numbers["rollout_seconds"]
    assert bias.factor == 1
    for rank in range(WORKERS):
        both = {2 * rank: 20, 2 * rank + 1: 50}
        leader.receive(status(rank, running=(), bounds={}, complete=both))
    assert leader.decide(cost) == [(rank, RolloutEnded()) for rank in range(WORKERS)]
    assert bias.factor == pytest.approx((1.25 + 1) / 2)
    again = new_leader(reads_again=False, bias=bias)
    receive_all(again)
    again.decide(cost)
    assert [c.numbers["rollout_bias"] for c in again.choices] == [bias.factor]
