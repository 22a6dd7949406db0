"""From the reports of steps to a profile: what each component took, step by step.

Steps are measured where they run: with the items, devices and pipeline stages of the run. The first
ones warm up (allocators, caches, compilation): of these only the memory counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import WARM_UP_STEPS
from rlinf.flow.running_step import StepReport
from rlinf.flow.stage_worker import StageReport
from rlinf.planner.overhead import OverheadRecorder, clipped_median
from rlinf.planner.profile import ComponentProfile, Measurement

PROFILE_FILE = "profile.json"
_TIMES_OF_COMPONENTS = (
    "onload_seconds", "offload_seconds", "transfer_seconds_per_item", "first_result_share",
)  # fmt: skip
Equal = Literal["newest", "pooled"]


@dataclass(frozen=True)
class ComponentSample:
    """What one component took in one step: seconds of its slowest worker, bytes of its largest.

    Args:
        seconds: Work, without waiting for input, handing over, loading and offloading.
        onload: Loading.
        offload: Offloading.
        transfer: Handing over results.
        peak: Most memory.
        resident: Memory at the end.
        closing: Part of the work that led to the last item of each source.
        handed_over: When each source was handed over, in their order.
        switched: Whether it was loaded and offloaded.
    """

    seconds: float
    onload: float
    offload: float
    transfer: float
    peak: int
    resident: int
    closing: float = 0.0
    handed_over: tuple[float, ...] = ()
    switched: bool = False

    @classmethod
    def of(cls, stages: Iterable[list[StageReport]]) -> ComponentSample:
        """Of the reports of all stages of a component, each by rank; stages follow each other."""
        parts = [
            cls(
                seconds=max(r.seconds_working - r.cost.transfer_seconds for r in reports),
                onload=max(r.cost.onload_seconds for r in reports),
                offload=max(r.cost.offload_seconds for r in reports),
                transfer=max(r.cost.transfer_seconds for r in reports),
                peak=max(r.cost.peak_bytes for r in reports),
                resident=max(r.cost.resident_bytes for r in reports),
                closing=max(r.cost.closing_seconds for r in reports),
                handed_over=tuple(t for r in reports for t in r.cost.handed_over),
                switched=any(r.cost.switched for r in reports),
            )
            for reports in stages
        ]
        return cls(
            seconds=sum(p.seconds for p in parts),
            onload=sum(p.onload for p in parts),
            offload=sum(p.offload for p in parts),
            transfer=sum(p.transfer for p in parts),
            peak=max(p.peak for p in parts),
            resident=max(p.resident for p in parts),
            closing=sum(p.closing for p in parts),
            handed_over=parts[0].handed_over,
            switched=any(p.switched for p in parts),
        )

    def scaled(self, factor: float) -> ComponentSample:
        """The same with another length of the work."""
        return replace(self, seconds=factor * self.seconds, closing=factor * self.closing)


@dataclass
class StepRecorder:
    """Collects what the components of a run took.

    Args:
        plan: Where they ran.
        owners: Component of each stage.
        items: Items of a step: environments or sequences.
        origin: Where the figures are from, for the profile.
        concurrent: Components that serve all items at once.
        chunks: Pieces in which a step is handed on, in the order of the sources.
        warm_up: First steps that do not count.
        overhead: Takes what is beside the work of components.
        device_kinds: Kind of the devices of each component; not said of one that is left out.
        sharing: Components of each node whose stages are all on the same devices. With several
            sub-batches in flight they work at the same time, and each takes longer for the others;
            then the time of the node is divided over them.
    """

    plan: Plan
    owners: Mapping[str, str]
    items: int
    origin: str
    concurrent: frozenset[str] = frozenset()
    chunks: int = 1
    warm_up: int = WARM_UP_STEPS
    samples: dict[str, list[ComponentSample]] = field(default_factory=lambda: defaultdict(list))
    overhead: OverheadRecorder | None = None
    sharing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    device_kinds: Mapping[str, str] = field(default_factory=dict)
    _seen: int = 0
    _held: dict[str, list[int]] = field(default_factory=dict)

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
            self._note(name, sample)
        if self._seen > self.warm_up and self.overhead is not None:
            self.overhead.observe(report, seconds)

    def _note(self, component: str, sample: ComponentSample) -> None:
        """Take what a component did in a step; while it warms up only its memory counts."""
        held = self._held.setdefault(component, [0, 0])
        held[:] = max(held[0], sample.peak), max(held[1], sample.resident)
        if self._seen > self.warm_up:
            self.samples[component].append(sample)

    def profiles(self) -> dict[str, ComponentProfile]:
        """A profile with one measurement for each component; none before a step counts."""
        return {name: self._profile(name, taken) for name, taken in self.samples.items() if taken}

    def _profile(self, name: str, taken: list[ComponentSample]) -> ComponentProfile:
        plan = self.plan.components[name]
        seconds = [sample.seconds for sample in taken]
        low, middle, high = np.percentile(seconds, [25, 50, 75])
        # Where one device has several workers, what they hold adds up on it.
        per_device = max(1, plan.processes // len(plan.devices))
        switches = [sample for sample in taken if sample.switched]
        return ComponentProfile(
            measurements=(
                Measurement(
                    items=self.items,
                    devices=len(plan.devices),
                    pipeline_stages=plan.pipeline_stages,
                    seconds=max(float(middle), 1e-9),
                    closing_seconds=clipped_median(sample.closing for sample in taken),
                    spread=float(high - low),
                    peak_bytes=per_device * self._held[name][0],
                    samples=len(taken),
                    device_kind=self.device_kinds.get(name, ""),
                    origin=self.origin,
                ),
            ),
            onload_seconds=clipped_median(s.onload for s in switches) if switches else None,
            offload_seconds=clipped_median(s.offload for s in switches) if switches else None,
            resident_bytes=per_device * self._held[name][1],
            # Every process hands over its share.
            transfer_seconds_per_item=clipped_median(s.transfer for s in taken)
            * plan.processes
            / self.items,
            concurrent=name in self.concurrent,
            first_result_share=clipped_median(
                first_result_share(s.handed_over, self.chunks) for s in taken
            )
            if name in self.concurrent
            else 0.0,
        )


def first_result_share(handed_over: Sequence[float], chunks: int) -> float:
    """Part of a step that passes before chunks begin to come evenly.

    A chunk is complete with the last of its sources, and those before it; a few long sequences make
    all chunks late. With that part s, K chunks would come at ``s + (1 − s) · k / K`` of the time;
    s is such that their mean is the measured one.

    Args:
        handed_over: When each source was handed over, in their order [s].
        chunks: K.
    """
    if chunks < 2 or len(handed_over) < chunks:
        return 0.0
    complete = np.maximum.accumulate(np.asarray(handed_over))
    last = np.arange(1, chunks + 1) * len(complete) // chunks - 1
    mean, even = complete[last].mean() / complete[-1], (chunks + 1) / (2 * chunks)
    return float(np.clip((mean - even) / (1 - even), 0.0, 0.999))


def merged(
    profiles: Iterable[Mapping[str, ComponentProfile]], *, equal: Equal = "newest"
) -> dict[str, ComponentProfile]:
    """The measurements of several trials as one profile by component.

    Times to load are the largest that were measured, that to hand over is their median.

    Args:
        profiles: Of the trials, in their order.
        equal: What is kept of two measurements of one size: the later one (``newest``), or their
            mean by steps (``pooled``). Of memory it is the most that was measured, in any case.
    """
    found: dict[str, list[ComponentProfile]] = defaultdict(list)
    for profile in profiles:
        for name, part in profile.items():
            found[name].append(part)
    return {name: _merged(parts, equal) for name, parts in found.items()}


def _merged(parts: list[ComponentProfile], equal: Equal) -> ComponentProfile:
    by_size: dict[tuple[Any, ...], Measurement] = {}
    for measurement in (m for part in parts for m in part.measurements):
        size = (
            measurement.device_kind,
            measurement.pipeline_stages,
            measurement.devices,
            measurement.items,
        )
        known = by_size.get(size)
        if known is None:
            by_size[size] = measurement
            continue
        kept = _pooled(known, measurement) if equal == "pooled" else measurement
        # Memory is not watched in every run.
        peak = max(known.peak_bytes, measurement.peak_bytes)
        by_size[size] = kept.model_copy(update={"peak_bytes": peak})
    last = parts[-1]
    return ComponentProfile(
        measurements=tuple(by_size[size] for size in sorted(by_size)),
        onload_seconds=_largest(part.onload_seconds for part in parts),
        offload_seconds=_largest(part.offload_seconds for part in parts),
        resident_bytes=max(part.resident_bytes for part in parts),
        transfer_seconds_per_item=clipped_median(part.transfer_seconds_per_item for part in parts),
        concurrent=last.concurrent,
        first_result_share=clipped_median(part.first_result_share for part in parts),
        scaling=last.scaling,
    )


def _largest(seconds: Iterable[float | None]) -> float | None:
    """Of those that were measured; None: none was."""
    return max((each for each in seconds if each is not None), default=None)


def renewed(
    known: Mapping[str, ComponentProfile], new: Mapping[str, ComponentProfile]
) -> dict[str, ComponentProfile]:
    """What was known, and what was measured since, which counts where there is both.

    Of memory, which is not watched in every run, it is the most that was measured.
    """
    found = merged([known, new])
    for name in known.keys() & new.keys():
        measured = {field: getattr(new[name], field) for field in _TIMES_OF_COMPONENTS}
        found[name] = found[name].model_copy(
            update={field: value for field, value in measured.items() if value is not None}
        )
    return found


def _pooled(one: Measurement, other: Measurement) -> Measurement:
    """Two measurements of one size as one over all their steps."""
    samples = one.samples + other.samples
    mean = {
        name: (one.samples * getattr(one, name) + other.samples * getattr(other, name)) / samples
        for name in ("seconds", "closing_seconds", "spread")
    }
    origin = one.origin if one.origin == other.origin else f"{one.origin}; {other.origin}"
    return other.model_copy(update={**mean, "samples": samples, "origin": origin})
