"""The order of a data set: a function of seed and number alone."""

import numpy as np
import pytest

from rlinf.data.prompts.loader import Draws


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    draws = Draws(10, seed=3)
    epochs = [[draws.row(10 * epoch + i) for i in range(10)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Draws(10, shuffle=False).row(i) for i in (0, 9, 10, 12)] == [0, 9, 0, 2]


def test_a_batch_depends_on_seed_and_step_alone():
    """Also where it reaches into the next epoch, in whatever order steps are asked for."""
    steps = [Draws(10, seed=1).batch(step, 4).tolist() for step in range(6)]
    asked_backwards = Draws(10, seed=1)
    assert [asked_backwards.batch(step, 4).tolist() for step in (5, 2, 0)] == [
        steps[5], steps[2], steps[0],
    ]  # fmt: skip
    first_epoch = np.concatenate(steps)[:10]
    assert sorted(first_epoch) == list(range(10))
    assert Draws(10, seed=2).batch(0, 4).tolist() != steps[0]


def test_nothing_to_draw_from_is_refused():
    with pytest.raises(ValueError, match="no row"):
        Draws(0)
