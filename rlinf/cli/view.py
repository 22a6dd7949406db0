"""``rlinf view RUN``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.run_paths import CONFIG_FILE, check_file_writable, find_run
from rlinf.cli.screen import complain, say
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.flow.graph import Flow, Stage
    from rlinf.flow.plan import Plan
    from rlinf.monitor.report.flow_picture import Graph, StageBox
    from rlinf.monitor.report.page import RunReport
    from rlinf.monitor.report.trace import Trace
    from rlinf.monitor.timeline import Event
    from rlinf.planner.simulation import Simulation

_MOST_STEPS, _MOST_SPANS = 20, 20_000


def view(
    run: Annotated[str, typer.Argument(help="A run directory, or a name below runs/.")],
    *,
    steps: Annotated[
        str | None,
        typer.Option(metavar="FROM-TO", help="Steps of the timeline; default: the newest."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The HTML file; default: report.html in the run directory.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run as one HTML file: flow, plan, timeline, idle devices, decisions, metrics."""
    path = find_run(run)
    wanted = None if steps is None else _step_range(steps)

    from rlinf.monitor.report.page import REPORT_FILE, write_report

    page = output or path / REPORT_FILE
    check_file_writable(page, "--output", mark=b"<!doctype html")
    report = run_report(path, wanted)
    if report.timeline_hint:
        complain(report.timeline_hint, label="note")
    say(str(write_report(report, page)))


def run_report(run: Path, steps: range | None = None) -> RunReport:
    """Everything that a run directory tells; the timeline of some steps, or of the newest."""
    from rlinf.cli.tasks import read_config, require_training
    from rlinf.config.yaml_source import write_yaml
    from rlinf.flow.plan import PLAN_FILE, Plan
    from rlinf.monitor.curve import Curve
    from rlinf.monitor.decisions import read_decisions
    from rlinf.monitor.metrics_log import read_metrics
    from rlinf.monitor.report.page import RunReport
    from rlinf.monitor.run_directory import METRICS_FILE
    from rlinf.monitor.timeline import read_events

    task, _, config = read_config(str(run / CONFIG_FILE), [], evaluated=True)
    require_training(task, str(run))
    flow = task.flow(config)
    decisions = read_decisions(run)
    kept, plan = run / PLAN_FILE, config.plan
    if kept.is_file():
        try:
            plan = Plan.load(kept)
        except ConfigError as error:
            complain(f"{error}; shown is the plan of the configuration", label="warning")
    metrics = run / METRICS_FILE
    lines = read_metrics(metrics) if metrics.is_file() else []
    timeline = run / "timeline.json"
    measured = _trace(read_events(timeline), flow, plan, steps) if timeline.is_file() else None
    simulation = _simulation(run, flow, plan, config)
    # What takes no time has nothing to show.
    events = () if simulation is None else simulation.events
    shown = [event for event in events if event["end_ns"] > event["begin_ns"]]
    return RunReport(
        name=f"{run.parent.name}/{run.name}",
        task=config.task,
        graph=flow_graph(flow),
        plan=plan.model_dump(mode="json")["components"],
        mode=plan.mode,
        plan_file=write_yaml(plan.model_dump(mode="json")),
        config=(run / CONFIG_FILE).read_text(encoding="utf-8"),
        measured=measured,
        predicted=None if simulation is None else _trace(shown, flow, plan),
        predicted_seconds=None if simulation is None else simulation.seconds,
        curve=Curve(lines) if lines else None,
        decisions=decisions,
        timeline_hint="" if measured else _timeline_hint(run, config),
    )


def flow_graph(flow: Flow) -> Graph:
    """The nodes and edges of a flow, as the report draws them."""
    from rlinf.monitor.report.flow_picture import Arrow, Graph, NodeBox, StageBox

    def boxes(stages: Iterable[Stage]) -> tuple[StageBox, ...]:
        return tuple(StageBox(stage.label, stage.component, stage.method) for stage in stages)

    return Graph(
        tuple(NodeBox(node.name, boxes(node.stages)) for node in flow.order()),
        tuple(Arrow(each.name, each.producer.label, each.consumer.label) for each in flow.edges()),
    )


def _trace(
    events: Iterable[Event], flow: Flow, plan: Plan, steps: Sequence[int] | None = None
) -> Trace | None:
    """The wanted part of a timeline, or None where there is none."""
    from rlinf.monitor.report.trace import trace_of

    devices: Mapping[str, Sequence[int]] = {
        name: part.devices for name, part in plan.components.items()
    }
    trace = trace_of(events, (node.name for node in flow.nodes), devices)
    if not trace.steps:
        return None
    if steps is None:
        return trace.of_steps(trace.last_steps(_MOST_STEPS, _MOST_SPANS))
    found = [step for step in trace.steps if step in steps]
    if not found:
        first, last = min(trace.steps), max(trace.steps)
        raise ConfigError(
            f"--steps = {steps[0]}-{steps[-1]}: the timeline has the steps {first}-{last}"
        )
    return trace.of_steps(found)


def _simulation(run: Path, flow: Flow, plan: Plan, config: Any) -> Simulation | None:
    """What the plan should take by the profile of the run; None where nothing is known of that."""
    from rlinf.flow.placed_config import NOT_PLANNED
    from rlinf.planner.cluster_shape import as_measured, cluster_of
    from rlinf.planner.measure import PROFILE_FILE
    from rlinf.planner.profile import Profile
    from rlinf.planner.simulation import Conditions, simulate

    path = run / PROFILE_FILE
    if not path.is_file():
        return None
    try:
        if config.cluster.slow_links() is not None:
            raise ConfigError(NOT_PLANNED, key="cluster.net_emulation")
        return simulate(
            flow,
            plan,
            Profile.load(path),
            as_measured(cluster_of(config)),
            config.planning.constraints,
            conditions=Conditions(steps=3, timeline=True),
        )
    except ConfigError as error:
        complain(f"nothing is predicted: {error}", label="note")
        return None


def _timeline_hint(run: Path, config: Any) -> str:
    from rlinf.monitor.run_directory import END_FILE

    if config.runner.timeline:
        if not (run / END_FILE).is_file():
            return "The timeline of this run is empty: no training step has ended yet."
        return "The timeline of this run, timeline.json, is gone, or holds no step."
    if (run / END_FILE).is_file():  # no step is left
        return (
            "This run has no timeline. Get one of a new run with: rlinf train RECIPE "
            "runner.timeline=true"
        )
    return (
        "This run has no timeline. Get one for the steps that it has still to take with:\n"
        f"rlinf resume {shlex.quote(str(run))} runner.timeline=true\n"
        "or for a new run with: rlinf train RECIPE runner.timeline=true"
    )


def _step_range(text: str) -> range:
    """``3-7`` or ``5`` as a range that includes its end."""
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found:
        raise ConfigError(f"--steps = '{text}': give a step or two, such as 5 or 3-7")
    return found
