"""Run a flow under a plan: connect stages by channels, lease devices, start workers.

One executor serves every placement. Nodes whose devices do not overlap run at the same time and
stream into each other; nodes that share a device take turns by its lease. Leases are reserved when
a node is given free, in topological order, so a node can only wait for one that was given free
before it and no overlap of placements can deadlock.

Several steps may be under way. Their nodes that run ahead are given free when a step is started,
the others when it is waited for; a node never overtakes the same node of the step before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf.flow.graph import Flow, Node, Stage
from rlinf.flow.plan import Plan
from rlinf.flow.stage_worker import StageCall, StageReport
from rlinf.flow.stream import Item, Ports, StepAborted
from rlinf.monitor.timeline import Event, Timeline
from rlinf.scheduler import Cluster
from rlinf.scheduler.services.leases import LeaseTicket
from rlinf.scheduler.worker_group import WorkerGroup

Arguments = Mapping[str, dict[str, Any]]
"""Keyword arguments of stage methods, by :attr:`~rlinf.flow.graph.Stage.label`."""

Reports = dict[str, list[StageReport]]
"""Reports of the workers of some stages, by its label and their rank."""


@dataclass(frozen=True)
class StepReport:
    """Reports of every worker, by stage, and the timeline events of the step."""

    stages: Mapping[str, list[StageReport]]
    """Reports by :attr:`~rlinf.flow.graph.Stage.label`, usually the component's name."""
    events: list[Event]  # timeline events of driver and workers
    begin_seconds: float = 0.0  # what :attr:`Hooks.begin` took
    node_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of each node, from when it had its devices until its workers reported."""

    def results(self, stage: str) -> list[Any]:
        """What a stage returned, by rank."""
        return [report.result for report in self.stages[stage]]

    def seconds(self, stage: str) -> float:
        """Time of the slowest worker of a stage that was not spent waiting for input."""
        return max(r.seconds - r.seconds_waiting for r in self.stages[stage])


@dataclass(frozen=True)
class SavedStep:
    """A step whose first half is done: what its nodes that run ahead returned and handed over.

    Items are by edge into the second half, without the ends of streams.
    """

    step: int
    reports: Reports
    items: dict[str, list[Item]]


@dataclass(frozen=True)
class Hooks:
    """What the driver does around the first node of a step, in the order of the steps.

    Args:
        begin: Called when that node of the step before has ended and before this one begins, also
            when a failure ended it; returns further arguments of the step.
        ended: Called with the node's reports when it has ended, before the next step's begins.
    """

    begin: Callable[[], Arguments] = lambda: {}
    ended: Callable[[Reports], None] = lambda reports: None


@dataclass(eq=False)
class RunningStep:
    """A step under way, as :meth:`Executor.start` gives it."""

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


class Executor:
    """Runs the steps of one flow under a plan, by launched worker groups of its components.

    Args:
        sources: How many sub-batches the flow's items are numbered by.
        depth: Most steps that are under way at the same time.
        timeline: Whether workers record events.
        handing_over: Components whose workers lease their devices themselves, one each, so that a
            device can go from one to another inside a step. Their stages have an argument
            ``shared``, a dataclass whose ``leases`` are set to the tickets.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        groups: Mapping[str, WorkerGroup],
        cluster: Cluster,
        *,
        sources: int,
        depth: int = 1,
        timeline: bool = False,
        handing_over: Collection[str] = (),
    ) -> None:
        self._handing_over = frozenset(handing_over)
        self._flow = flow
        self._plan = plan
        self._groups = groups
        self._cluster = cluster
        self._depth = depth
        self._timeline = timeline
        self._order = flow.order()
        self._ports = Ports(flow, plan, groups, sources=sources, depth=depth)
        # One thread per node waits for its lease, and one per stage for its workers.
        self._threads = ThreadPoolExecutor(
            max_workers=depth * (len(self._order) + len(list(flow.stages()))),
            thread_name_prefix=f"{flow.name}-node",
        )
        self._watches_memory = False
        self._under_way: list[RunningStep] = []
        self._last: dict[str, Future[Reports]] = {}
        self._failure_lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, step: int, arguments: Arguments | None = None) -> StepReport:
        """Start one step and wait for it; see :meth:`start` and :meth:`RunningStep.wait`."""
        return self.start(step, arguments).wait()

    def start(
        self, step: int, arguments: Arguments | None = None, hooks: Hooks | None = None
    ) -> RunningStep:
        """Let the nodes of a step that run ahead begin as soon as they may.

        Its items are stamped with the number of the step.

        Raises:
            Exception: The first failure of a step under way.
            RuntimeError: As many steps are under way as there may be.
        """
        running = self._enter(step, arguments, hooks)
        self._give_free(running, [node for node in self._order if node.ahead])
        return running

    def watch_memory(self, on: bool) -> None:
        """Let the reports of steps that start from now on say how much memory the stages held.

        It takes time, which counts as theirs.
        """
        self._watches_memory = on

    def settle(self) -> None:
        """Wait for everything that was given free, so that no stage is at work.

        Raises:
            Exception: The first failure.
        """
        for running in self._under_way:
            wait(running.runs.values())
        self._raise_failure()

    def save(self, running: RunningStep) -> SavedStep:
        """What a step that was not waited for has done so far; it goes on as if not asked."""
        self.settle()
        reports = running.reports()
        items = self._ports.pending(running.step, reports.keys())
        return SavedStep(running.step, reports, items)

    def restore(self, saved: SavedStep, arguments: Arguments | None = None) -> RunningStep:
        """A started step as it was saved, by any executor of an equal flow."""
        running = self._enter(saved.step, arguments, None)
        self._ports.refill(saved.step, saved.reports.keys(), saved.items)
        for node in self._order:
            if node.ahead:
                done: Future[Reports] = Future()
                done.set_result({s.label: saved.reports[s.label] for s in node.stages})
                running.runs[node.name] = self._last[node.name] = done
        return running

    def close(self) -> None:
        """End the steps under way, which nobody will wait for, and the executor's threads."""
        runs = [run for running in self._under_way for run in running.runs.values()]
        if not all(run.done() for run in runs):
            self._fail(StepAborted("the executor was closed"))
            wait(runs)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- driver's thread ------------------------------------------------------------------------

    def _enter(self, step: int, arguments: Arguments | None, hooks: Hooks | None) -> RunningStep:
        self._raise_failure()
        if len(self._under_way) == self._depth:
            raise RuntimeError(f"{self._depth} steps are under way already; wait for the oldest")
        running = RunningStep(
            step=step,
            arguments=dict(arguments or {}),
            hooks=hooks or Hooks(),
            timeline=Timeline(enabled=self._timeline),
            finish=self._finish,
            watch_memory=self._watches_memory,
        )
        self._under_way.append(running)
        return running

    def _give_free(self, running: RunningStep, nodes: list[Node]) -> None:
        """Reserve the leases of some nodes, in their order, and let them begin."""
        for node in nodes:
            name = f"{self._flow.name}/{node.name}/{running.step}"
            devices = self._plan.devices(node.components)
            for component in (name for name in node.components if name in self._handing_over):
                # In the same order as those of nodes, so that none can wait for a later one.
                running.leases[component] = tuple(
                    self._cluster.reserve_lease(f"{name}/{component}/{device}", (device,))
                    for device in self._plan.components[component].devices
                )
                running.tickets.extend(running.leases[component])
                devices = ()
            ticket = self._cluster.reserve_lease(name, devices)
            running.tickets.append(ticket)
            previous = self._last.get(node.name)
            run = self._threads.submit(self._run_node, running, node, ticket, previous)
            running.runs[node.name] = self._last[node.name] = run

    def _finish(self, running: RunningStep) -> StepReport:
        """See :meth:`RunningStep.wait`."""
        try:
            self._give_free(running, [n for n in self._order if n.name not in running.runs])
            wait(running.runs.values())
            if self._failure is not None:
                for other in self._under_way:
                    wait(other.runs.values())
        finally:
            self._under_way.remove(running)
            for ticket in running.tickets:
                ticket.cancel()
        self._raise_failure()
        reports = running.reports()
        of_workers = (e for stage in reports.values() for report in stage for e in report.events)
        events = [*running.timeline.drain(), *of_workers]
        return StepReport(reports, events, running.begin_seconds, running.node_seconds)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- threads of the nodes -------------------------------------------------------------------

    def _run_node(
        self, running: RunningStep, node: Node, ticket: Any, previous: Future[Reports] | None
    ) -> Reports:
        first = node is self._order[0]
        try:
            if previous is not None:
                wait([previous])
            if first:
                running.begin()
            self._raise_failure()
            with running.timeline.span(f"lease {node.name}", category="lease"):
                ticket.acquire()
            self._raise_failure()
            begin = time.perf_counter()
            reports = self._run_stages(running, node)
            running.node_seconds[node.name] = time.perf_counter() - begin
            if first:
                running.hooks.ended(reports)
            return reports
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            ticket.cancel()

    def _run_stages(self, running: RunningStep, node: Node) -> Reports:
        handles = {
            stage.label: self._groups[stage.component].run_stage(self._calls(node, stage, running))
            for stage in node.stages
        }
        waits = {name: self._threads.submit(h.wait) for name, h in handles.items()}
        wait(waits.values(), return_when=FIRST_EXCEPTION)
        for finished in waits.values():
            error = finished.exception() if finished.done() else None
            if error is not None:
                self._fail(error)
        return {name: finished.result() for name, finished in waits.items()}

    def _fail(self, error: BaseException) -> None:
        """Remember the first failure and wake every worker that waits for an item."""
        with self._failure_lock:
            if self._failure is not None:
                return
            self._failure = error
        self._ports.abort((str(error).splitlines() or [type(error).__name__])[0])

    def _calls(self, node: Node, stage: Stage, running: RunningStep) -> list[StageCall]:
        plan = self._plan.components[stage.component]
        arguments = running.arguments.get(stage.label, {})
        leases = running.leases.get(stage.component)
        if leases is not None:
            arguments = {**arguments, "shared": replace(arguments["shared"], leases=leases)}
        return [
            StageCall(
                node=node.name,
                method=stage.method,
                step=running.step,
                inputs=self._ports.inputs(stage, rank, running.step),
                outputs=self._ports.outputs(stage, running.step),
                # Who leases a device by itself also frees its memory by itself.
                offload=plan.residency == "offload" and leases is None,
                timeline=self._timeline,
                watch_memory=running.watch_memory,
                arguments=arguments,
            )
            for rank in range(plan.processes)
        ]
