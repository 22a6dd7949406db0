"""Choices about devices inside a step."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from rlinf.flow.elastic import (
    DecodeCost,
    RolloutState,
    TrainerState,
    borrow,
    complete_batches,
    release,
    resize,
    shares,
    steps_left,
)

STATE = RolloutState(
    running=(4, 4),
    total=64,
    capacity=64,
    steps_left=200,
    decode=DecodeCost(fixed=0.01, per_sequence=1e-5),
    handover_seconds=0.001,
    train_seconds=3.0,
    global_batches=4,
    ready=2,
    trainer_sizes=(1, 2),
)


def test_a_worker_is_released_when_its_sequences_cost_the_other_nothing() -> None:
    choice = release(STATE)
    assert (choice.action, choice.count) == ("release", 1)
    assert choice.cost_seconds == pytest.approx(0.004)
    together, apart = 200 * 0.01008 + 0.004, 200 * 0.01004
    assert choice.gain_seconds == pytest.approx(
        apart + 3.0 / 2 - (together + max(3.0 - together, 0.75) / 2)
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ready": 0}, "no global batch"),
        ({"running": (8,)}, "one worker"),
        ({"decode": DecodeCost(fixed=0.0, per_sequence=0.01)}, "saves 0.000"),
        ({"capacity": 7}, "saves 0.000"),
        ({"train_seconds": 0.001}, "saves"),
        ({"trainer_sizes": (2,)}, "saves 0.000"),
    ],
)
def test_it_stays_where_nothing_is_gained(change: dict, why: str) -> None:
    choice = release(replace(STATE, **change))
    assert (choice.action, choice.count) == ("stay", 0)
    assert why in choice.reason


def test_all_finish_when_nothing_runs() -> None:
    assert release(replace(STATE, running=(0, 0))).action == "finish"


def test_half_stop_at_half_before_training_was_timed() -> None:
    unknown = replace(STATE, train_seconds=None)
    assert release(replace(unknown, running=(20, 13))).action == "stay"
    assert release(replace(unknown, running=(20, 12))).count == 1
    assert release(replace(unknown, running=(8,) * 4, trainer_sizes=(1, 2, 4))).count == 2


def test_a_release_is_the_best_of_all_numbers() -> None:
    state = replace(STATE, running=(6,) * 8, trainer_sizes=(1, 2, 4, 8), total=400)
    choice = release(state)
    times = {}
    for count in (0, 1, 2, 4):
        each = -(-48 // (8 - count))
        rollout = 200 * (0.01 + 1e-5 * each) + 0.001 * 6 * count
        times[count] = rollout + max(3.0 - rollout * count, 0.75) / 8
    assert choice.count == min(times, key=lambda count: times[count])
    assert choice.gain_seconds == pytest.approx(times[0] - times[choice.count])


def test_the_trainer_grows_where_the_batches_left_pay_for_it() -> None:
    state = TrainerState(
        size=1, offered=3, sizes=(1, 2, 4), batches=3, batch_seconds=1.0, move_seconds=0.1
    )
    choice = resize(state)
    assert (choice.action, choice.count) == ("resize", 2)
    assert choice.gain_seconds == pytest.approx(1.5 - 0.2)
    assert resize(replace(state, move_seconds=0.8)).action == "stay"
    assert resize(replace(state, offered=1)).action == "stay"
    assert resize(replace(state, batches=0)).action == "stay"
    assert resize(replace(state, batch_seconds=None)).count == 2
    assert resize(replace(state, size=2, offered=4)).cost_seconds == pytest.approx(0.1)


def test_a_rollout_borrows_what_makes_it_faster() -> None:
    cost = DecodeCost(fixed=0.01, per_sequence=0.001)
    choice = borrow(sequences=64, tokens=100, own=1, trainers=1, decode=cost)
    assert choice.action == "borrow"
    assert choice.gain_seconds == pytest.approx(100 * 0.032)
    idle = DecodeCost(fixed=0.01, per_sequence=0.0)
    assert borrow(sequences=64, tokens=100, own=1, trainers=1, decode=idle).action == "stay"


def test_steps_left_of_geometric_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 64, size=(2000, 64))
    longest, known = np.zeros(2000), np.zeros(2000)
    for row, drawn in enumerate(lengths):
        running = drawn[drawn > 100]
        longest[row] = running.max(initial=100) - 100
        known[row] = steps_left([100] * len(running), drawn[drawn <= 100].tolist(), 10_000)
    assert known.mean() == pytest.approx(longest.mean(), rel=0.05)
    assert steps_left([], [5], 10) == 0
    assert steps_left([3, 8], [], 10) == 7


def test_groups_are_shared_out_up_to_the_mean() -> None:
    assert shares([3, 3, 3, 3], [0, 6]) == [0, 0, 0, 1]
    assert shares([2, 2], [5]) == [0, 0]
    assert shares([], [1, 2]) == []


def test_batches_do_not_depend_on_who_was_faster() -> None:
    longest = {0: 7, 1: 3, 2: 9, 3: 3}
    for order in permutations(longest):
        arrived: dict[int, int] = {}
        found: list[list[int]] = []
        for slot in order:
            arrived[slot] = longest[slot]
            bounds = {other: longest[other] for other in longest if other not in arrived}
            now = complete_batches(arrived, bounds, 2)
            assert now[: len(found)] == found
            found = now
        assert found == [[1, 3], [0, 2]]
    assert complete_batches({1: 3, 3: 3}, {0: 3, 2: 0}, 2) == []
    assert complete_batches({1: 3, 3: 3}, {0: 3, 2: 3}, 2) == []
    assert complete_batches({1: 3, 3: 3}, {0: 4, 2: 4}, 2) == [[1, 3]]


def test_a_decision_takes_far_less_than_50_ms() -> None:
    state = replace(STATE, running=(16,) * 128, total=8192, trainer_sizes=tuple(range(1, 129)))
    begin = time.perf_counter()
    for _ in range(5):
        release(state)
    assert (time.perf_counter() - begin) / 5 < 0.05
