"""Time and memory of a component at any legal size, from measurements at some sizes.

*Items.* Between two measured numbers of items the time follows the power law through both. Work
that is bound by a fixed cost (slope 0) and work that is bound by throughput (slope 1) are both
straight in log space, so that the curve is exact in either regime and monotone wherever the
measurements are. Memory is linear between measurements: a fixed part and one per item.

*Devices.* Between two measured numbers of devices the same law is applied to the times that both
give for the same items.

*Beyond.* Fewer items than measured cost what the fewest measured did. More items cost in
proportion, or along the last slope where that is steeper; memory grows along its last slope, with a
single measurement in proportion. Each errs on the side of too much. Devices beyond the measured
ones are legal only by the :class:`~rlinf.planner.profile.ScalingLaw` of the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlinf.config.nearest import join_choices
from rlinf.errors import ConfigError
from rlinf.planner.profile import ComponentProfile, Measurement, named_kinds

Floats = NDArray[np.float64]


class CostModel:
    """Costs of one component on one kind of device.

    Without a ``kind`` it is the one that was measured. Measurements of other kinds are left out;
    where none names this kind, those without a kind are taken for it, and :attr:`assumed` says so.

    A plan gives a component one process on ``devices_per_process`` devices. Measurements of other
    numbers of processes on the same devices count only where there are none of a plan's, neither of
    as many pipeline stages nor of one, from which several are told; :meth:`extensions` says so.

    Raises:
        ConfigError: There is no measurement on this kind, or of several where none is asked for, or
            two of one size.
    """

    def __init__(
        self,
        name: str,
        profile: ComponentProfile,
        kind: str = "",
        *,
        devices_per_process: int = 1,
    ) -> None:
        self.name = name
        self.profile = profile
        kinds = profile.kinds
        if not kind and len(kinds) > 1:
            raise ConfigError(
                f"'{name}' was measured on {named_kinds(kinds)}; say for which of them to plan"
            )
        self.assumed = bool(kind) and kind not in kinds
        wanted = "" if self.assumed else kind
        used = [m for m in profile.measurements if not kind or m.device_kind == wanted]
        if not used:
            raise ConfigError(
                f"'{name}' was not measured on {kind}; measured on {named_kinds(kinds)}"
            )
        self._devices_per_process = devices_per_process
        used = _as_planned(used, devices_per_process)
        self._curves: dict[int, list[_ItemCurve]] = {}
        for stages in sorted({m.pipeline_stages for m in used}):
            of_stages = [m for m in used if m.pipeline_stages == stages]
            self._curves[stages] = [
                _ItemCurve(name, [m for m in of_stages if m.devices == devices])
                for devices in sorted({m.devices for m in of_stages})
            ]

    def seconds(self, items: ArrayLike, devices: ArrayLike, stages: int = 1) -> Floats:
        """Time of one pass over ``items`` on ``devices`` [s]; infinite where that is not legal.

        ``items`` and ``devices`` broadcast. Where a number of ``stages`` (sub-batches in flight)
        was not measured on these devices, every sub-batch costs what its items cost alone:
        ``stages · seconds(items/stages)``; where that was not measured either, it is not legal.
        """
        found = self._over_devices(self._curves.get(stages, []), items, devices, "seconds")
        if stages == 1 or 1 not in self._curves or np.isfinite(found).all():
            return found
        alone = stages * self.seconds(np.asarray(items, float) / stages, devices)
        return np.where(np.isfinite(found), found, alone)

    def closing_share(self, items: ArrayLike, devices: ArrayLike, stages: int = 1) -> Floats:
        """Part of the time that the last pass of a loop takes, at the nearest measured devices."""
        curves = self._curves.get(stages, self._curves.get(1, []))
        n, d = np.broadcast_arrays(np.asarray(items, float), np.asarray(devices, float))
        if not curves:
            return np.zeros(n.shape)
        distance = np.stack([np.abs(np.log(d / curve.devices)) for curve in curves])
        shares = np.stack([curve.closing_share(n) for curve in curves])
        return np.asarray(np.take_along_axis(shares, distance.argmin(0)[None], 0)[0])

    def peak_bytes(self, items: ArrayLike, devices: ArrayLike, stages: int = 1) -> Floats:
        """Most memory of one device; infinite where the size is not legal."""
        curves = self._curves.get(stages, self._curves.get(1, []))
        return self._over_devices(curves, items, devices, "peak_bytes")

    def check_devices(self, devices: int, stages: int = 1) -> None:
        """Refuse a number of devices that is not legal.

        Raises:
            ConfigError: It was not measured and no law covers it.
        """
        if np.isfinite(self.seconds(1, devices, stages)):
            return
        if not self.covers(stages):
            raise self.not_measured([stages])
        low, high = self.bounds()
        raise ConfigError(
            f"'{self.name}' on {devices} devices was not measured and no scaling law covers "
            f"it; nearest: {min(max(devices, low), high)}"
        )

    def extensions(self, items: float, devices: int, stages: int = 1) -> tuple[str, ...]:
        """Which measured ranges an answer for this size leaves, in words."""
        curves = self._curves.get(stages, self._curves.get(1, []))
        if stages > 1 and 1 in self._curves:
            covered = self._over_devices(curves, items, devices, "seconds")
            curves = curves if np.isfinite(covered).all() else self._curves[1]
        found = []
        counts = [curve.devices for curve in curves]
        inside = [c for c in curves if c.devices <= devices][-1:]
        inside += [c for c in curves if c.devices >= devices][:1]
        if not counts[0] <= devices <= counts[-1]:
            edge = curves[0] if devices < counts[0] else curves[-1]
            found.append(f"{devices} devices by scaling law from {edge.devices}")
            items, inside = items * edge.devices / devices, [edge]
        if curves is not self._curves.get(stages):
            found.append(f"{stages} pipeline stages from 1")
            items /= stages
        low, high = min(c.items[0] for c in inside), max(c.items[-1] for c in inside)
        if not low <= items <= high:
            known = f"{low:g}" if low == high else f"{low:g}–{high:g}"
            where = f"{inside[0].devices} device{'' if inside[0].devices == 1 else 's'}"
            found.append(f"{items:g} items from {known} on {where}")
        together = self._devices_per_process
        others = {
            n for c in inside for n in c.processes - {_planned_processes(c.devices, together)}
        }
        if others:
            own = _planned_processes(devices, together)
            several = "" if own == 1 else "es"
            found.append(f"{own} process{several} from {join_choices(sorted(others))}")
        return tuple(found)

    def covers(self, stages: int) -> bool:
        """Whether a number of sub-batches in flight was measured, or can be told from one."""
        return stages in self._curves or 1 in self._curves

    def not_measured(self, stages: Sequence[int]) -> ConfigError:
        """That none of these numbers of sub-batches in flight is covered."""
        return ConfigError(
            f"'{self.name}' was not measured with {join_choices(stages)} pipeline stages; "
            f"measured with {join_choices(list(self._curves))}"
        )

    def bounds(self) -> tuple[int, int]:
        """Fewest and most devices that a measurement or the law covers."""
        law = self.profile.scaling
        counts = [curve.devices for curves in self._curves.values() for curve in curves]
        low, high = min(counts), max(counts)
        return (min(low, law.lowest), max(high, law.highest)) if law else (low, high)

    def _over_devices(
        self, curves: Sequence[_ItemCurve], items: ArrayLike, devices: ArrayLike, what: str
    ) -> Floats:
        """Evaluate curves of several numbers of devices at any number of devices."""
        if not curves:
            return np.full(np.broadcast(items, devices).shape, np.inf)
        n, d = np.broadcast_arrays(np.asarray(items, float), np.asarray(devices, float))
        counts = np.array([curve.devices for curve in curves], float)
        low = np.clip(np.searchsorted(counts, d, side="right") - 1, 0, len(counts) - 1)
        high = np.clip(np.searchsorted(counts, d), 0, len(counts) - 1)
        # A device beyond the measured ones sees as many items as one of the nearest measured.
        outside = (d < counts[0]) | (d > counts[-1])
        seen = np.where(outside, n * counts[low] / d, n)
        values = np.stack([getattr(curve, what)(seen) for curve in curves])
        first = np.take_along_axis(values, low[None], 0)[0]
        last = np.take_along_axis(values, high[None], 0)[0]
        between = counts[high] > counts[low]
        width = np.log(np.where(between, counts[high] / counts[low], np.e))
        share = np.where(between, np.log(d / counts[low]) / width, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(first > 0, last / first, 1.0)
        found = first * np.where(outside, 1.0, np.where(ratio > 0, ratio, 1.0) ** share)
        factor = self._law(d, counts[low]) if what == "seconds" else self._law(d, d, loss=False)
        extended = np.where(np.isfinite(factor), found, 1.0) * factor
        return np.where(outside, extended, found)

    def _law(self, devices: Floats, measured: Floats, *, loss: bool = True) -> Floats:
        """Factor of the scaling law, infinite where it does not reach."""
        law = self.profile.scaling
        if law is None:
            return np.full(devices.shape, np.inf)
        doublings = np.abs(np.log2(devices / measured)) if loss else np.zeros(devices.shape)
        legal = (devices >= law.lowest) & (devices <= law.highest)
        return np.where(legal, law.factor_per_doubling**doublings, np.inf)


def _planned_processes(devices: int, devices_per_process: int) -> int:
    """Processes that a plan has on so many devices."""
    return max(1, devices // devices_per_process)


def _as_planned(measurements: Sequence[Measurement], devices_per_process: int) -> list[Measurement]:
    """Those with as many processes as a plan has; where there are none, those most like it."""

    def beside(measured: Measurement) -> int:
        planned = _planned_processes(measured.devices, devices_per_process)
        return abs((measured.processes or planned) - planned)

    def size(measured: Measurement) -> tuple[int, int, int]:
        return measured.pipeline_stages, measured.devices, measured.items

    planned = [measured for measured in measurements if not beside(measured)]
    known = {(m.pipeline_stages, m.devices) for m in planned}
    others = [
        m for m in measurements if not known & {(m.pipeline_stages, m.devices), (1, m.devices)}
    ]
    nearest = {size(m): m for m in sorted(others, key=beside, reverse=True)}
    # Of one size, a figure that says its processes is surer than one that leaves them assumed.
    said = {size(m) for m in planned if m.processes is not None}
    kept = [m for m in planned if m.processes is not None or size(m) not in said]
    return [*kept, *nearest.values()]


class _ItemCurve:
    """Time and memory over items, at one number of devices and pipeline stages."""

    def __init__(self, name: str, measurements: Sequence[Measurement]) -> None:
        points = sorted(measurements, key=lambda m: m.items)
        self.devices = points[0].devices
        self.processes = {p.processes for p in points if p.processes is not None}
        self.items = np.array([p.items for p in points], float)
        self._seconds = np.array([p.seconds for p in points])
        self._closing = np.array([p.closing_seconds / p.seconds for p in points]).clip(0, 1)
        self._bytes = np.array([p.peak_bytes for p in points], float)
        if len(set(self.items)) < len(points):
            raise ConfigError(
                f"'{name}' has two measurements of one size on {self.devices} devices; keep one"
            )
        rise = np.diff(np.log(self._seconds)) / np.diff(np.log(self.items))
        beyond = max(1.0, rise[-1]) if len(rise) else 1.0
        self._slopes = np.append(rise, beyond)
        memory_slopes = np.diff(self._bytes) / np.diff(self.items)
        single = self._bytes[-1] / self.items[-1]
        self._bytes_beyond = max(0.0, memory_slopes[-1]) if len(rise) else single

    def seconds(self, items: Floats) -> Floats:
        """Power law through the neighbours; exact at a measurement."""
        left = np.searchsorted(self.items, items, side="right") - 1
        held = np.maximum(left, 0)
        growth: Any = (items / self.items[held]) ** self._slopes[held]
        return np.asarray(np.where(left < 0, self._seconds[0], self._seconds[held] * growth))

    def closing_share(self, items: Floats) -> Floats:
        """Straight line through the neighbours, constant beyond."""
        return np.asarray(np.interp(items, self.items, self._closing))

    def peak_bytes(self, items: Floats) -> Floats:
        """Straight line through the neighbours; exact at a measurement."""
        more = np.maximum(items - self.items[-1], 0.0)
        return np.asarray(np.interp(items, self.items, self._bytes) + more * self._bytes_beyond)
