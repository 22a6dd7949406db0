"""The timeline of a run as spans of workers on devices, and what devices did not do."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlinf.monitor.timeline import Event

Interval = tuple[float, float]
"""Begin and end in seconds."""

WORK = ("stage", "residency", "sync")
"""Categories of spans during which a worker uses its devices."""


@dataclass(frozen=True)
class Span:
    """One span of a worker or of the driver; times are seconds of the system clock."""

    name: str
    category: str
    track: str
    """The worker, ``component:rank``, or a thread of the driver."""
    begin: float
    end: float
    node: str = ""
    """Node of the flow that the span belongs to; empty where the trace does not say."""
    step: int | None = None
    """Training step, where the trace says it."""
    component: str = ""
    """The worker's component; empty for the driver."""
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceShare:
    """What one device did during the training steps that are looked at; all are shares of them."""

    device: int
    busy: Mapping[str, float]
    """Some worker computed, by component."""
    waiting: float
    """None computed, and at least one held the device and waited for input."""
    idle: float
    """Nobody used it."""

    @property
    def bars(self) -> dict[str, float]:
        """Shares of the components that add up to the time in which any computed."""
        together = sum(self.busy.values())
        scale = (1 - self.waiting - self.idle) / together if together else 0.0
        return {name: share * scale for name, share in self.busy.items()}


@dataclass(frozen=True)
class Trace:
    """The timeline of a run."""

    spans: Sequence[Span]
    """In the order of their begin."""
    nodes: frozenset[str]
    """Of the training flow; stages of others, such as an evaluation, belong to no training step."""

    @cached_property
    def steps(self) -> dict[int, Interval]:
        """Begin and end of every training step, by number, in the order of their begin."""
        found: dict[int, Interval] = {}
        seen: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for span in self.spans:
            if span.category != "stage" or span.step is None or span.node not in self.nodes:
                continue
            if (span.track, span.name) in seen[span.step]:
                # A run that was killed and resumed repeats the step; the last time counts.
                seen[span.step].clear()
                del found[span.step]
            seen[span.step].add((span.track, span.name))
            begin, end = found.get(span.step, (span.begin, span.end))
            found[span.step] = (min(begin, span.begin), max(end, span.end))
        return dict(sorted(found.items(), key=lambda item: item[1]))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that any worker has, ascending."""
        return tuple(sorted({device for span in self.spans for device in span.devices}))

    def spans_of(self, track: str) -> Sequence[Span]:
        """Spans of one worker, in the order of their begin."""
        return self._by_track.get(track, ())

    @cached_property
    def _by_track(self) -> dict[str, list[Span]]:
        found: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.track].append(span)
        return dict(found)

    def of_steps(self, wanted: Iterable[int]) -> Trace:
        """The part of the trace between the begin of the first and the end of the last of them."""
        intervals = [self.steps[step] for step in wanted if step in self.steps]
        if not intervals:
            return Trace((), self.nodes)
        begin, end = min(a for a, _ in intervals), max(b for _, b in intervals)
        # An onload or a lease just before the first stage belongs to the step as well.
        return Trace(tuple(s for s in self.spans if s.end > begin and s.begin < end), self.nodes)

    def last_steps(self, count: int, most_spans: int) -> tuple[int, ...]:
        """The newest steps, at least one, that together have at most so many spans."""
        newest = list(self.steps)[-count:]
        while len(newest) > 1 and len(self.of_steps(newest).spans) > most_spans:
            newest = newest[1:]
        return tuple(newest)

    def work(self, device: int) -> dict[str, list[Interval]]:
        """When workers on a device computed, by component: their stages without their waiting."""
        tracks: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.component and device in span.devices:
                tracks[span.component, span.track].append(span)
        work: dict[str, list[Interval]] = defaultdict(list)
        for (component, _), spans in tracks.items():
            held = union((s.begin, s.end) for s in spans if s.category in WORK)
            waits = union((s.begin, s.end) for s in spans if s.category == "wait")
            work[component] += minus(held, waits)
        return {component: union(intervals) for component, intervals in work.items()}

    def shares(self) -> list[DeviceShare]:
        """What every device did during the training steps of this trace.

        The time between steps (evaluations, checkpoints) does not count.
        """
        steps = union(self.steps.values())
        whole = length(steps)
        if not whole:
            return []
        shares = []
        for device in self.devices:
            work = self.work(device)
            held = union(
                (s.begin, s.end)
                for s in self.spans
                if device in s.devices and s.category in (*WORK, "wait")
            )
            busy = union(interval for intervals in work.values() for interval in intervals)
            shares.append(
                DeviceShare(
                    device=device,
                    busy={name: length(common(part, steps)) / whole for name, part in work.items()},
                    waiting=length(common(minus(held, busy), steps)) / whole,
                    idle=length(minus(steps, held)) / whole,
                )
            )
        return shares


def trace_of(
    events: Iterable[Event],
    nodes: Iterable[str],
    devices: Mapping[str, Sequence[int]] | None = None,
) -> Trace:
    """Events of a run, or of a simulation, as spans.

    Args:
        events: Of all processes.
        nodes: Nodes of the training flow.
        devices: Devices by component, for traces whose stages do not name them.
    """
    homes = devices or {}
    ordered = sorted(events, key=lambda event: event["begin_ns"])
    # What events say of their tracks: since when each has which devices.
    known: dict[str, list[tuple[float, str, tuple[int, ...]]]] = defaultdict(list)
    for event in ordered:
        component, held = event["args"].get("component"), event["args"].get("devices")
        if component and held:
            known[_track(event)].append((event["begin_ns"] / 1e9, component, tuple(held)))

    def owner(track: str, time: float) -> tuple[str, tuple[int, ...]]:
        """Component and devices; the component of a driver's track is empty."""
        if track in known:
            place = bisect_right(known[track], time, key=lambda entry: entry[0])
            return known[track][max(0, place - 1)][1:]
        component = track.partition(":")[0]
        return (component, tuple(homes[component])) if component in homes else ("", ())

    def span(event: Event) -> Span:
        begin, step = event["begin_ns"] / 1e9, event["args"].get("step")
        component, held = owner(_track(event), begin)
        return Span(
            name=event["name"],
            category=event["cat"],
            track=_track(event),
            begin=begin,
            end=event["end_ns"] / 1e9,
            node=event["name"].partition(".")[0] if event["cat"] == "stage" else "",
            # A trace counts the steps that were done before, metrics those that are done after.
            step=None if step is None else step + 1,
            component=component,
            devices=held,
        )

    return Trace(tuple(map(span, ordered)), frozenset(nodes))


def _track(event: Event) -> str:
    """A simulation has a process per component, and tracks that do not name it."""
    owner, name = event["process"], event["thread"]
    component = owner.removeprefix("simulated ")
    return name if component == owner else f"{component}: {name}"


# -- intervals ----------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, ascending, that cover the same times."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def minus(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of disjoint ascending intervals is left without some others of the same kind."""
    left: list[Interval] = []
    first = 0
    for begin, end in whole:
        while first < len(taken) and taken[first][1] <= begin:
            first += 1
        at = begin
        for start, stop in taken[first:]:
            if start >= end:
                break
            if start > at:
                left.append((at, start))
            at = max(at, stop)
        if at < end:
            left.append((at, end))
    return left


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Times in both of two lists of disjoint ascending intervals."""
    return minus(one, minus(one, other))


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
