"""What unfinished answers are expected to have left, against what they have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlinf.rescale.length_forecast import PARTS, LengthForecast

Lengths = Callable[[np.random.Generator, int], np.ndarray]

LIMIT = 1500


def geometric(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.minimum(rng.geometric(1 / 64, count), LIMIT)


def two_kinds(rng: np.random.Generator, count: int) -> np.ndarray:
    """One in fifty answers has thousands of tokens, or as many as there may be."""
    mean = np.where(np.arange(count) % 50 == 0, 4000, 64)
    return np.minimum(rng.geometric(1 / mean), LIMIT)


def lognormal(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(200), 0.8, count), 1, LIMIT).astype(int)


@pytest.mark.parametrize("age", [100, 300])
@pytest.mark.parametrize("lengths", [geometric, two_kinds, lognormal])
def test_what_is_left_after_other_steps_of_the_same_lengths(lengths: Lengths, age: int) -> None:
    rng = np.random.default_rng(0)
    found, expected = [], []
    for _ in range(60):
        forecast = LengthForecast(LIMIT)
        for _ in range(3):
            forecast.note(lengths(rng, 400).tolist())
            forecast.next_step()
        drawn = lengths(rng, 400)
        forecast.note(drawn[drawn <= age].tolist())
        left = drawn[drawn > age] - age
        found.append((left.max(initial=0), left.sum()))
        foreseen = forecast.left([age] * len(left))
        expected.append((foreseen.longest, foreseen.mean * len(left)))
    wanted = np.mean(found, axis=0)
    # A few long answers make most of the mean, so that it is known less well than the longest.
    assert np.mean(expected, axis=0) == pytest.approx(wanted, rel=0.25)
    assert np.mean(expected, axis=0)[0] == pytest.approx(wanted[0], rel=0.12)


def test_ages_of_running_answers_count_one_by_one() -> None:
    forecast = LengthForecast(LIMIT)
    forecast.note(geometric(np.random.default_rng(0), 4000).tolist() + [LIMIT] * 80)
    young, old = forecast.left([1] * 10), forecast.left([700] * 10)
    assert young.mean < 150 < 500 < old.mean
    mixed = forecast.left([1] * 10 + [700] * 10)
    assert mixed.mean == pytest.approx((young.mean + old.mean) / 2, rel=0.05)
    assert young.longest < old.longest < LIMIT - 700
    # After the short ones the others still run.
    assert mixed.going[PARTS.index(1 / 2)] == pytest.approx(0.5, abs=0.15)
    assert mixed.to_go[PARTS.index(1 / 2)] == pytest.approx(old.mean / 4, rel=0.3)


def test_all_may_run_to_the_limit_while_nothing_has_ended() -> None:
    forecast = LengthForecast(10)
    before = forecast.left([3, 8])
    assert (before.longest, before.mean) == (7, 4.5)
    half = PARTS.index(1 / 2)
    assert (before.going[half], before.to_go[half]) == (0.5, 1.75)
    forecast.note([10, 10])
    assert forecast.left([3, 8]) == before
    assert forecast.left([]).longest == 0


def test_nothing_is_left_at_the_limit() -> None:
    forecast = LengthForecast(10)
    forecast.note([2, 4])
    assert forecast.left([10, 10]).longest == 0
    last = forecast.left([9])
    assert (last.longest, last.mean) == (pytest.approx(1, abs=0.5),) * 2


def test_steps_of_long_ago_are_forgotten() -> None:
    forecast = LengthForecast(LIMIT)
    forecast.note([1000] * 100)
    for _ in range(30):
        forecast.next_step()
        forecast.note([10] * 100)
    assert forecast.left([1]).longest < 50
