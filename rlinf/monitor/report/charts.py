"""What of a run's numbers the page shows: charts over steps, and tiles with the newest values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlinf.monitor.curve import (
    EVAL_HIGH,
    EVAL_LOW,
    EVAL_SUCCESS,
    STEP_TIME,
    SUPERVISED,
    VALIDATION_LOSS,
    Curve,
)
from rlinf.monitor.report.trace import WORK, Interval, Span, Trace

_RECENT = 10
_HEALTH = (
    "env/steps_per_second",
    "rollout/tokens_per_second",
    "rollout/response_length",
    "actor/approx_kl",
    "actor/grad_norm",
    "actor/entropy",
    "critic/explained_variance",
)
"""Metrics that tell whether training is healthy, shown where the run has them."""


@dataclass(frozen=True)
class Tile:
    """One number at the top of the page."""

    label: str
    value: str
    note: str = ""


def chart_data(curve: Curve) -> list[dict[str, Any]]:
    """Charts that the script draws: a title, what runs along the bottom, and series of points."""
    kind = curve.kind
    charts = []
    success = [_series(curve, EVAL_SUCCESS, "evaluation", band=(EVAL_LOW, EVAL_HIGH))]
    if kind.success is not None:
        success.append(_series(curve, kind.success[0], kind.success[1]))
    charts.append(_chart("success rate", kind.steps[1], success, bounds=(0.0, 1.0)))
    value = [_series(curve, kind.value[0], kind.value[1])]
    if kind is SUPERVISED:
        value.append(_series(curve, VALIDATION_LOSS, "validation"))
    charts.append(_chart(kind.value[1], kind.steps[1], value))
    names = list(dict.fromkeys(name for line in curve.lines for name in line))
    times = [name for name in names if name.startswith("time/") and name != "time/eval"]
    stages = [_series(curve, name, name.removeprefix("time/")) for name in times]
    charts.append(_chart("seconds per step", kind.steps[1], stages, zero=True))
    charts += [
        _chart(name, kind.steps[1], [_series(curve, name, name)])
        for name in _HEALTH
        if name in names
    ]
    return [chart for chart in charts if chart["series"]]


def tiles(curve: Curve) -> list[Tile]:
    """The newest values that say how a run goes."""
    found = [Tile("steps done", f"{max(int(line['step']) for line in curve.lines):,}")]
    seconds = [line[STEP_TIME] for line in curve.lines if STEP_TIME in line]
    if seconds:
        recent = median(seconds[-_RECENT:])
        found.append(Tile("seconds per step", f"{recent:.3g}", f"median of the last {_RECENT}"))
    shown = (
        (EVAL_SUCCESS, "success, evaluated", "{:.1%}"),
        (curve.kind.value[0], curve.kind.value[1], "{:.3g}"),
        ("env/steps_per_second", "env steps per second", "{:,.0f}"),
        ("rollout/tokens_per_second", "tokens per second", "{:,.0f}"),
        ("actor/approx_kl", "KL of the update", "{:.2g}"),
    )
    for name, label, form in shown:
        points = curve.series(name)
        if points:
            found.append(Tile(label, form.format(points[-1][1])))
    return found


def _series(
    curve: Curve, name: str, label: str, *, band: tuple[str, str] | None = None
) -> dict[str, Any]:
    series: dict[str, Any] = {"label": label, "points": _thinned(curve.series(name))}
    if band is not None:
        low, high = (dict(curve.series(side)) for side in band)
        series["band"] = [
            [x, low[x], high[x]] for x, _ in series["points"] if x in low.keys() & high
        ]
    return series


def _thinned(points: Sequence[tuple[float, float]], most: int = 2000) -> list[list[float]]:
    """The points, or evenly chosen ones of them, the last included; rounded to save room."""
    stride = max(1, math.ceil(len(points) / most))
    kept = [*points[:-1:stride], *points[-1:]]
    return [[x, float(f"{y:.6g}")] for x, y in kept]


def _chart(
    title: str,
    bottom: str,
    series: Sequence[dict[str, Any]],
    *,
    bounds: tuple[float, float] | None = None,
    zero: bool = False,
) -> dict[str, Any]:
    return {
        "title": title,
        "bottom": bottom,
        "series": [each for each in series if each["points"]],
        "bounds": bounds,
        "zero": zero,
    }


DEVICE, WORKER, DRIVER = "device", "worker", "driver"

KINDS = ("stage", "wait", "transfer", "residency", "sync", "lease", "work")
"""Kinds of bars; ``work`` is what a device did, without waiting."""


def gantt_panel(title: str, trace: Trace, colors: Mapping[str, str]) -> dict[str, Any]:
    """One chart: for every device what it did, and under it every worker that it has.

    A bar is ``[begin, duration, kind, name, color]``: whole microseconds since the begin of the
    panel, and places in the panel's ``kinds``, ``names`` and ``colors``.
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
        # Workers in the order in which they first worked.
        tracks: dict[str, list[Span]] = {}
        for span in trace.spans:
            if span.component and device in span.devices:
                tracks.setdefault(span.track, []).append(span)
        rows += [drawing.row(track, WORKER, spans) for track, spans in tracks.items()]
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
        bars = []
        for span in ordered:
            name = span.name if span.step is None else f"{span.name} · step {span.step}"
            bars.append(self.bar((span.begin, span.end), span.category, name, span.component))
        return {"label": track, "kind": kind, "bars": bars}

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
