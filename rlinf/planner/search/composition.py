"""All pairs of options of two parts, composed in one way: times, devices, memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.planner.search.formulas import Floats, Form, Kind, compose, least_total
from rlinf.planner.search.options import Integers, JoinSource, Options

# So few pairs are composed in less time than it takes to say which of them may win.
FEW_PAIRS = 4096


@dataclass(frozen=True)
class OptionBounds:
    """What an option must keep to.

    Args:
        devices: [K] devices of each kind.
        memory: [K] memory of a device of each kind [bytes].
        seconds: Time of a step above which an option is of no interest [s].
    """

    devices: Integers
    memory: Floats
    seconds: float = np.inf


@dataclass(frozen=True)
class Composition:
    """How two parts are composed.

    Args:
        kind: Whether they take turns, stream, or run side by side.
        form: Form of the whole.
        granularity: Items per chunk.
        chunks: Chunks of a step.
        alignment: Multiples at which the devices of the left and of the right part must begin.
    """

    kind: Kind
    form: Form
    granularity: int
    chunks: int
    alignment: tuple[int, int]

    def combine(self, left: Options, right: Options, limits: OptionBounds) -> Options | None:
        """Pairs that fit and are not too slow, of which one may win; None: there is none.

        Parts that take turns use the same devices, and each finds there what the other keeps while
        it is idle. Parts side by side use devices of their own.
        """
        rows, columns = self._pairs(left, right)
        stream = compose(
            self.kind, self.form, left.stream.take(rows), right.stream.take(columns), self.chunks
        )
        kept = np.flatnonzero(least_total(self.form, stream, self.chunks) <= limits.seconds)
        a, b = left.take(rows[kept]), right.take(columns[kept])
        if self.kind == "temporal":
            devices = np.maximum(a.devices, b.devices)
            peak = np.maximum(a.peak + b.idle, b.peak + a.idle)
            idle = a.idle + b.idle
        else:
            devices = self._side_by_side(a.devices, b.devices)
            peak, idle = np.maximum(a.peak, b.peak), np.maximum(a.idle, b.idle)
        fits = (devices <= limits.devices).all(axis=1) & (peak <= limits.memory).all(axis=1)
        if not fits.any():
            return None
        kept = kept[fits]
        return Options(
            devices[fits],
            stream.take(kept),
            peak[fits],
            idle[fits],
            np.zeros(len(kept), np.int64),
            rows[kept],
            columns[kept],
            (JoinSource(self.kind, self.granularity, left, right),),
        )

    def _pairs(self, left: Options, right: Options) -> tuple[Integers, Integers]:
        """Indices into both parts, in ascending order.

        Parts that take turns need the devices of the larger one. With an option of one part, only
        the fastest options of the other are looked at that have no more devices: one of each group
        that is alike otherwise. What is left out is worse.
        """
        size = (len(left), len(right))
        if self.kind == "temporal" and left.devices.shape[1] == 1 and size[0] * size[1] > FEW_PAIRS:
            groups = (_alike(left, left.stream.head), _alike(right, right.stream.tail))
            looked_at = len(groups[0]) * size[1] + len(groups[1]) * size[0]
            if looked_at < size[0] * size[1]:
                one, beside_one = _fastest(left, groups[0], right.devices[:, 0])
                beside_other, other = _fastest(right, groups[1], left.devices[:, 0])[::-1]
                rows, columns = np.append(one, beside_other), np.append(beside_one, other)
                pairs = np.unique(rows * size[1] + columns)
                return pairs // size[1], pairs % size[1]
        rows, columns = np.indices(size, np.int64).reshape(2, -1)
        return rows, columns

    def _side_by_side(self, a: Integers, b: Integers) -> Integers:
        """[N, K] devices of both parts; the one with the larger replicas comes first."""
        align_a, align_b = self.alignment
        if align_b > align_a:
            a, b, align_b = b, a, align_a
        padded = -(-a // align_b) * align_b
        return np.where(b > 0, padded + b, a)


def _alike(part: Options, pace: Floats) -> list[Integers]:
    """Options of one kind of device that differ in no more than devices and time.

    Returns:
        Indices of each group, ascending in devices.
    """
    same = np.column_stack([pace, part.peak[:, 0], part.idle[:, 0]])
    _, group = np.unique(same, axis=0, return_inverse=True)
    order = np.lexsort((part.devices[:, 0], group))
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _fastest(part: Options, groups: list[Integers], devices: Integers) -> tuple[Integers, Integers]:
    """The fastest option of each group on at most so many devices, the first of equals.

    Returns:
        Index of the option, and index into ``devices``.
    """
    order = np.argsort(part.stream.first, kind="stable")
    rank = np.empty(len(part), np.int64)
    rank[order] = np.arange(len(part))
    options, places = [], []
    for group in groups:
        best = order[np.minimum.accumulate(rank[group])]
        last = np.searchsorted(part.devices[group, 0], devices, side="right") - 1
        fits = np.flatnonzero(last >= 0)
        options.append(best[last[fits]])
        places.append(fits)
    return np.concatenate(options), np.concatenate(places)
