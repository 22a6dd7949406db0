"""What a training step takes beside the work of its components: hand-overs, driver.

The time of a loop is longer than the work of its stages: every exchange wakes workers. The time of
a step is longer than that of its nodes: leases, calls, reports, metrics. Both are what is left of
a measured time when the measured work is taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlinf.config.base import StrictModel
from rlinf.flow.graph import Flow, Node
from rlinf.flow.plan import Plan
from rlinf.flow.running_step import StepReport
from rlinf.planner.profile import ComponentProfile, Exchange, Profile


class Overhead(StrictModel):
    """Times that belong to no component [s]."""

    synchronisation_seconds: float = 0.0
    """To bring the weights of the trainer to all others, between steps."""
    driver_seconds: float = 0.0
    """Of a step in which no node runs, without the synchronisation."""
    exchanges: tuple[Exchange, ...] = ()
    """Of the exchanges of loops."""


_Kind = tuple[str, bool, int]
"""A loop, whether its stages are on different devices, and on how many."""


@dataclass
class OverheadRecorder:
    """Collects what steps took beside the work of their components.

    Exchanges are taken from steps in which the stages of a loop wait for each other (one sub-batch
    in flight); the driver's time from steps whose nodes take turns.

    Args:
        flow: What happens in a step.
        plan: Where it runs.
        exchanges: How often the stages of a loop feed each other in a step, by node.
        staleness: Steps that are under way besides the one that trains.
    """

    flow: Flow
    plan: Plan
    exchanges: Mapping[str, int]
    staleness: int = 0
    synchronisations: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    loops: dict[_Kind, list[float]] = field(default_factory=dict)

    def observe(self, report: StepReport, seconds: float | None) -> None:
        """Take a step.

        Args:
            report: Of the step.
            seconds: Its whole time; None where it is not known.
        """
        self.synchronisations.append(report.begin_seconds)
        if any(node.name not in report.node_seconds for node in self.flow.nodes):
            return
        for node in self.flow.nodes:
            if node.is_loop and self._stages(node) == 1:
                idle = report.node_seconds[node.name] - _work(node, report)
                per_exchange = idle / self.exchanges.get(node.name, 1)
                self.loops.setdefault(self._kind(node), []).append(per_exchange)
        if seconds is not None and self._takes_turns():
            nodes = sum(
                report.node_seconds[node.name] if node.is_loop else _work(node, report)
                for node in self.flow.nodes
            )
            self.driver.append(seconds - report.begin_seconds - nodes)

    @property
    def divides_a_loop(self) -> bool:
        """Whether stages of a loop are on different devices."""
        return any(self._kind(node)[1] for node in self.flow.nodes if node.is_loop)

    def count_work_of(
        self, own: Mapping[str, ComponentProfile], known: Mapping[str, ComponentProfile]
    ) -> None:
        """Count as part of the exchanges what stages take longer here than is known of them.

        Args:
            own: What was measured in these steps, one size of each component.
            known: What is known of the components, elsewhere.
        """
        for node in self.flow.nodes:
            kind = self._kind(node)
            if kind not in self.loops:
                continue
            longer = sum(_longer(own[name], known[name]) for name in node.components)
            per_exchange = longer / self.exchanges.get(node.name, 1)
            self.loops[kind] = [seconds + per_exchange for seconds in self.loops[kind]]

    def _kind(self, node: Node) -> _Kind:
        homes = {self.plan.components[name].devices for name in node.components}
        return node.name, len(homes) > 1, len(self.plan.devices(node.components))

    def _stages(self, node: Node) -> int:
        return max(self.plan.components[name].pipeline_stages for name in node.components)

    def _takes_turns(self) -> bool:
        nodes = self.flow.nodes
        return not self.staleness and all(
            self.plan.overlap(one.components, other.components) for one in nodes for other in nodes
        )


def _longer(own: ComponentProfile, known: ComponentProfile) -> float:
    [here] = own.measurements
    size = (here.items, here.devices, here.pipeline_stages)
    there = [m for m in known.measurements if (m.items, m.devices, m.pipeline_stages) == size]
    return here.seconds - there[0].seconds if there else 0.0


def _work(node: Node, report: StepReport) -> float:
    """What the stages of a node did, one after the other, without waiting for input."""
    return sum(report.seconds(stage.label) for stage in node.stages)


def overhead(recorders: list[OverheadRecorder], known: Profile | None = None) -> Overhead:
    """The medians over all steps; what none of them shows is as it was known, or else 0."""
    loops: dict[_Kind, list[float]] = {}
    for recorder in recorders:
        for kind, found in recorder.loops.items():
            loops.setdefault(kind, []).extend(found)
    before = known or Overhead()
    synchronisations = [s for r in recorders for s in r.synchronisations]
    return Overhead(
        synchronisation_seconds=clipped_median(synchronisations, before.synchronisation_seconds),
        driver_seconds=clipped_median(
            [s for r in recorders for s in r.driver], before.driver_seconds
        ),
        exchanges=joined(
            before.exchanges,
            tuple(
                Exchange(node=n, apart=apart, devices=d, seconds=clipped_median(found))
                for (n, apart, d), found in loops.items()
            ),
        ),
    )


def joined(known: tuple[Exchange, ...], new: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    """What was measured earlier and now; of equal settings the new one."""
    by_setting = {(e.node, e.apart, e.devices): e for e in (*known, *new)}
    return tuple(by_setting.values())


def clipped_median(values: Iterable[float], otherwise: float = 0.0) -> float:
    """The median, at least 0, as what is left of a time may be less than nothing by chance."""
    found = list(values)
    return max(0.0, float(np.median(found))) if found else otherwise
