"""Run a flow under a plan: connect stages by channels, lease devices, start workers.

One executor serves every placement. Nodes whose devices do not overlap run at the same time and
stream into each other; nodes that share a device take turns by its lease. Leases are reserved in
topological order at the start of a step, so a node can only wait for one that comes before it and
no overlap of placements can deadlock.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlinf.flow.graph import Edge, Flow, Node, Stage
from rlinf.flow.plan import Plan
from rlinf.flow.stage_worker import StageCall, StageReport
from rlinf.flow.stream import InputPort, Item, OutputPort
from rlinf.monitor.timeline import Timeline
from rlinf.scheduler import Channel, Cluster
from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.worker_group import WorkerGroup


@dataclass(frozen=True)
class StepReport:
    """Reports of every worker, by stage, and the timeline events of the step.

    A stage goes by :attr:`~rlinf.flow.graph.Stage.label`, usually the name of its component.
    """

    stages: Mapping[str, list[StageReport]]
    events: list[dict[str, Any]]

    def results(self, stage: str) -> list[Any]:
        """What a stage returned, by rank."""
        return [report.result for report in self.stages[stage]]

    def seconds(self, stage: str) -> float:
        """Time of the slowest worker of a stage that was not spent waiting for input."""
        return max(r.seconds - r.seconds_waiting for r in self.stages[stage])


class Executor:
    """Runs the steps of one flow.

    Args:
        flow: What a step does.
        plan: Where and how its components run.
        groups: Launched worker groups by component.
        cluster: The cluster that leases devices.
        sources: How many sub-batches the flow's items are numbered by.
        timeline: Whether workers record events.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        groups: Mapping[str, WorkerGroup],
        cluster: Cluster,
        *,
        sources: int,
        timeline: bool = False,
    ) -> None:
        self._flow = flow
        self._plan = plan
        self._groups = groups
        self._cluster = cluster
        self._sources = sources
        self._timeline = timeline
        self._order = flow.order()
        self._ports = _Ports(flow, plan, groups, sources)
        # One thread per node waits for its lease, and one per stage for its workers.
        self._threads = ThreadPoolExecutor(
            max_workers=len(self._order) + len(list(flow.stages())),
            thread_name_prefix=f"{flow.name}-node",
        )
        self._failure_lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, step: int, arguments: Mapping[str, dict[str, Any]] | None = None) -> StepReport:
        """Run one step to its end.

        Args:
            step: Number of the step; items are stamped with it.
            arguments: Keyword arguments of the stage methods, by stage.

        Raises:
            Exception: The first failure of any worker, after the other workers of the step were
                told to stop and every lease was given back.
        """
        arguments = arguments or {}
        timeline = Timeline(enabled=self._timeline)
        tickets = [
            self._cluster.reserve_lease(
                f"{self._flow.name}/{node.name}/{step}", self._plan.devices(node.components)
            )
            for node in self._order
        ]
        try:
            runs = [
                self._threads.submit(self._run_node, node, ticket, step, arguments, timeline)
                for node, ticket in zip(self._order, tickets, strict=True)
            ]
            wait(runs)
        finally:
            for ticket in tickets:
                ticket.cancel()
        if self._failure is not None:
            raise self._failure
        reports: dict[str, list[StageReport]] = {}
        for run in runs:
            reports.update(run.result())
        events = timeline.drain()
        for stage_reports in reports.values():
            for report in stage_reports:
                events.extend(report.events)
        return StepReport(reports, events)

    def close(self) -> None:
        """Let the executor's threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_node(
        self,
        node: Node,
        ticket: Any,
        step: int,
        arguments: Mapping[str, dict[str, Any]],
        timeline: Timeline,
    ) -> dict[str, list[StageReport]]:
        with timeline.span(f"lease {node.name}", category="lease"):
            ticket.acquire()
        try:
            handles = {
                stage.label: self._groups[stage.component].run_stage(
                    self._calls(node, stage, step, arguments.get(stage.label, {}))
                )
                for stage in node.stages
            }
            waits = {name: self._threads.submit(h.wait) for name, h in handles.items()}
            wait(waits.values(), return_when=FIRST_EXCEPTION)
            for finished in waits.values():
                if finished.done() and finished.exception() is not None:
                    self._abort(finished, step)
            return {name: finished.result() for name, finished in waits.items()}
        finally:
            ticket.release()

    def _abort(self, failed: Future[Any], step: int) -> None:
        """Remember the first failure and wake every worker that waits for an item."""
        with self._failure_lock:
            if self._failure is None:
                self._failure = failed.exception()
        self._ports.abort(step, str(failed.exception()).splitlines()[0])

    def _calls(
        self, node: Node, stage: Stage, step: int, arguments: dict[str, Any]
    ) -> list[StageCall]:
        plan = self._plan.components[stage.component]
        return [
            StageCall(
                node=node.name,
                method=stage.method,
                step=step,
                inputs=self._ports.inputs(stage, rank),
                outputs=self._ports.outputs(stage),
                offload=plan.residency == "offload",
                timeline=self._timeline,
                arguments=arguments,
            )
            for rank in range(plan.processes)
        ]


class _Ports:
    """The channels of a flow: one per edge and consuming worker, who hosts it.

    An item thus travels once, and taking it is no message.
    """

    def __init__(
        self, flow: Flow, plan: Plan, groups: Mapping[str, WorkerGroup], sources: int
    ) -> None:
        self._plan = plan
        self._sources = sources
        self._edges: dict[str, Edge] = {edge.name: edge for edge in flow.edges()}
        run = uuid.uuid4().hex[:8]
        self._channels = {
            edge.name: tuple(
                Channel.create(
                    f"{flow.name}-{run}/{edge.name}/{rank}",
                    host=f"{groups[edge.consumer.component].worker_group_name}:{rank}",
                )
                for rank in range(self._processes(edge.consumer))
            )
            for edge in self._edges.values()
        }

    def _processes(self, stage: Stage) -> int:
        return self._plan.components[stage.component].processes

    def abort(self, step: int, reason: str) -> None:
        """Put an item into every channel that makes its reader stop."""
        for channels in self._channels.values():
            for channel in channels:
                with suppress(SchedulerError):  # a reader that is gone waits for nothing
                    channel.put(Item(step, source=-1, aborted=reason))

    def inputs(self, stage: Stage, rank: int) -> tuple[InputPort, ...]:
        return tuple(
            InputPort(
                edge=name,
                channel=self._channels[name][rank],
                producers=self._processes(self._edges[name].producer),
            )
            for name in stage.inputs
        )

    def outputs(self, stage: Stage) -> tuple[OutputPort, ...]:
        return tuple(
            OutputPort(name, self._channels[name], self._edges[name].route, self._sources)
            for name in stage.outputs
        )
