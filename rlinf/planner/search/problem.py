"""What a plan is made from, and what one component costs at one size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.planning_traits import ComponentConstraint, Constraints
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.costs import CostModel
from rlinf.planner.profile import Profile, named_kinds
from rlinf.planner.search.formulas import Floats
from rlinf.planner.search.pareto import Integers


@dataclass(frozen=True)
class Problem:
    """Everything that a plan is made from.

    Times and memory are [N] for N ``sizes`` (numbers of devices) of a component on a kind of
    device, with so many ``stages`` (sub-batches in flight); infinite where a size is not possible.

    Args:
        costs: Cost models by component and index of the kind of device, where it can run.
        most_sizes: Sizes of a component that are looked at, at most, spread evenly over their
            magnitudes; None: all of them.
    """

    flow: Flow
    profile: Profile
    cluster: ClusterShape
    constraints: Constraints
    costs: Mapping[tuple[str, int], CostModel]
    most_sizes: int | None = None
    _by_size: dict[tuple[object, ...], Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # -- devices --------------------------------------------------------------------------------

    @property
    def overlap(self) -> float:
        """Factor on the time of a flow whose parts work on different steps."""
        return self.profile.overlap_factor if self.constraints.staleness else 1.0

    def limits(self, component: str) -> ComponentConstraint:
        """What a component can do."""
        return self.constraints.of(component)

    def memory(self) -> Floats:
        """[K] memory of a device of each kind [bytes], infinite where it is not limited."""
        return np.array([g.memory_bytes or math.inf for g in self.cluster.groups], float)

    def capacity(self) -> Integers:
        """[K] devices of each kind."""
        return np.array([g.devices for g in self.cluster.groups])

    def kinds(self, component: str) -> tuple[int, ...]:
        """Indices of the kinds of devices that a component can run on."""
        return tuple(k for k in range(len(self.cluster.groups)) if (component, k) in self.costs)

    def kind_of(self, device: int) -> int:
        """Index of the kind of a device, numbered over the whole cluster."""
        groups = range(len(self.cluster.groups))
        return max(group for group in groups if self.cluster.offset(group) <= device)

    def alignment(self, components: Sequence[str]) -> int:
        """Multiple at which devices must begin, so that no replica crosses two nodes."""
        return math.lcm(*(self.limits(name).devices_per_replica for name in components))

    def legal_sizes(
        self, component: str, kind: int, *, items: int, stages: int, unmeasured: bool = False
    ) -> Integers:
        """Numbers of devices on which a component can process ``items`` in ``stages`` sub-batches.

        Every replica gets whole groups, and at least one: of each chunk, or, where it serves all
        items at once, of the step. With ``unmeasured`` also those of which no time is known.
        """
        limits, cost = self.limits(component), self.cost(component, kind)
        at_once = self.constraints.items if cost.profile.concurrent else items
        groups, odd = divmod(at_once, self.constraints.group_size * stages)
        if odd:
            return np.zeros(0, np.int64)
        most = self.cluster.groups[kind].devices // limits.devices_per_replica
        replicas = np.arange(1, min(most, groups) + 1)
        processes = replicas * limits.processes_per_replica
        legal = np.ones(len(replicas), bool)
        if limits.processes:
            legal &= np.isin(processes, limits.processes)
        if limits.even:
            legal &= groups % replicas == 0
        for number in limits.also_divide:
            legal &= number % (processes * stages) == 0
        sizes = replicas[legal] * limits.devices_per_replica
        if not unmeasured:
            low, high = cost.bounds()
            sizes = sizes[(sizes >= low) & (sizes <= high)]
        if self.most_sizes is None or len(sizes) <= self.most_sizes:
            return sizes
        spread = np.geomspace(1, len(sizes), self.most_sizes)
        return np.asarray(sizes[np.unique(np.round(spread).astype(int)) - 1])

    # -- costs ----------------------------------------------------------------------------------

    def cost(self, component: str, kind: int) -> CostModel:
        """Cost model of a component on a kind of device.

        Raises:
            ConfigError: It was not measured there.
        """
        if (component, kind) not in self.costs:
            there = named_kinds([self.cluster.groups[kind].kind])
            known = named_kinds(self.profile.components[component].kinds)
            raise ConfigError(f"'{component}' was not measured on {there}; measured on {known}")
        return self.costs[component, kind]

    def seconds(
        self, component: str, kind: int, sizes: Integers, *, items: int, stages: int
    ) -> Floats:
        """Time in which a component processes ``items`` of a step, a chunk that it gets at once.

        The replica with most items sets the time. A component that serves all items at once is
        measured on all items of the step; a chunk is its part of the time in which results come.
        """
        cost = self.cost(component, kind)
        seen = self.constraints.items if cost.profile.concurrent else items

        def evaluate(sizes: Integers) -> Floats:
            replicas, fullest = self._fullest(component, sizes, seen, stages)
            seconds = cost.seconds(fullest * replicas, sizes, stages)
            seconds = seconds + fullest * cost.profile.transfer_seconds_per_item
            return seconds * (items / seen) * (1 - self._lead_share(component))

        return self._each_once(("seconds", component, kind, items, stages), sizes, evaluate)

    def closing(
        self, component: str, kind: int, sizes: Integers, *, items: int, stages: int
    ) -> Floats:
        """Part of the time of a component that the last pass of its loop takes."""

        def evaluate(sizes: Integers) -> Floats:
            replicas, fullest = self._fullest(component, sizes, items, stages)
            return self.cost(component, kind).closing_share(fullest * replicas, sizes, stages)

        return self._each_once(("closing", component, kind, items, stages), sizes, evaluate)

    def lead(self, component: str, kind: int, sizes: Integers, *, stages: int) -> Floats:
        """Time before the first result of a component that serves all items at once; else 0."""
        share = self._lead_share(component)
        if not share:
            # Also where a size is not possible, whose time is infinite.
            return np.zeros(sizes.shape)
        items = self.constraints.items
        rest = self.seconds(component, kind, sizes, items=items, stages=stages)
        return rest * share / (1 - share)

    def peak(self, component: str, kind: int, sizes: Integers, *, stages: int) -> Floats:
        """Most memory of a device, which does not depend on the chunks that items arrive in."""

        def evaluate(sizes: Integers) -> Floats:
            items = self.constraints.items
            replicas, fullest = self._fullest(component, sizes, items, stages)
            return self.cost(component, kind).peak_bytes(fullest * replicas, sizes, stages)

        return self._each_once(("bytes", component, kind, stages), sizes, evaluate)

    def _lead_share(self, component: str) -> float:
        profile = self.profile.components[component]
        return profile.first_result_share if profile.concurrent else 0.0

    def _fullest(
        self, component: str, sizes: Integers, items: int, stages: int
    ) -> tuple[Integers, Integers]:
        """Replicas, and items of the one that has most, in whole groups of each sub-batch."""
        replicas = sizes // self.limits(component).devices_per_replica
        unit = self.constraints.group_size * stages
        return replicas, -(-(items // unit) // replicas) * unit

    def _each_once(
        self, key: tuple[object, ...], sizes: Integers, evaluate: Callable[[Integers], Floats]
    ) -> Floats:
        """Values by size; each is evaluated once for what the key says they depend on besides."""
        known = self._by_size.get(key, np.zeros(0))
        beyond = int(sizes.max(initial=0)) + 1 - len(known)
        if beyond > 0:
            self._by_size[key] = known = np.append(known, np.full(beyond, np.nan))
        unknown = np.isnan(known[sizes])
        if unknown.any():
            new = np.unique(sizes[unknown])
            known[new] = evaluate(new)
        return known[sizes]


def make_problem(
    flow: Flow, profile: Profile, cluster: ClusterShape, constraints: Constraints
) -> Problem:
    """Check that everything is there, and make the cost models.

    Raises:
        ConfigError: A component has no profile, a constraint names what is not there, or a cluster
            without a kind is to be planned for with figures of several.
    """
    constraints.check_names(flow)
    named = [kind for kind in profile.kinds if kind]
    unsaid = [group for group in cluster.groups if not group.kind]
    if len(named) > 1 and unsaid:
        raise ConfigError(
            f"the profile has figures of {named_kinds(named)}, and cluster {cluster} does not say "
            f"which of them it has; nearest: {unsaid[0]}:{named[0]}"
        )
    costs: dict[tuple[str, int], CostModel] = {}
    several = len(cluster.groups) > 1
    for _, stage in flow.stages():
        name = stage.component
        if name not in profile.components:
            hint = did_you_mean(name, profile.components)
            raise ConfigError(f"the profile has no measurements of '{name}'; {hint}")
        measured = profile.components[name]
        wanted = constraints.of(name).device_kinds
        for index, group in enumerate(cluster.groups):
            # Between several kinds only figures of that kind count.
            known = group.kind in measured.kinds or (not several and "" in measured.kinds)
            unnamed = not group.kind and not several
            if (known or unnamed) and (not wanted or group.kind in wanted):
                together = constraints.of(name).devices_per_process
                costs[name, index] = CostModel(
                    name, measured, group.kind, devices_per_process=together
                )
    return Problem(flow, profile, cluster, constraints, costs)
