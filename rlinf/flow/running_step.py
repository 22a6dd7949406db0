"""One step of a flow: while it is under way, between its halves, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from rlinf.flow.stage_worker import StageReport
from rlinf.flow.stream import Item
from rlinf.monitor.timeline import Event, Timeline
from rlinf.scheduler.services.leases import LeaseTicket

Arguments = Mapping[str, dict[str, Any]]
"""Keyword arguments of stage methods, by :attr:`~rlinf.flow.graph.Stage.label`."""

Reports = dict[str, list[StageReport]]
"""Reports of the workers of some stages, by its label and their rank."""


@dataclass(frozen=True)
class StepReport:
    """Reports of every worker, by stage, and the timeline events of the step.

    A stage goes by :attr:`~rlinf.flow.graph.Stage.label`, usually the name of its component.

    Args:
        stages: Reports by stage.
        events: Timeline events of driver and workers.
        begin_seconds: What :attr:`Hooks.begin` took.
        node_seconds: Time of each node, from when it had its devices until its workers reported.
    """

    stages: Mapping[str, list[StageReport]]
    events: list[Event]
    begin_seconds: float = 0.0
    node_seconds: Mapping[str, float] = field(default_factory=dict)

    def results(self, stage: str) -> list[Any]:
        """What a stage returned, by rank."""
        return [report.result for report in self.stages[stage]]

    def seconds(self, stage: str) -> float:
        """Time of the slowest worker of a stage that was not spent waiting for input."""
        return max(r.seconds - r.seconds_waiting for r in self.stages[stage])


@dataclass(frozen=True)
class SavedStep:
    """A step whose first half is done: what its nodes that run ahead returned and handed over.

    Args:
        step: Number of the step.
        reports: Of the stages that ran ahead, without timeline events.
        items: By edge into the second half: what was handed over, the ends of streams left out.
    """

    step: int
    reports: Reports
    items: dict[str, list[Item]]


def _nothing() -> Arguments:
    return {}


def _ignore(reports: Reports) -> None:
    del reports


@dataclass(frozen=True)
class Hooks:
    """What the driver does around the first node of a step, in the order of the steps.

    Args:
        begin: Called when that node of the step before has ended and before this one begins, also
            when a failure ended it; returns further arguments of the step.
        ended: Called with the node's reports when it has ended, before the next step's begins.
    """

    begin: Callable[[], Arguments] = _nothing
    ended: Callable[[Reports], None] = _ignore


@dataclass(eq=False)
class RunningStep:
    """A step under way, as :meth:`Executor.start` gives it.

    Args:
        step: Number of the step.
        arguments: Of its stages.
        hooks: What the driver does around its first node.
        timeline: Records the driver's side.
        finish: Runs what has not begun and collects the reports.
        watch_memory: Whether its reports say how much memory the stages held.
    """

    step: int
    arguments: dict[str, dict[str, Any]]
    hooks: Hooks
    timeline: Timeline
    finish: Callable[[RunningStep], StepReport]
    watch_memory: bool = False
    runs: dict[str, Future[Reports]] = field(default_factory=dict)
    tickets: list[LeaseTicket] = field(default_factory=list)
    leases: dict[str, tuple[LeaseTicket, ...]] = field(default_factory=dict)
    begin_seconds: float = 0.0
    node_seconds: dict[str, float] = field(default_factory=dict)

    def wait(self) -> StepReport:
        """Let the nodes begin that do not run ahead, and wait for all.

        Raises:
            Exception: The first failure of any step under way, after the workers of all were told
                to stop and every lease was given back.
        """
        return self.finish(self)

    def begin(self) -> None:
        """Call the hook and take its arguments."""
        begin = time.perf_counter()
        try:
            with self.timeline.span("sync weights", category="sync", step=self.step):
                further = self.hooks.begin()
            for stage, given in further.items():
                self.arguments[stage] = {**self.arguments.get(stage, {}), **given}
        finally:
            self.begin_seconds = time.perf_counter() - begin

    def reports(self) -> Reports:
        """Reports of the nodes that were begun; waits for them."""
        wait(self.runs.values())
        return {name: value for run in self.runs.values() for name, value in run.result().items()}
