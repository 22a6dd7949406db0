"""The channels of a flow, and what waits in them between two halves of a step."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress

from rlinf.flow.graph import Edge, Flow, Stage
from rlinf.flow.plan import Plan
from rlinf.flow.stream import InputPort, Item, OutputPort
from rlinf.scheduler import Channel
from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.worker_group import WorkerGroup


class Ports:
    """One channel per edge and consuming worker, who hosts it.

    An item thus travels once, and taking it is no message. Steps that are under way together have
    a queue each in every channel, so that items of one are never taken for those of another.

    Args:
        flow: What is connected.
        plan: How many workers there are.
        groups: The workers.
        sources: How many sub-batches the items are numbered by.
        depth: Most steps under way.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        groups: Mapping[str, WorkerGroup],
        *,
        sources: int,
        depth: int,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._sources = sources
        self._depth = depth
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

    def abort(self, reason: str) -> None:
        """Put an item into every queue that makes its reader stop."""
        for channels in self._channels.values():
            for channel in channels:
                for queue in range(self._depth):
                    with suppress(SchedulerError):  # a reader that is gone waits for nothing
                        channel.put(Item(-1, source=-1, aborted=reason), key=queue)

    def inputs(self, stage: Stage, rank: int, step: int) -> tuple[InputPort, ...]:
        """Where a worker reads in a step."""
        return tuple(self._input(name, rank, step) for name in stage.inputs)

    def _input(self, edge: str, rank: int, step: int) -> InputPort:
        return InputPort(
            edge=edge,
            channel=self._channels[edge][rank],
            producers=self._processes(self._edges[edge].producer),
            queue=step % self._depth,
        )

    def outputs(self, stage: Stage, step: int) -> tuple[OutputPort, ...]:
        """Where the workers of a stage write in a step."""
        return tuple(
            OutputPort(
                edge=name,
                channels=self._channels[name],
                route=self._edges[name].route,
                sources=self._sources,
                queue=step % self._depth,
            )
            for name in stage.outputs
        )

    def pending(self, step: int, begun: Collection[str]) -> dict[str, list[Item]]:
        """Items that stages which have ended left for those which have not begun; they stay.

        Args:
            step: Number of the step.
            begun: Labels of the stages that have ended.
        """
        found = {}
        for edge in self._crossing(begun):
            group = self._groups[edge.consumer.component]
            by_rank = group.pending_items(self._inputs_of(edge, step)).wait()
            kept = by_rank[:1] if edge.route == "replicate" else by_rank
            found[edge.name] = [item for items in kept for item in items]
        return found

    def refill(self, step: int, begun: Collection[str], items: Mapping[str, list[Item]]) -> None:
        """Put back what :meth:`pending` gave."""
        for edge in self._crossing(begun):
            group, ports = self._groups[edge.consumer.component], self._inputs_of(edge, step)
            group.refill(ports, self._shares(edge, items[edge.name]), step).wait()

    def _shares(self, edge: Edge, items: list[Item]) -> list[list[Item]]:
        """The items that each worker of the consuming stage takes."""
        consumers = self._processes(edge.consumer)
        if edge.route == "replicate":
            return [items] * consumers
        shares: list[list[Item]] = [[] for _ in range(consumers)]
        for item in items:
            shares[item.source * consumers // self._sources].append(item)
        return shares

    def _crossing(self, begun: Collection[str]) -> list[Edge]:
        return [
            edge
            for edge in self._edges.values()
            if edge.producer.label in begun and edge.consumer.label not in begun
        ]

    def _inputs_of(self, edge: Edge, step: int) -> list[InputPort]:
        ranks = range(self._processes(edge.consumer))
        return [self._input(edge.name, rank, step) for rank in ranks]
