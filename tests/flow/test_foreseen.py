"""How what was foreseen came out."""

from __future__ import annotations

import pytest

from rlinf.flow.foreseen import Foreseen


def test_nothing_seen_is_taken_as_foreseen() -> None:
    assert Foreseen().factor == 1


def test_what_comes_out_longer_is_foreseen_longer() -> None:
    foreseen = Foreseen()
    for _ in range(60):
        foreseen.note(2.0, 3.0)
        foreseen.next_step()
    # Four of them count, and one that came out as foreseen.
    assert foreseen.factor == pytest.approx((4 * 1.5 + 1) / 5)


def test_one_time_that_is_far_off_does_not_decide() -> None:
    foreseen = Foreseen()
    foreseen.note(0.1, 60.0)
    assert foreseen.factor == 1.5
    foreseen = Foreseen()
    foreseen.note(60.0, 0.1)
    assert foreseen.factor == 0.75
    foreseen.note(0.0, 1.0)  # nothing was foreseen that a factor would change
    assert foreseen.factor == 0.75


def test_without_news_it_is_forgotten() -> None:
    foreseen = Foreseen()
    foreseen.note(1.0, 2.0)
    for _ in range(30):
        foreseen.next_step()
    assert foreseen.factor == pytest.approx(1.0, abs=0.01)
