"""From the reports of steps to a profile: what components took, and steps beside their work.

Steps are measured where they run: with the items, devices and pipeline stages of the run. The first
ones warm up (allocators, caches, compilation): of these only the memory counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rlinf.flow.executor import StepReport
from rlinf.flow.graph import Flow, Node
from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import WARM_UP_STEPS
from rlinf.flow.stage_worker import StageCost, StageReport
from rlinf.planner.profile import ComponentProfile, Exchange, Measurement, Overhead

PROFILE_FILE = "profile.json"
_TIMES_OF_COMPONENTS = (
    "onload_seconds", "offload_seconds", "transfer_seconds_per_item", "first_result_share",
)  # fmt: skip
Equal = Literal["newest", "pooled"]


def clipped_median(values: Iterable[float], otherwise: float = 0.0) -> float:
    """The median, at least 0, as what is left of a time may be less than nothing by chance."""
    found = list(values)
    return max(0.0, float(np.median(found))) if found else otherwise


# -- beside the work of components --------------------------------------------------------------

_Loop = tuple[str, bool, int]
"""A loop, whether its stages are on different devices, and on how many."""


@dataclass
class OverheadRecorder:
    """Collects what steps took beside the work of their components: hand-overs, driver.

    The time of a loop is longer than the work of its stages: every exchange wakes workers. The time
    of a step is longer than that of its nodes: leases, calls, reports, metrics. Both are what is
    left of a measured time when the measured work is taken away: exchanges in steps in which the
    stages of a loop wait for each other (one sub-batch in flight), the driver's time in steps whose
    nodes take turns.
    """

    flow: Flow
    plan: Plan
    exchanges: Mapping[str, int]
    """How often the stages of a loop feed each other in a step, by node."""
    staleness: int = 0  # steps that are under way besides the one that trains
    synchronisations: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    loops: dict[_Loop, list[float]] = field(default_factory=lambda: defaultdict(list))

    def observe(self, report: StepReport, seconds: float | None) -> None:
        """Take the report of a step, and its whole time where that is known."""
        self.synchronisations.append(report.begin_seconds)
        nodes, passed = self.flow.nodes, report.node_seconds
        if any(node.name not in passed for node in nodes):
            return
        # What the stages of a node did, one after the other, without waiting for input.
        work = {n.name: sum(report.seconds(stage.label) for stage in n.stages) for n in nodes}
        for node in nodes:
            parts = [self.plan.components[name] for name in node.components]
            if node.is_loop and max(part.pipeline_stages for part in parts) == 1:
                idle = passed[node.name] - work[node.name]
                per_exchange = idle / self.exchanges.get(node.name, 1)
                self.loops[self._loop(node)].append(per_exchange)
        if seconds is not None and not self.staleness and self._nodes_share:
            both = sum(passed[n.name] if n.is_loop else work[n.name] for n in nodes)
            self.driver.append(seconds - report.begin_seconds - both)

    @property
    def runs_ahead(self) -> bool:
        """Whether nodes work at the same time, on different steps: then each takes longer."""
        return self.staleness > 0 and not self._nodes_share

    @property
    def _nodes_share(self) -> bool:
        """Whether every two nodes have a device in common, so that all take turns."""
        nodes = self.flow.nodes
        return all(
            self.plan.overlap(one.components, other.components) for one in nodes for other in nodes
        )

    @property
    def divides_a_loop(self) -> bool:
        """Whether stages of a loop are on different devices."""
        return any(self._loop(node)[1] for node in self.flow.nodes if node.is_loop)

    def count_work_of(
        self, own: Mapping[str, ComponentProfile], known: Mapping[str, ComponentProfile]
    ) -> None:
        """Count as part of the exchanges what stages take longer here than is known of them.

        ``own`` was measured in these steps, one size of each component, ``known`` elsewhere.
        """
        for node in self.flow.nodes:
            loop = self._loop(node)
            if loop not in self.loops:
                continue
            longer = sum(_longer(own[name], known[name]) for name in node.components)
            per_exchange = longer / self.exchanges.get(node.name, 1)
            self.loops[loop] = [seconds + per_exchange for seconds in self.loops[loop]]

    def _loop(self, node: Node) -> _Loop:
        homes = {self.plan.components[name].devices for name in node.components}
        return node.name, len(homes) > 1, len(self.plan.devices(node.components))


def _longer(own: ComponentProfile, known: ComponentProfile) -> float:
    [here] = own.measurements
    there = [m for m in known.measurements if m.size[1:] == here.size[1:]]
    return here.seconds - there[0].seconds if there else 0.0


def overhead(recorders: Sequence[OverheadRecorder], known: Overhead | None = None) -> Overhead:
    """The medians over all steps; what none of them shows is as it was known, or else 0."""
    before = known or Overhead()
    loops: dict[_Loop, list[float]] = defaultdict(list)
    for recorder in recorders:
        for loop, found in recorder.loops.items():
            loops[loop].extend(found)
    exchanges = (
        Exchange(node=node, apart=apart, devices=devices, seconds=clipped_median(found))
        for (node, apart, devices), found in loops.items()
    )
    synchronisations = [s for r in recorders for s in r.synchronisations]
    driver = [s for r in recorders for s in r.driver]
    return Overhead(
        synchronisation_seconds=clipped_median(synchronisations, before.synchronisation_seconds),
        driver_seconds=clipped_median(driver, before.driver_seconds),
        exchanges=joined(before.exchanges, tuple(exchanges)),
    )


def joined(known: tuple[Exchange, ...], new: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    """What was measured earlier and now; of equal settings the new one."""
    by_setting = {(e.node, e.apart, e.devices): e for e in (*known, *new)}
    return tuple(by_setting.values())


# -- the work of components ---------------------------------------------------------------------


@dataclass(frozen=True)
class ComponentSample:
    """What one component took in one step, in its slowest worker."""

    seconds: float  # work, without waiting for input, handing over, loading and offloading
    cost: StageCost  # what it cost beside; memory is that of the worker that held most

    @classmethod
    def of(cls, stages: Iterable[list[StageReport]]) -> ComponentSample:
        """Of the reports of all stages of a component, each by rank; stages follow each other."""
        seconds, costs = 0.0, []
        for reports in stages:
            seconds += max(r.seconds_working - r.cost.transfer_seconds for r in reports)
            ranks = [report.cost for report in reports]
            handed_over = tuple(time for cost in ranks for time in cost.handed_over)
            costs.append(_together(ranks, max, handed_over))
        return cls(seconds, _together(costs, sum, costs[0].handed_over))

    def scaled(self, factor: float) -> ComponentSample:
        """The same with another length of the work."""
        cost = replace(self.cost, closing_seconds=factor * self.cost.closing_seconds)
        return ComponentSample(factor * self.seconds, cost)


def _together(
    costs: Sequence[StageCost],
    of_times: Callable[[list[float]], float],
    handed_over: tuple[float, ...],
) -> StageCost:
    return StageCost(
        onload_seconds=of_times([c.onload_seconds for c in costs]),
        offload_seconds=of_times([c.offload_seconds for c in costs]),
        transfer_seconds=of_times([c.transfer_seconds for c in costs]),
        peak_bytes=max(c.peak_bytes for c in costs),
        resident_bytes=max(c.resident_bytes for c in costs),
        closing_seconds=of_times([c.closing_seconds for c in costs]),
        handed_over=handed_over,
        switched=any(c.switched for c in costs),
    )


@dataclass
class StepRecorder:
    """Collects what the components of a run took."""

    plan: Plan  # where they ran
    owners: Mapping[str, str]  # component of each stage
    items: int  # of a step: environments or sequences
    origin: str  # where the figures are from, for the profile
    overhead: OverheadRecorder  # takes what is beside the work of components
    concurrent: frozenset[str] = frozenset()  # components that serve all items at once
    chunks: int = 1  # pieces in which a step is handed on, in the order of the sources
    warm_up: int = WARM_UP_STEPS  # first steps that do not count
    device_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kind of the devices of each component; not said of one that is left out."""
    sharing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Components of each node whose stages are all on the same devices. With several sub-batches in
    flight they work at the same time, and each takes longer for the others; then the time of the
    node is divided over them."""
    samples: dict[str, list[ComponentSample]] = field(default_factory=lambda: defaultdict(list))
    _seen: int = 0
    _held: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Steps that count."""
        return max(0, self._seen - self.warm_up)

    def observe(self, report: StepReport, seconds: float | None = None) -> None:
        """Take the report of the next step, and its whole time where that is known."""
        self._seen += 1
        stages: dict[str, list[list[StageReport]]] = defaultdict(list)
        for label, reports in report.stages.items():
            stages[self.owners[label]].append(reports)
        samples = {name: ComponentSample.of(parts) for name, parts in stages.items()}
        for node, names in self.sharing.items():
            worked = sum(samples[name].seconds for name in names)
            passed = report.node_seconds.get(node, worked)
            if worked > passed:
                samples |= {name: samples[name].scaled(passed / worked) for name in names}
        for name, sample in samples.items():
            (peak, resident), cost = self._held.get(name, (0, 0)), sample.cost
            self._held[name] = max(peak, cost.peak_bytes), max(resident, cost.resident_bytes)
            if self.count:
                self.samples[name].append(sample)
        if self.count:
            self.overhead.observe(report, seconds)

    def profiles(self) -> dict[str, ComponentProfile]:
        """A profile with one measurement for each component; none before a step counts."""
        return {name: self._profile(name, taken) for name, taken in self.samples.items()}

    def _profile(self, name: str, taken: list[ComponentSample]) -> ComponentProfile:
        plan, costs = self.plan.components[name], [sample.cost for sample in taken]
        low, middle, high = np.percentile([sample.seconds for sample in taken], [25, 50, 75])
        # Where a device has several workers, what they hold adds up; the fullest device counts.
        most = max(plan.processes_by_device().values())
        peak, resident = self._held.get(name, (0, 0))
        onload = [cost.onload_seconds for cost in costs if cost.switched]
        offload = [cost.offload_seconds for cost in costs if cost.switched]
        # Every process hands over its share.
        transfer = clipped_median(c.transfer_seconds for c in costs) * plan.processes / self.items
        concurrent = name in self.concurrent
        shares = [first_result_share(c.handed_over, self.chunks) for c in costs if concurrent]
        measurement = Measurement(
            items=self.items,
            devices=len(plan.devices),
            processes=plan.processes,
            pipeline_stages=plan.pipeline_stages,
            seconds=max(float(middle), 1e-9),
            closing_seconds=clipped_median(cost.closing_seconds for cost in costs),
            spread=float(high - low),
            peak_bytes=most * peak,
            samples=len(taken),
            device_kind=self.device_kinds.get(name, ""),
            origin=self.origin,
        )
        return ComponentProfile(
            measurements=(measurement,),
            onload_seconds=clipped_median(onload) if onload else None,
            offload_seconds=clipped_median(offload) if offload else None,
            resident_bytes=most * resident,
            transfer_seconds_per_item=transfer,
            concurrent=concurrent,
            first_result_share=clipped_median(shares),
        )


def first_result_share(handed_over: Sequence[float], chunks: int) -> float:
    """Part of a step that passes before chunks begin to come evenly.

    A chunk is complete with the last of its sources, and those before it; a few long sequences make
    all chunks late. With that part s, K chunks would come at ``s + (1 − s) · k / K`` of the time;
    s is such that their mean is the measured one. ``handed_over`` is when each source was, in their
    order [s].
    """
    if chunks < 2 or len(handed_over) < chunks:
        return 0.0
    complete = np.maximum.accumulate(np.asarray(handed_over))
    last = np.arange(1, chunks + 1) * len(complete) // chunks - 1
    mean, even = complete[last].mean() / complete[-1], (chunks + 1) / (2 * chunks)
    return float(np.clip((mean - even) / (1 - even), 0.0, 0.999))


# -- several profiles as one --------------------------------------------------------------------


def merged(
    profiles: Iterable[Mapping[str, ComponentProfile]], *, equal: Equal = "newest"
) -> dict[str, ComponentProfile]:
    """The measurements of several trials, in their order, as one profile by component.

    Times to load are the largest that were measured, that to hand over is their median. Of two
    measurements of one size the later one is kept (``newest``), or their mean by steps
    (``pooled``); of memory, which is not watched in every run, in any case the most.
    """
    found: dict[str, list[ComponentProfile]] = defaultdict(list)
    for profile in profiles:
        for name, part in profile.items():
            found[name].append(part)
    return {name: _merged(parts, equal) for name, parts in found.items()}


def _merged(parts: list[ComponentProfile], equal: Equal) -> ComponentProfile:
    by_size: dict[tuple[object, ...], Measurement] = {}
    for measurement in (m for part in parts for m in part.measurements):
        known, kept = by_size.get(measurement.size), measurement
        if known is not None:
            peak = max(known.peak_bytes, measurement.peak_bytes)
            kept = _pooled(known, measurement) if equal == "pooled" else measurement
            kept = kept.model_copy(update={"peak_bytes": peak})
        by_size[measurement.size] = kept
    last, laws = parts[-1], [part.scaling for part in parts if part.scaling is not None]
    onload = [p.onload_seconds for p in parts if p.onload_seconds is not None]
    offload = [p.offload_seconds for p in parts if p.offload_seconds is not None]
    return ComponentProfile(
        measurements=tuple(sorted(by_size.values(), key=lambda m: m.size)),
        onload_seconds=max(onload, default=None),
        offload_seconds=max(offload, default=None),
        resident_bytes=max(part.resident_bytes for part in parts),
        transfer_seconds_per_item=clipped_median(part.transfer_seconds_per_item for part in parts),
        concurrent=last.concurrent,
        first_result_share=clipped_median(part.first_result_share for part in parts),
        scaling=laws[-1] if laws else None,
    )


def _pooled(one: Measurement, other: Measurement) -> Measurement:
    """Two measurements of one size as one over all their steps."""
    samples = one.samples + other.samples
    mean = {
        name: (one.samples * getattr(one, name) + other.samples * getattr(other, name)) / samples
        for name in ("seconds", "closing_seconds", "spread")
    }
    origin = one.origin if one.origin == other.origin else f"{one.origin}; {other.origin}"
    return other.model_copy(update={**mean, "samples": samples, "origin": origin})


def renewed(
    known: Mapping[str, ComponentProfile], new: Mapping[str, ComponentProfile]
) -> dict[str, ComponentProfile]:
    """What was known, and what was measured since, which counts where there is both."""
    found = merged([known, new])
    for name in known.keys() & new.keys():
        measured = {field: getattr(new[name], field) for field in _TIMES_OF_COMPONENTS}
        found[name] = found[name].model_copy(
            update={field: value for field, value in measured.items() if value is not None}
        )
    return found
