"""The fastest plan that the recipe accepts for which it was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import Plan
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.planned import find_plan, placed_by
from rlinf.planner.profile import Profile
from rlinf.planner.search import Constraints, Planned

ALTERNATIVES = 8
"""Plans beside the fastest of a search that a recipe is asked about."""

MOST_SEARCHES = 16
"""Searches until it is said that the recipe refuses all plans."""


@dataclass(frozen=True)
class AcceptedPlan:
    """The fastest plan that a recipe accepts.

    Args:
        config: The recipe under it.
        found: The plan; its alternatives are accepted, too.
        passed_over: In one line, the faster plans that the recipe refuses, and why; or empty.
    """

    config: PlacedConfig
    found: Planned
    passed_over: str = ""


def find_accepted_plan(
    config: PlacedConfig, flow: Flow, profile: Profile, *, cluster: ClusterShape | None = None
) -> AcceptedPlan:
    """The fastest plan that a recipe accepts.

    What the recipe asks of one component, or of one loop, its constraints say, and every plan keeps
    to them. What it asks of several is asked here, of one plan after the other, the fastest first.

    Args:
        config: The recipe; its own placement plays no role.
        flow: What happens in a step.
        profile: What was measured.
        cluster: Where it may run; None: on the cluster of the recipe.

    Raises:
        ConfigError: There is no plan, and which limit binds; or the recipe refuses all, and why.
    """
    candidates = _Candidates(config, flow, profile, cluster)
    legal: list[tuple[PlacedConfig, Planned]] = []
    refused: list[str] = []
    for plan in candidates:
        try:
            legal.append((placed_by(config, plan.plan, cluster), plan))
        except ConfigError as error:
            if not legal:
                refused.append(f"{plan.shape} in {plan.seconds:.4g} s: {_in_one_line(error)}")
                candidates.look_beside(plan)
    if not legal:
        raise ConfigError(
            f"the recipe refuses all plans that were found ({len(refused)}); the fastest: "
            f"{refused[0]}"
        )
    (placed, best), *others = legal
    best = replace(best, alternatives=tuple(plan for _, plan in others))
    return AcceptedPlan(placed, best, _said(refused))


class _Candidates(Iterator[Planned]):
    """Plans of a recipe, the fastest first.

    A plan that is slower and needs as many devices is none of the alternatives of a search. So
    where a plan is refused, the search is repeated without what each of its components has.
    """

    def __init__(
        self, config: PlacedConfig, flow: Flow, profile: Profile, cluster: ClusterShape | None
    ) -> None:
        self._asked, self._cluster = (config, flow, profile), cluster
        self._devices = config.devices if cluster is None else cluster.devices
        self._waiting: list[tuple[float, int, Planned, Constraints]] = []
        self._known: list[Plan] = []
        self._limits = config.planning.constraints
        self._searches = 0
        self._search(self._limits)

    def __next__(self) -> Planned:
        if not self._waiting:
            raise StopIteration
        _, _, found, self._limits = heappop(self._waiting)
        return found

    def _search(self, limits: Constraints) -> None:
        self._searches += 1
        found = find_plan(
            *self._asked, cluster=self._cluster, limits=limits, alternatives=ALTERNATIVES
        )
        for plan in (found, *found.alternatives):
            if not any(plan.plan.same_places(known) for known in self._known):
                self._known.append(plan.plan)
                heappush(self._waiting, (plan.seconds, len(self._known), plan, limits))

    def look_beside(self, refused: Planned) -> None:
        """Search for plans that differ in the processes of a component from the last one."""
        limits = self._limits
        for name, part in refused.plan.components.items():
            of_component = limits.of(name)
            every = range(1, self._devices + 1)
            others = tuple(n for n in of_component.processes or every if n != part.processes)
            if not others or self._searches == MOST_SEARCHES:
                continue
            changed = of_component.model_copy(update={"processes": others})
            components = {**limits.components, name: changed}
            try:
                self._search(limits.model_copy(update={"components": components}))
            except ConfigError:
                continue  # without these processes nothing can run


def _said(refused: Sequence[str]) -> str:
    """What a person is told of plans that were passed over: the fastest of them, and its fault."""
    if not refused:
        return ""
    more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
    return f"passed over, as the recipe refuses it: {refused[0]}{more}"


def _in_one_line(error: ConfigError) -> str:
    """What a recipe says against a plan, without the line that names the recipe."""
    lines = str(error).splitlines()
    return " ".join(" ".join(lines[1:] or lines).split())
