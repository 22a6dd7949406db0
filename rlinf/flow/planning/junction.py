"""All pairs of options of two parts, composed in one way: times, devices, memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.flow.planning.formulas import Floats, Form, Kind, compose, least_total
from rlinf.flow.planning.options import Integers, JoinSource, Options


@dataclass(frozen=True)
class Limits:
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
class Junction:
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

    def combine(self, left: Options, right: Options, limits: Limits) -> Options | None:
        """All pairs that fit and are not too slow; None: there is none.

        Parts that take turns use the same devices, and each finds there what the other keeps while
        it is idle. Parts side by side use devices of their own.
        """
        rows, columns = np.indices((len(left), len(right)), np.int64).reshape(2, -1)
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

    def _side_by_side(self, a: Integers, b: Integers) -> Integers:
        """[N, K] devices of both parts; the one with the larger processes comes first."""
        align_a, align_b = self.alignment
        if align_b > align_a:
            a, b, align_b = b, a, align_a
        padded = -(-a // align_b) * align_b
        return np.where(b > 0, padded + b, a)
