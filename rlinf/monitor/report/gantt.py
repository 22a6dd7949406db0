"""A trace as rows of a Gantt chart, in the compact form that the page's script draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.monitor.report.trace import WORK, Interval, Span, Trace

DEVICE, WORKER, DRIVER = "device", "worker", "driver"

KINDS = ("stage", "wait", "transfer", "residency", "sync", "lease", "work")
"""Kinds of bars; ``work`` is what a device did, without waiting."""


def gantt_panel(title: str, trace: Trace, colors: Mapping[str, str]) -> dict[str, Any]:
    """One chart: for every device what it did, and under it every worker that it has.

    A bar is ``[begin, duration, kind, name, color]``: whole microseconds since the begin of the
    panel, and places in the panel's ``kinds``, ``names`` and ``colors``.

    Args:
        title: What the panel shows.
        trace: At least one span.
        colors: Of each component.
    """
    steps = trace.steps.values()
    origin = min((begin for begin, _ in steps), default=min(s.begin for s in trace.spans))
    end = max((end for _, end in steps), default=max(s.end for s in trace.spans))
    drawing = _Drawing(origin, colors)
    rows = []
    for device in trace.devices:
        bars = [
            drawing.bar(interval, "work", component, component)
            for component, intervals in trace.work(device).items()
            for interval in intervals
        ]
        rows.append({"label": f"device {device}", "kind": DEVICE, "bars": sorted(bars)})
        rows += [
            drawing.row(track, WORKER, spans)
            for track, spans in _tracks(trace.spans, device).items()
        ]
    # Which thread of the driver waits for a lease says nothing; what it waits for does.
    driver: dict[str, list[Span]] = {}
    for span in trace.spans:
        if not span.component:
            driver.setdefault(span.name, []).append(span)
    rows += [drawing.row(name, DRIVER, spans) for name, spans in driver.items()]
    return {
        "title": title,
        "rows": rows,
        "names": list(drawing.names),
        "kinds": KINDS,
        "colors": list(drawing.palette),
        "begin": 0,
        "end": drawing.microseconds(end),
        "steps": [
            [step, drawing.microseconds(begin), drawing.microseconds(end)]
            for step, (begin, end) in trace.steps.items()
        ],
    }


def _tracks(spans: Sequence[Span], device: int) -> dict[str, list[Span]]:
    """Spans of the workers of a device, in the order in which the workers first worked."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.component and device in span.devices:
            found.setdefault(span.track, []).append(span)
    return found


class _Drawing:
    """Numbers for the names and colours of bars."""

    def __init__(self, origin: float, colors: Mapping[str, str]) -> None:
        self._origin = origin
        self._colors = colors
        self.names: dict[str, int] = {}
        self.palette: dict[str, int] = {}

    def microseconds(self, time: float) -> int:
        return round((time - self._origin) * 1e6)

    def row(self, track: str, kind: str, spans: Sequence[Span]) -> dict[str, Any]:
        # What works is drawn first, so that waiting and hand-over lie on top of it.
        ordered = sorted(spans, key=lambda span: (span.category not in WORK, span.begin))
        bars = [
            self.bar((span.begin, span.end), span.category, self._name(span), span.component)
            for span in ordered
        ]
        return {"label": track, "kind": kind, "bars": bars}

    def _name(self, span: Span) -> str:
        return span.name if span.step is None else f"{span.name} · step {span.step}"

    def bar(self, interval: Interval, category: str, name: str, component: str) -> list[int]:
        begin, end = self.microseconds(interval[0]), self.microseconds(interval[1])
        color = self._colors.get(component, "currentColor")
        return [
            begin,
            end - begin,
            KINDS.index(category) if category in KINDS else 0,
            self.names.setdefault(name, len(self.names)),
            self.palette.setdefault(color, len(self.palette)),
        ]
