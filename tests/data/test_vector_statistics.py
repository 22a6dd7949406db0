"""Statistics of data in parts, against numpy on the whole."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.data.vector_statistics import QUANTILES, at_once, delta_parts, vector_statistics


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_they_are_those_of_the_whole(count: int) -> None:
    rng = np.random.default_rng(count)
    rows = rng.normal([0, 1e6, -1e-5, 3], [1, 1, 1e-6, 0], (count, 4)).astype(np.float32)
    rows[:, 0] = np.round(rows[:, 0], 1)  # many equal ones, and -0
    parts = np.array_split(rows, [count // 3, count // 2])
    found, exact = vector_statistics(lambda: parts), rows.astype(np.float64)
    for name, quantile in QUANTILES.items():
        np.testing.assert_allclose(found[name], np.quantile(exact, quantile, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["mean"], exact.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["std"], exact.std(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found["min"], exact.min(0))
    np.testing.assert_array_equal(found["max"], exact.max(0))
    assert found["count"] == [count]


def test_those_of_distances_from_the_state_are_of_each_chunk() -> None:
    rng = np.random.default_rng(0)
    actions, states = (rng.normal(size=(9, n)).astype(np.float32) for n in (3, 4))
    spans = [(0, 5), (5, 1), (6, 3)]
    wanted = [
        actions[row + later] - states[row, :3] * [1, 0, 1]
        for first, length in spans
        for row in range(first, first + length)
        for later in range(4)
        if row + later < first + length
    ]
    before = actions.copy()
    found = vector_statistics(delta_parts(actions, states, spans, [0, 2], 4))
    expected = vector_statistics(at_once(np.array(wanted)))
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(actions, before)


def test_what_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="no rows"):
        vector_statistics(lambda: [])
    broken = np.zeros((5, 3))
    broken[3, 1] = np.inf
    for parts in (at_once(broken), lambda: [broken[:2], broken[2:]]):
        with pytest.raises(ValueError, match="infinity, first in row 3, dimension 1"):
            vector_statistics(parts)
    for part in (0, 1):
        arrays = [np.zeros((5, 3)), np.zeros((5, 3))]
        arrays[part] = broken
        with pytest.raises(ValueError, match="first in row 3, dimension 1"):
            vector_statistics(delta_parts(*arrays, [(0, 5)], [1], 3))
