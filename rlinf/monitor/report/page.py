"""The page: everything that is known of a run, in one file that needs nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from rlinf.checkpoint.files import write_atomic
from rlinf.monitor.curve import Curve
from rlinf.monitor.decisions import Decision
from rlinf.monitor.report.charts import Tile, chart_data, gantt_panel, tiles
from rlinf.monitor.report.flow_picture import Graph, draw_graph
from rlinf.monitor.report.trace import DeviceShare, Trace

REPORT_FILE = "report.html"

_HERE = Path(__file__).parent
_MOST_RESCALES = 200

# Told apart by people who do not tell red from green, on light and on dark ground.
_COLORS = (
    "#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#9c6b4e", "#97bbf5",
)  # fmt: skip


@dataclass(frozen=True)
class RunReport:
    """What the page shows of a run; None where it does not have that."""

    name: str
    task: str
    graph: Graph
    plan: Mapping[str, Mapping[str, Any]]
    """Of every component, as plain data: devices (`0-3`), processes, residency, …"""
    mode: str
    """What the placement amounts to."""
    plan_file: str
    """The plan, as YAML that `cluster.plan` reads."""
    config: str
    """As YAML."""
    measured: Trace | None = None
    predicted: Trace | None = None
    predicted_seconds: float | None = None
    """Time of a step by the simulation."""
    curve: Curve | None = None
    decisions: Sequence[Decision] = ()
    """Oldest first."""
    timeline_hint: str = ""
    """How to get a timeline, said where there is none."""


def write_report(report: RunReport, path: Path) -> Path:
    """Write the page; an existing file is replaced."""
    write_atomic(path, render(report).encode())
    return path


def render(report: RunReport) -> str:
    """The page as text."""
    components = report.graph.components
    colors = {name: _COLORS[place % len(_COLORS)] for place, name in enumerate(components)}
    panels = [
        gantt_panel(title, trace, colors)
        for title, trace in (("measured", report.measured), ("predicted", report.predicted))
        if trace is not None and trace.spans
    ]
    decisions = _shown(report.decisions)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(
        report=report,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        graph=draw_graph(report.graph, colors, _captions(report.plan)),
        colors=colors,
        plan=_plan_rows(report),
        tiles=_tiles(report),
        shares=[] if report.measured is None else report.measured.shares(),
        predicted_shares=[] if report.predicted is None else report.predicted.shares(),
        steps=[] if report.measured is None else list(report.measured.steps),
        decisions=[_decision_row(decision) for decision in decisions],
        left_out=len(report.decisions) - len(decisions),
        data={
            "panels": panels,
            "charts": [] if report.curve is None else chart_data(report.curve),
        },
    )


def _captions(plan: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        name: f"device {part['devices']} · {part['processes']} "
        f"process{'es' if part['processes'] > 1 else ''}"
        for name, part in plan.items()
    }


def _plan_rows(report: RunReport) -> list[dict[str, Any]]:
    measured = _stage_seconds(report.measured)
    return [
        {
            **part,
            "component": name,
            "predicted": _seconds(part.get("predicted_seconds")),
            "measured": _seconds(measured.get(name)),
        }
        for name, part in report.plan.items()
    ]


def _stage_seconds(trace: Trace | None) -> dict[str, float]:
    """Median over steps of the time of a component's slowest worker, waiting left out."""
    if trace is None:
        return {}
    spent: dict[str, dict[int, dict[str, float]]] = {}
    for span in trace.spans:
        if span.category == "stage" and span.step in trace.steps and span.node in trace.nodes:
            step = spent.setdefault(span.component, {}).setdefault(span.step or 0, {})
            step[span.track] = step.get(span.track, 0.0) + span.end - span.begin
            waits = sum(
                other.end - other.begin
                for other in trace.spans_of(span.track)
                if other.category == "wait" and span.begin <= other.begin < span.end
            )
            step[span.track] -= waits
    return {
        name: median(max(tracks.values()) for tracks in steps.values())
        for name, steps in spent.items()
    }


def _tiles(report: RunReport) -> list[Tile]:
    found = [] if report.curve is None else tiles(report.curve)
    if report.predicted_seconds is not None:
        note = "by the profile of the run"
        found.append(Tile("seconds per step, predicted", f"{report.predicted_seconds:.3g}", note))
    shares: list[DeviceShare] = [] if report.measured is None else report.measured.shares()
    if shares:
        unused = sum(share.idle + share.waiting for share in shares) / len(shares)
        found.append(Tile("devices without work", f"{unused:.0%}", "mean over the steps shown"))
    return found


def _shown(decisions: Sequence[Decision]) -> list[Decision]:
    """All but old moves of workers, of which every step may make some."""
    older = sum(decision.what == "rescale" for decision in decisions) - _MOST_RESCALES
    shown = []
    for decision in decisions:
        if decision.what == "rescale" and older > 0:
            older -= 1
        else:
            shown.append(decision)
    return shown


def _decision_row(decision: Decision) -> dict[str, str]:
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.time)),
        "step": str(decision.step),
        "what": decision.what,
        "reason": decision.reason,
        "cost": _seconds(decision.cost_seconds),
        "predicted": _signed(decision.gain_predicted),
        "measured": _signed(decision.gain_measured),
        "numbers": ", ".join(f"{name} {value:.4g}" for name, value in decision.numbers.items()),
    }


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} s"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3g} s"
