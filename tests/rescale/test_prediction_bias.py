"""By how much predicted times were off."""

from __future__ import annotations

import pytest

from rlinf.rescale.measured import PredictionBias


def test_without_any_time_there_is_no_bias() -> None:
    assert PredictionBias().factor == 1


def test_what_took_longer_is_predicted_longer() -> None:
    bias = PredictionBias()
    for _ in range(60):
        bias.note(2.0, 3.0)
        bias.next_step()
    # Four of them count, and one that was as predicted.
    assert bias.factor == pytest.approx((4 * 1.5 + 1) / 5)


def test_one_time_that_is_far_off_does_not_decide() -> None:
    bias = PredictionBias()
    bias.note(0.1, 60.0)
    assert bias.factor == 1.5
    bias = PredictionBias()
    bias.note(60.0, 0.1)
    assert bias.factor == 0.75
    bias.note(0.0, 1.0)  # nothing was predicted that a factor would change
    assert bias.factor == 0.75


def test_without_news_it_is_forgotten() -> None:
    bias = PredictionBias()
    bias.note(1.0, 2.0)
    for _ in range(30):
        bias.next_step()
    assert bias.factor == pytest.approx(1.0, abs=0.01)
