"""What the trainer of a rescaled run remembers of its batches."""

from __future__ import annotations

import pytest

from rlinf.rescale.measured import TrainerTimes

ONE = (0.05, 0.001)  # seconds of a batch by one rank, and for each of its tokens


def one_rank(tokens: int) -> float:
    return ONE[0] + ONE[1] * tokens


def play(timings: TrainerTimes, phases: int, times: float, *, slow_first: float = 1.0) -> None:
    """Phases of five batches, the last of which two ranks train on, so many times as fast."""
    for phase in range(phases):
        slower = slow_first if not phase else 1.0
        for number, tokens in enumerate((100, 200, 300, 400, 1000)):
            size = 2 if tokens == 1000 else 1
            seconds = one_rank(tokens) / (times if size == 2 else 1) * slower
            timings.note_batch(number, tokens, seconds, size)
        timings.end_phase()


def test_ranks_that_were_not_seen_are_as_fast_as_they_are_many() -> None:
    timings = TrainerTimes()
    timings.note_batch(0, 100, 1.0, 2)
    assert (timings.speed(1), timings.speed(2), timings.speed(4)) == (1, 2, 4)
    assert timings.seconds_left(0, 2) == pytest.approx(4.0)  # the other one as long as this


def test_speed_is_measured_on_as_many_tokens() -> None:
    timings = TrainerTimes()
    play(timings, 40, 1.25, slow_first=10.0)
    assert timings.speed(1) == 1
    # Two ranks saw one batch a phase: 4 of their batches count, and one of linear speed.
    assert timings.speed(2) == pytest.approx((4 * 1.25 + 2) / 5, rel=1e-3)


def test_seconds_by_one_rank_follow_from_what_two_took() -> None:
    timings = TrainerTimes()
    play(timings, 40, 1.25)
    by_two = one_rank(1000) / 1.25
    assert timings.batches[4] == pytest.approx(by_two * timings.speed(2), rel=1e-3)
    assert timings.batches[0] == pytest.approx(one_rank(100))


def test_no_speed_is_above_the_number_of_ranks() -> None:
    timings = TrainerTimes()
    play(timings, 40, 3.0)
    assert timings.speed(2) == 2


def test_a_slow_time_is_forgotten() -> None:
    timings = TrainerTimes()
    play(timings, 40, 1.0)
    before = timings.speed(2)
    for _ in range(10):
        timings.end_phase()
    assert before < 1.3
    assert timings.speed(2) > 1.6


def test_ranks_that_train_no_more_are_forgotten() -> None:
    """The speed of two is not against what one took thousands of phases ago."""
    timings = TrainerTimes()
    play(timings, 3, 1.25)
    for _ in range(4000):
        timings.note_batch(0, 100, 1.0, 2)
        timings.end_phase()
    assert timings.speed(2) == 2
    for _ in range(4000):
        timings.end_phase()
    assert timings.speed(2) == 2


def test_a_move_that_was_held_up_does_not_count() -> None:
    timings = TrainerTimes()
    assert timings.move_seconds is None
    for seconds in (1.0, 0.05, 0.06, 0.07, 0.05, 0.06, 4.0):
        timings.note_move(seconds)
    assert timings.move_seconds == 0.06
    timings.end_phase()
    assert timings.move_seconds == 0.06


def test_moves_are_tried_again_after_many_phases_without_any() -> None:
    timings = TrainerTimes()
    timings.note_move(2.0)
    found = []
    for _ in range(30):
        timings.end_phase()
        found.append(timings.move_seconds)
    assert found == sorted(found, reverse=True)
    assert found[0] == 2.0 > 0.1 > found[-1]
    timings.note_move(2.0)
    timings.end_phase()
    assert timings.move_seconds == 2.0
