"""Choices about devices inside a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import exp

import pytest

from rlinf.rescale.choices import (
    DecodeCost,
    RolloutState,
    TrainerState,
    borrow,
    from_both_ends,
    release,
    resize,
    shares,
)
from rlinf.rescale.length_forecast import PARTS, TokensLeft
from rlinf.workers.global_batches import complete_batches


def geometric(longest: float, mean: float) -> TokensLeft:
    """Of lengths of which each token is the last one with the same chance."""
    going = tuple(exp(-part * longest / mean) for part in PARTS)
    return TokensLeft(longest, mean, going, tuple(mean * part for part in going))


STATE = RolloutState(
    running=(4, 4),
    total=64,
    capacity=64,
    left=geometric(200, 100),
    decode=DecodeCost(fixed=0.01, per_sequence=1e-5),
    handover_seconds=0.001,
    train_seconds=3.0,
    last_seconds=0.75,
    ready=2,
    trainer_sizes=(1, 2),
)


def test_a_worker_is_released_when_its_sequences_cost_the_other_nothing() -> None:
    choice = release(STATE)
    assert (choice.action, choice.count) == ("release", 1)
    assert choice.cost_seconds == pytest.approx(0.004)
    # Each of 8 sequences has 100 tokens to go, the longest 200.
    together, apart = 200 * 0.01 + 100 * 8e-5 + 0.004, 200 * 0.01 + 100 * 4e-5
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
        ({"train_seconds": 0.001, "last_seconds": 0.001}, "saves"),
        ({"trainer_sizes": (2,)}, "saves 0.000"),
    ],
)
def test_it_stays_where_nothing_is_gained(change: dict, why: str) -> None:
    choice = release(replace(STATE, **change))
    assert (choice.action, choice.count) == ("stay", 0)
    assert why in choice.reason


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"running": (7, 6)}, 1),  # 13 on one that runs 7: full for 13 · 20 / 7 of 200 steps
        ({"running": (8, 2)}, 0),  # one has not begun
        ({"running": (7, 6), "left": geometric(200, 60)}, 0),  # full for 111 steps
        ({"running": (5, 5, 5), "trainer_sizes": (2, 3)}, 0),  # two would leave at once
    ],
)
def test_one_worker_may_leave_more_than_the_others_run_at_once(change: dict, count: int) -> None:
    state = replace(STATE, capacity=7, left=geometric(200, 20), train_seconds=9.0)
    choice = release(replace(state, **change))
    assert choice.count == count
    assert choice.action == ("release" if count else "stay")


def test_a_release_reckons_with_a_rollout_that_goes_on_for_longer_than_predicted() -> None:
    choice, later = release(STATE), release(replace(STATE, rollout_bias=1.1))
    together, apart = 200 * 0.01 + 100 * 8e-5 + 0.004, 200 * 0.01 + 100 * 4e-5
    assert choice.numbers["rollout_seconds"] == later.numbers["rollout_seconds"]
    assert choice.numbers["rollout_seconds"] == pytest.approx(together)
    assert later.gain_seconds == pytest.approx(
        apart + 3.0 / 2 - (1.1 * together + max(3.0 - 1.1 * together, 0.75) / 2)
    )
    # The trainer would have to wait; and it is not worth so much any more.
    assert "moving later saves" in release(replace(STATE, rollout_bias=1.2)).reason
    assert "saves 0.000" in release(replace(STATE, rollout_bias=2.0)).reason


def test_nobody_leaves_when_nothing_runs() -> None:
    choice = release(replace(STATE, running=(0, 0)))
    assert (choice.action, choice.count) == ("stay", 0)


def test_half_stop_at_half_before_training_was_timed() -> None:
    unknown = replace(STATE, train_seconds=None)
    assert release(replace(unknown, running=(20, 13))).action == "stay"
    assert release(replace(unknown, running=(20, 12))).count == 1
    assert release(replace(unknown, running=(8,) * 4, trainer_sizes=(1, 2, 4))).count == 2


def test_a_release_is_the_best_of_all_numbers() -> None:
    state = replace(STATE, running=(6,) * 8, trainer_sizes=(1, 2, 4, 8), total=400)
    state = replace(state, train_seconds=12.0)
    choice = release(state)
    times = {}
    for count in (0, 1, 2, 4):
        rollout = 200 * 0.01 + 100 * 1e-5 * 48 / (8 - count) + 0.001 * 6 * count
        times[count] = rollout + max(12.0 - rollout * count, 0.75) / 8
    assert choice.count == min(times, key=lambda count: times[count])
    assert choice.gain_seconds == pytest.approx(times[0] - times[choice.count])


def test_the_trainer_grows_where_the_batches_left_pay_for_it() -> None:
    state = TrainerState(
        size=1, offered=3, sizes=(1, 2, 4), batches=3, seconds_left=3.0, move_seconds=0.1
    )
    choice = resize(state)
    assert (choice.action, choice.count) == ("resize", 2)
    assert choice.gain_seconds == pytest.approx(1.5 - 0.2)
    assert resize(replace(state, move_seconds=0.8)).action == "stay"
    assert resize(replace(state, offered=1)).action == "stay"
    assert resize(replace(state, batches=0)).action == "stay"
    assert resize(replace(state, seconds_left=None)).count == 2
    assert resize(replace(state, size=2, offered=4)).cost_seconds == pytest.approx(0.1)


def test_ranks_that_train_hardly_faster_do_not_join() -> None:
    state = TrainerState(
        size=1, offered=2, sizes=(1, 2), batches=3, seconds_left=3.0, move_seconds=0.3
    )
    assert resize(state).gain_seconds == pytest.approx(3.0 / 2 - 0.6)
    slower = replace(state, speeds={1: 1.0, 2: 1.25})
    assert resize(slower).action == "stay"
    assert "would save 0.600 s" in resize(slower).reason


def test_a_release_is_worth_more_where_ranks_together_are_slow() -> None:
    slow = {1: 1.0, 2: 1.25}
    together, apart = 200 * 0.01 + 100 * 8e-5 + 0.004, 200 * 0.01 + 100 * 4e-5
    assert release(replace(STATE, speeds=slow)).gain_seconds == pytest.approx(
        apart + 3.0 / 1.25 - (together + max(3.0 - together, 0.75) / 1.25)
    )


def test_what_a_rollout_gained_by_borrowed_devices_is_an_account() -> None:
    cost = DecodeCost(fixed=0.01, per_sequence=0.001)
    choice = borrow(sequences=64, tokens=100, own=1, trainers=1, decode=cost)
    assert choice.action == "borrow"
    assert choice.gain_seconds == pytest.approx(100 * 0.032)
    assert choice.reason.startswith("an account, not a choice")
    assert "2 workers decode in about 4.200 s what would take 1 about 7.400 s" in choice.reason
    idle = DecodeCost(fixed=0.01, per_sequence=0.0)
    assert borrow(sequences=64, tokens=100, own=1, trainers=1, decode=idle).action == "stay"


def test_a_release_waits_where_the_trainer_would_run_out_of_work() -> None:
    crowded = replace(
        STATE,
        running=(30, 30),
        left=geometric(400, 100),
        decode=DecodeCost(fixed=0.01, per_sequence=0.0002),
        train_seconds=2.0,
        last_seconds=0.2,
    )
    choice = release(crowded)
    assert (choice.action, choice.count) == ("stay", 0)
    assert "moving later saves" in choice.reason
    few = replace(crowded, running=(3, 3), left=geometric(150, 100))
    assert release(few).action == "release"


def test_groups_are_shared_out_up_to_the_mean() -> None:
    assert shares([3, 3, 3, 3], [0, 6]) == [0, 0, 0, 1]
    assert shares([2, 2], [5]) == [0, 0]
    assert shares([], [1, 2]) == []


def test_from_both_ends_leaves_the_middle_for_last() -> None:
    assert from_both_ends([5, 4, 3, 2, 1]) == [5, 1, 4, 2, 3]
    assert from_both_ends([2, 1]) == [2, 1]
    assert from_both_ends([]) == []


def test_batches_do_not_depend_on_who_was_faster() -> None:
    longest = {0: 7, 1: 3, 2: 9, 3: 3}
    for order in permutations(longest):
        arrived: dict[int, int] = {}
        found: list[list[int]] = []
        for position in order:
            arrived[position] = longest[position]
            bounds = {other: longest[other] for other in longest if other not in arrived}
            now = complete_batches(arrived, bounds, 2)
            assert now[: len(found)] == found
            found = now
        assert found == [[1, 3], [0, 2]]
    assert complete_batches({1: 3, 3: 3}, {0: 3, 2: 0}, 2) == []
    assert complete_batches({1: 3, 3: 3}, {0: 3, 2: 3}, 2) == []
    assert complete_batches({1: 3, 3: 3}, {0: 4, 2: 4}, 2) == [[1, 3]]
