"""Statistics of the dimensions of vectors that are read in parts, in bounded memory.

Quantiles are exact, not estimates: an order statistic is found by its bits, 16 at a time, in two
passes over the data (radix selection).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

Parts = Callable[[], Iterable[np.ndarray]]
"""Gives all parts, each [n, D], whenever it is called."""

QUANTILES: Mapping[str, float] = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_BINS = 1 << 16


def at_once(rows: np.ndarray) -> Parts:
    """Rows [N, D] that are all there."""
    return lambda: [rows]


def delta_parts(
    actions: np.ndarray,
    states: np.ndarray,
    spans: Sequence[tuple[int, int]],
    dimensions: Sequence[int],
    horizon: int,
) -> Parts:
    """What a model learns that tells some dimensions as distances from the state it sees.

    Args:
        actions: [N, A].
        states: [N, S].
        spans: First row and length of each episode, one behind the other.
        dimensions: Of actions and states alike; in them the state of a row is taken from the action
            of the row and from those that follow in its episode.
        horizon: So many actions of each row count.
    """
    places = list(dimensions)
    ends = np.repeat([first + length for first, length in spans], [length for _, length in spans])

    def parts() -> Iterator[np.ndarray]:
        for later in range(horizon):
            rows = np.flatnonzero(np.arange(len(actions)) + later < ends)
            found = actions[rows + later]
            found[:, places] -= states[rows][:, places]
            yield found

    return parts


def vector_statistics(parts: Parts) -> dict[str, np.ndarray]:
    """``mean``, ``std`` (of the whole, not of a sample), ``min``, ``max`` and quantiles, each [D].

    Quantiles are interpolated linearly between neighbours, as ``numpy.quantile`` does. Values are
    taken as float32. The result also holds ``count`` [1].

    Raises:
        ValueError: There are no rows, or some are not finite.
    """
    counts, found = _moments(parts)
    total = int(counts[0].sum())
    ranks = {name: q * (total - 1) for name, q in QUANTILES.items()}
    wanted = sorted({each for rank in ranks.values() for each in (int(rank), -int(-rank // 1))})
    selected = _order_statistics(parts, counts, wanted)
    for name, rank in ranks.items():
        low, high = selected[int(rank)], selected[-int(-rank // 1)]
        found[name] = low + (high - low) * (rank - int(rank))
    return {**found, "count": np.array([total])}


def _moments(parts: Parts) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Histogram of the upper bits [D, 65536] and moments, combined as Chan et al. (1979) do."""
    total, counts = 0, np.zeros((0, 0), np.int64)
    mean = squares = smallest = largest = np.zeros(0)
    for part in parts():
        rows = np.asarray(part, np.float32)
        if not (good := np.isfinite(rows)).all():
            # What of distances is not finite is so in their first part, which has every row.
            row, dimension = divmod(int(np.argmin(good)), rows.shape[1])
            raise ValueError(
                f"holds a NaN or an infinity, first in row {total + row}, dimension {dimension}"
            )
        if not len(rows):
            continue
        if not total:
            dim = rows.shape[1]
            counts, mean, squares = np.zeros((dim, _BINS), np.int64), np.zeros(dim), np.zeros(dim)
            smallest, largest = np.full(dim, np.inf), np.full(dim, -np.inf)
        exact = rows.astype(np.float64)
        own, share = exact.mean(0), len(rows) / (total + len(rows))
        delta = own - mean
        squares = squares + ((exact - own) ** 2).sum(0) + delta**2 * total * share
        mean = mean + delta * share
        smallest, largest = np.minimum(smallest, exact.min(0)), np.maximum(largest, exact.max(0))
        upper = _sortable(rows) >> 16
        for dimension in range(len(counts)):
            counts[dimension] += np.bincount(upper[:, dimension], minlength=_BINS)
        total += len(rows)
    if not total:
        raise ValueError("holds no rows")
    std = np.sqrt(squares / total)
    return counts, {"mean": mean, "std": std, "min": smallest, "max": largest}


def _order_statistics(parts: Parts, counts: np.ndarray, ranks: list[int]) -> dict[int, np.ndarray]:
    """By rank, from 0, the value [D] that has it, given the histogram of the upper bits."""
    ends = counts.cumsum(1)
    upper = {rank: np.array([np.searchsorted(end, rank, side="right") for end in ends])
             for rank in ranks}  # fmt: skip
    lower = {
        (dimension, int(prefix)): np.zeros(_BINS, np.int64)
        for prefixes in upper.values()
        for dimension, prefix in enumerate(prefixes)
    }
    for part in parts():
        bits = _sortable(np.asarray(part, np.float32))
        for dimension, prefix in lower:
            own = bits[:, dimension]
            lower[dimension, prefix] += np.bincount(
                own[own >> 16 == prefix] & 0xFFFF, minlength=_BINS
            )
    found = {}
    for rank, prefixes in upper.items():
        words = []
        for dimension, prefix in enumerate(prefixes.tolist()):
            within = rank - (int(ends[dimension, prefix - 1]) if prefix else 0)
            last = np.searchsorted(lower[dimension, prefix].cumsum(), within, side="right")
            words.append(prefix << 16 | int(last))
        found[rank] = _float(np.array(words, np.uint32)).astype(np.float64)
    return found


def _sortable(values: np.ndarray) -> np.ndarray:
    """Unsigned integers in the order of float32 values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _float(words: np.ndarray) -> np.ndarray:
    """The inverse of :func:`_sortable`."""
    bits = np.where(words >> 31, words & np.uint32(0x7FFFFFFF), ~words)
    return bits.astype(np.uint32).view(np.float32)
