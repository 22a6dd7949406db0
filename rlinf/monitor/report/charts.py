"""What of a run's numbers the page shows: charts over steps, and tiles with the newest values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlinf.monitor.curve import EVAL_HIGH, EVAL_LOW, EVAL_SUCCESS, STEP_TIME, Curve

_RECENT = 10


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
    charts.append(
        _chart(kind.value[1], kind.steps[1], [_series(curve, kind.value[0], kind.value[1])])
    )
    times = [name for name in _names(curve) if name.startswith("time/") and name != "time/eval"]
    charts.append(
        _chart(
            "seconds per step",
            kind.steps[1],
            [_series(curve, name, name.removeprefix("time/")) for name in times],
            zero=True,
        )
    )
    for name in _further(curve):
        charts.append(_chart(name, kind.steps[1], [_series(curve, name, name)]))
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


def _names(curve: Curve) -> list[str]:
    return list(dict.fromkeys(name for line in curve.lines for name in line))


def _further(curve: Curve) -> list[str]:
    """Metrics that tell whether training is healthy, where the run has them."""
    wanted = (
        "env/steps_per_second",
        "rollout/tokens_per_second",
        "rollout/response_length",
        "actor/approx_kl",
        "actor/grad_norm",
        "actor/entropy",
        "critic/explained_variance",
    )
    return [name for name in wanted if name in _names(curve)]


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
