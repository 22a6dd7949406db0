"""A line through measured pairs."""

from __future__ import annotations

import pytest

from rlinf.rescale.measured import RunningLine


def line_of(*pairs: tuple[float, float], memory: float = 1.0) -> RunningLine:
    line = RunningLine(memory)
    for x, y in pairs:
        line.note(x, y)
    return line


def test_pairs_on_a_line_give_it() -> None:
    line = line_of(*((x, 0.01 + 0.002 * x) for x in (1, 4, 16, 64)))
    assert line.coefficients() == pytest.approx((0.01, 0.002), rel=1e-6)
    assert line.at(8) == pytest.approx(0.026)


def test_nothing_seen_is_nothing() -> None:
    assert RunningLine().at(8) == 0
    assert RunningLine().mean() == (0, 0)


def test_one_x_alone_tells_nothing_of_others() -> None:
    assert line_of((4, 1.0), (4, 3.0)).coefficients() == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [(((1, 3.0), (3, 1.0)), (2.0, 0.0)), (((1, 0.0), (3, 4.0)), (0.0, 1.0))],
)
def test_neither_part_is_negative(pairs: tuple, expected: tuple) -> None:
    assert line_of(*pairs).coefficients() == pytest.approx(expected)


def test_later_pairs_count_more() -> None:
    assert line_of((1, 0.0), (1, 3.0), memory=0.5).mean() == pytest.approx((1, 2.0))
    line = line_of((1, 0.0))
    line.fade(0.5)
    line.note(1, 3.0)
    assert line.mean() == pytest.approx((1, 2.0))
    assert line.weight == pytest.approx(1.5)
