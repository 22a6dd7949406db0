"""A discrete-event simulation of training steps: any flow, plan, profile and size of cluster.

It follows the executor. All nodes of a step reserve their devices when the step may start, in the
order of the flow; a node begins when all its devices were given back by those before it. The
reservations of a device are first come, first served, and steps are reserved in their order, so the
order of events on every device is known beforehand: times are computed event by event in that
order, without a queue. Events are those of groups of items and of engines, never of tokens.

With a staleness bound of ``k`` in the constraints, a step may start when all but the last ``k``
steps before it are done, and the weights were synchronised. ``k = 0`` is synchronous training.

A node takes as many items at once, and hands on as many together, as the constraints say.

All times are simulated from measurements and declared models; none is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.flow.constraints import ComponentConstraint, Constraints
from rlinf.flow.graph import Flow, Node
from rlinf.flow.plan import Plan
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.search.problem import Problem, make_problem
from rlinf.planner.simulation.generation import GenerationModel
from rlinf.planner.simulation.node_run import Floats, NodeModel, NodeOutcome
from rlinf.planner.simulation.results import NodeStep, Simulation, Step
from rlinf.planner.simulation.trace import Trace


@dataclass(frozen=True)
class Conditions:
    """What a simulation assumes beyond plan and profile.

    Args:
        steps: Steps to simulate.
        seed: Seed of lengths.
        timeline: Whether to record events.
        generation: Models of the components whose time depends on lengths.
        hand_overs: Items per hand-over by node; else what the constraints say.
    """

    steps: int = 1
    seed: int = 0
    timeline: bool = False
    generation: Mapping[str, GenerationModel] = field(default_factory=dict)
    hand_overs: Mapping[str, int] = field(default_factory=dict)


def simulate(
    flow: Flow,
    plan: Plan,
    profile: Profile,
    cluster: ClusterShape,
    constraints: Constraints,
    *,
    conditions: Conditions | None = None,
) -> Simulation:
    """Simulate training steps.

    Args:
        flow: What happens in a step.
        plan: Where it runs, found by the planner or written by hand.
        profile: Measured costs of every component.
        cluster: The devices that the plan numbers.
        constraints: The work of a step, and its staleness; of the limits of components only
            their processes per replica play a role.
        conditions: How many steps, lengths; by default one step of measured times.

    Returns:
        Times of every step and node, and events in the format of
        :class:`~rlinf.monitor.timeline.TimelineFile`.

    Raises:
        ConfigError: The plan names devices that the cluster does not have, leaves a component
            out, or needs a size that was not measured.
    """
    conditions = conditions or Conditions()
    problem = make_problem(flow, profile, cluster, _as_planned(flow, plan, cluster, constraints))
    for name in conditions.generation:
        if name not in plan.components:
            hint = did_you_mean(name, plan.components)
            raise ConfigError(f"generation is modelled for '{name}', which is not planned; {hint}")
    return _Run(problem, plan, conditions).steps()


def _as_planned(
    flow: Flow, plan: Plan, cluster: ClusterShape, constraints: Constraints
) -> Constraints:
    """Constraints with the sizes of processes and replicas that the plan has."""
    limits = {}
    for _, stage in flow.stages():
        name = stage.component
        if name not in plan.components:
            hint = did_you_mean(name, plan.components)
            raise ConfigError(f"the plan does not place '{name}'; {hint}")
        part = plan.components[name]
        if max(part.devices) >= cluster.devices:
            raise ConfigError(
                f"the plan places '{name}' on device {max(part.devices)}; {cluster} has devices "
                f"0 to {cluster.devices - 1}"
            )
        together = constraints.of(name).processes_per_replica
        limits[name] = ComponentConstraint(
            devices_per_process=part.devices_per_process,
            processes_per_replica=together if part.processes % together == 0 else 1,
        )
    return constraints.model_copy(update={"components": limits})


class _Run:
    """One simulation."""

    def __init__(self, problem: Problem, plan: Plan, conditions: Conditions) -> None:
        self._problem = problem
        self._plan = plan
        self._conditions = conditions
        self._order = problem.flow.order()
        self._models = {
            node.name: NodeModel(
                problem, plan, node, conditions.generation, conditions.hand_overs.get(node.name)
            )
            for node in self._order
        }
        self._devices = {node.name: np.array(plan.devices(node.components)) for node in self._order}
        self._sources = problem.flow.feeds()
        first, *others = (set(devices.tolist()) for devices in self._devices.values())
        ahead = problem.constraints.staleness and any(not first & other for other in others)
        self._slowed = problem.profile.overlap_factor if ahead else 1.0
        self._free = np.zeros(problem.cluster.devices)
        self._trace = Trace(plan, enabled=conditions.timeline)

    def steps(self) -> Simulation:
        """All steps."""
        done: list[Step] = []
        profile, staleness = self._problem.profile, self._problem.constraints.staleness
        lag = staleness + 1
        for number in range(self._conditions.steps):
            before = done[number - lag].end if number >= lag else 0.0
            begin = before + profile.fixed_seconds
            self._trace.synchronisation(number, begin - profile.synchronisation_seconds, begin)
            done.append(self._step(number, begin))
        return Simulation(
            steps=tuple(done),
            devices={name: len(part.devices) for name, part in self._plan.components.items()},
            cluster_devices=self._problem.cluster.devices,
            staleness=staleness,
            events=self._trace.events(),
        )

    def _step(self, number: int, begin: float) -> Step:
        outcomes: dict[str, NodeOutcome] = {}
        nodes: dict[str, NodeStep] = {}
        for node in self._order:
            outcomes[node.name], nodes[node.name] = self._node(node, number, begin, outcomes)
        end = max(run.released for run in nodes.values())
        tokens = sum(outcome.tokens for outcome in outcomes.values())
        return Step(number, begin, end, nodes, tokens)

    def _node(
        self, node: Node, number: int, begin: float, outcomes: Mapping[str, NodeOutcome]
    ) -> tuple[NodeOutcome, NodeStep]:
        devices = self._devices[node.name]
        leased = max(begin, float(self._free[devices].max()))
        onload, offload = self._switch(node)
        rng = np.random.default_rng([self._conditions.seed, number, self._order.index(node)])
        outcome = self._models[node.name].run(
            rng,
            self._arrivals(node, begin, outcomes),
            leased + onload,
            self._slowed,
        )
        released = outcome.end + offload
        self._free[devices] = released
        run = NodeStep(leased, leased + onload, outcome.end, released, dict(outcome.busy))
        self._trace.node(node, number, begin, run, outcome)
        return outcome, run

    def _arrivals(self, node: Node, begin: float, outcomes: Mapping[str, NodeOutcome]) -> Floats:
        """[U] when units have arrived from all nodes that feed this one."""
        constraints = self._problem.constraints
        arrivals = np.full(constraints.items // constraints.group_size, begin)
        for source in self._sources[node.name]:
            arrivals = np.maximum(arrivals, outcomes[source].ready)
        return arrivals

    def _switch(self, node: Node) -> tuple[float, float]:
        """Time to load, and to offload; the slowest component of the node counts."""
        offloaded = [
            self._problem.profile.components[name]
            for name in node.components
            if self._plan.components[name].residency == "offload"
        ]
        if not offloaded:
            return 0.0, 0.0
        return (
            max(profile.onload_seconds or 0.0 for profile in offloaded),
            max(profile.offload_seconds or 0.0 for profile in offloaded),
        )
