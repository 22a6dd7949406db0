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
from rlinf.flow.graph import Flow, Node
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import ComponentConstraint, Constraints, PlanningTraits
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.search.formulas import Floats
from rlinf.planner.search.problem import Problem, make_problem
from rlinf.planner.search.report import Planned
from rlinf.planner.simulation.answer_lengths import (
    ASSUMED_CORRELATION,
    ASSUMED_SIGMA,
    GenerationModel,
    LengthDistribution,
    calibrated,
)
from rlinf.planner.simulation.node_run import NodeModel
from rlinf.planner.simulation.results import NodeStep, SimulatedTimeline, Simulation, Step

SIMULATED_STEPS = 20
ASSUMED_MEAN_SHARE = 0.5
"""Mean length as a part of the limit where nobody knows it: 13975 of 27648 tokens are published
for the setting of the scenario ``math-1.5b``."""


@dataclass(frozen=True)
class Conditions:
    """What a simulation assumes beyond plan and profile."""

    steps: int = 1  # to simulate
    seed: int = 0  # of lengths
    timeline: bool = False  # whether to record events
    generation: Mapping[str, GenerationModel] = field(default_factory=dict)
    """Models of the components whose time depends on lengths."""
    hand_overs: Mapping[str, int] = field(default_factory=dict)
    """Items per hand-over by node; else what the constraints say."""


def simulate(
    flow: Flow,
    plan: Plan,
    profile: Profile,
    cluster: ClusterShape,
    constraints: Constraints,
    *,
    conditions: Conditions | None = None,
) -> Simulation:
    """Simulate training steps under a plan, found by the planner or written by hand.

    Of the limits of components only their processes per replica play a role. Without
    ``conditions`` it is one step of measured times.

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
        self._timeline = SimulatedTimeline(plan, enabled=conditions.timeline)

    def steps(self) -> Simulation:
        """All steps."""
        done: list[Step] = []
        profile, staleness = self._problem.profile, self._problem.constraints.staleness
        lag = staleness + 1
        for number in range(self._conditions.steps):
            before = done[number - lag].end if number >= lag else 0.0
            begin = before + profile.fixed_seconds
            self._timeline.synchronisation(number, begin - profile.synchronisation_seconds, begin)
            nodes: dict[str, NodeStep] = {}
            for node in self._order:
                nodes[node.name] = self._node(node, number, begin, nodes)
            end = max(run.released for run in nodes.values())
            done.append(Step(number, begin, end, nodes))
        return Simulation(
            steps=tuple(done),
            devices={name: len(part.devices) for name, part in self._plan.components.items()},
            cluster_devices=self._problem.cluster.devices,
            staleness=staleness,
            events=self._timeline.events(),
        )

    def _node(
        self, node: Node, number: int, begin: float, before: Mapping[str, NodeStep]
    ) -> NodeStep:
        devices = self._devices[node.name]
        leased = max(begin, float(self._free[devices].max()))
        onload, offload = self._problem.profile.switch_seconds(
            n for n in node.components if self._plan.components[n].residency == "offload"
        )
        rng = np.random.default_rng([self._conditions.seed, number, self._order.index(node)])
        arrivals = self._arrivals(node, begin, before)
        work = self._models[node.name].run(rng, arrivals, leased + onload, self._slowed)
        released = work.end + offload
        self._free[devices] = released
        run = NodeStep(**vars(work), leased=leased, begin=leased + onload, released=released)
        self._timeline.node(node, number, begin, run)
        return run

    def _arrivals(self, node: Node, begin: float, before: Mapping[str, NodeStep]) -> Floats:
        """[U] when units have arrived from all nodes that feed this one."""
        constraints = self._problem.constraints
        arrivals = np.full(constraints.items // constraints.group_size, begin)
        for source in self._sources[node.name]:
            arrivals = np.maximum(arrivals, before[source].ready)
        return arrivals


# -- a recipe that was planned ------------------------------------------------------------------


def lengths_of(
    traits: PlanningTraits, wanted: LengthDistribution | None
) -> LengthDistribution | None:
    """Lengths of the answers of a recipe; None where it generates no text.

    Where nothing is ``wanted``, they follow from the limit that the recipe sets; the rest of it is
    assumed.

    Raises:
        ConfigError: They are longer than the recipe lets them be, or it generates no text.
    """
    if traits.generation is None:
        if wanted is not None:
            raise ConfigError("lengths have no effect: the recipe generates no text")
        return None
    limit = traits.generation.most_tokens
    if wanted is not None:
        if wanted.maximum > limit:
            raise ConfigError(
                f"lengths of up to {wanted.maximum} tokens: the recipe ends answers at {limit}; "
                f"nearest: {limit}"
            )
        return wanted
    if limit == 1:
        return LengthDistribution(mean=1.0, maximum=1, origin="limit of the recipe")
    return LengthDistribution(
        mean=max(1.0, ASSUMED_MEAN_SHARE * limit),
        maximum=limit,
        sigma=ASSUMED_SIGMA,
        correlation=ASSUMED_CORRELATION,
        origin="limit of the recipe; mean of half of it, spread and likeness assumed",
    )


def simulate_planned(
    config: PlacedConfig,
    flow: Flow,
    planned: Planned,
    profile: Profile,
    cluster: ClusterShape,
    *,
    steps: int = SIMULATED_STEPS,
    lengths: LengthDistribution | None = None,
    timeline: bool = False,
) -> Simulation:
    """Play steps of a recipe under a plan as the planner found it, with its hand-overs.

    Where it generates text, generation takes in the median what the planner expects by the profile,
    and each step and engine differs from it by the lengths that it draws. Without ``lengths`` these
    are those that the recipe lets expect; its own placement plays no role.

    Raises:
        ConfigError: The lengths are not possible in the recipe, or the plan needs a size that was
            not measured.
    """
    traits, constraints, plan = config.planning, config.planning.constraints, planned.plan
    drawn = lengths_of(traits, lengths)
    models: dict[str, GenerationModel] = {}
    if traits.generation is not None and drawn is not None:
        name = traits.generation.component
        part, measured = plan.components[name], profile.components[name].measurements
        if part.predicted_seconds is None:
            raise ConfigError(
                f"the plan does not say how long '{name}' takes; simulate one that the planner "
                "found"
            )
        groups = enumerate(cluster.groups)
        kind = [g.kind for n, g in groups if cluster.offset(n) <= part.devices[0]][-1]
        # Measurements on the kind of device that it is on; all where none names it.
        there = [m for m in measured if m.device_kind in ("", kind)]
        models[name] = calibrated(
            drawn,
            traits.generation.max_running,
            there or measured,
            seconds=part.predicted_seconds,
            groups=constraints.items // constraints.group_size,
            group_size=constraints.group_size,
            engines=part.processes,
            devices_per_engine=part.devices_per_process,
        )
    conditions = Conditions(
        steps=steps, timeline=timeline, generation=models, hand_overs=planned.hand_overs
    )
    return simulate(flow, plan, profile, cluster, constraints, conditions=conditions)
