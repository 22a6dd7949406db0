"""The order in which a data set is gone through: a function of a seed and of numbers alone."""

from __future__ import annotations

import numpy as np


class Draws:
    """Epoch after epoch without end; each shuffled epoch has an order of its own.

    Which row a draw gives depends on seed and number of the draw alone, so that neither a resumed
    run nor another placement changes what a step is trained on.

    Args:
        rows: Rows of the data set, at least one.
        shuffle: Whether the order of an epoch is random.
        seed: Seed of the orders.
    """

    def __init__(self, rows: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if rows < 1:
            raise ValueError("there is no row to draw")
        self._rows, self._shuffle, self._seed = rows, shuffle, seed
        self._order: tuple[int, np.ndarray] | None = None

    def row(self, draw: int) -> int:
        """The row of a draw, past or future."""
        epoch, position = divmod(draw, self._rows)
        if not self._shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, generator.permutation(self._rows))
        return int(self._order[1][position])

    def batch(self, step: int, size: int) -> np.ndarray:
        """[size] int64, rows of the global batch of a step, from 0; epochs follow each other."""
        return np.array([self.row(step * size + i) for i in range(size)], np.int64)
