"""From a recipe and a profile to a plan, and back to a recipe that is placed by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from rlinf.config.dump import literal, to_data
from rlinf.config.load import with_overrides
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import Trial
from rlinf.planner.cluster_shape import (
    ClusterShape,
    check_measured,
    cluster_of,
    cluster_overrides,
    node_groups,
)
from rlinf.planner.profile import Profile
from rlinf.planner.search import Constraints, Planned
from rlinf.planner.search import plan as solve

PLACING = ("component_placement", "residency", "plan")
"""Keys of the cluster that say where components run."""
ALTERNATIVES = 8
"""Plans beside the fastest of a search that a recipe is asked about."""
MOST_SEARCHES = 16
"""Searches until it is said that the recipe refuses all plans."""
_WITHOUT_MOVES = (
    "; devices that change hands while a run goes on are not planned: plan it with "
    "cluster.auto_scheduler=false"
)
_SILENT = ("logger.backends=[]", "runner.timeline=false")
_UNSAVED = ("checkpoint.interval=0",)


# -- other settings of a recipe -----------------------------------------------------------------


def changed(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    """A config with other values; a placement that is given replaces the whole placement.

    Raises:
        ConfigError: They are not legal.
    """
    data = to_data(config)
    if any(text.startswith("cluster.component_placement=") for text in overrides):
        dropped = PLACING if config.auto_plan is None else PLACING[:2]
        data["cluster"] = {k: v for k, v in data["cluster"].items() if k not in dropped}
    recipe = with_overrides("a trial", literal(data), overrides)
    return validate(type(config), recipe.data, recipe)


def quiet(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    """A config with overrides that writes and decides nothing beside.

    Raises:
        ConfigError: They are not legal.
    """
    decides = ["~cluster.plan"] if config.auto_plan else []
    return changed(config, [*_SILENT, *decides, *overrides])


def legal_trials(config: PlacedConfig) -> Iterator[tuple[str, PlacedConfig]]:
    """The recipe as it is, then its trials; those that its rules refuse are left out."""
    own = quiet(config, _UNSAVED)
    yield "the recipe as it is", own
    yield from _others(config, own, lambda words: quiet(config, (*_UNSAVED, *words)))


def legal_placements(config: PlacedConfig) -> Iterator[tuple[str, PlacedConfig]]:
    """The trials with all items of the recipe, without its own placement, as the run goes on."""
    for label, found in _others(config, config, lambda words: changed(config, words)):
        if _same_work(found, config):
            yield label, found


def _others(
    config: PlacedConfig, own: PlacedConfig, change: Callable[[tuple[str, ...]], PlacedConfig]
) -> Iterator[tuple[str, PlacedConfig]]:
    """The legal trials of a recipe that differ from its own setting, and from each other."""
    known = [own]
    for trial in _trials(config):
        try:
            found = change(trial.overrides)
        except ConfigError:
            continue
        if not any(_same_work(found, o) and found.plan.same_places(o.plan) for o in known):
            known.append(found)
            yield trial.label, found


def _trials(config: PlacedConfig) -> Iterator[Trial]:
    """Trials of a recipe on the first devices of each kind of its cluster."""
    spans: dict[str, tuple[int, int]] = {}
    first = 0
    for group in node_groups(config):
        spans.setdefault(group.kind, (first, group.devices))
        first += group.devices
    for kind, span in spans.items():
        for trial in config.planning.trials(*span):
            yield trial if len(spans) == 1 else replace(trial, label=f"{trial.label} of {kind}")


def _same_work(one: PlacedConfig, other: PlacedConfig) -> bool:
    """Whether steps have equally many items, and may run equally far ahead."""
    first, second = one.planning, other.planning
    same = first.items == second.items
    return same and first.constraints.staleness == second.constraints.staleness


# -- the recipe under a plan --------------------------------------------------------------------


def placed_by(
    config: PlacedConfig, plan: Plan, cluster: ClusterShape | None = None
) -> PlacedConfig:
    """The recipe under a plan, which it has as it is; its own placement plays no role.

    ``cluster`` has the devices that the plan numbers; None: those of the recipe.

    Raises:
        ConfigError: The rules of the recipe refuse it, or it cannot describe the cluster.
    """
    data = to_data(config)
    for key in PLACING:
        data["cluster"].pop(key)
    section, _, key = config.pipeline_key.rpartition(".")
    if section:
        data[section].pop(key)
    machine = [] if cluster is None else cluster_overrides(config, cluster)
    recipe = with_overrides("a plan", literal(data), machine)
    recipe.data["cluster"]["plan"] = plan
    return validate(type(config), recipe.data, recipe)


def command_overrides(
    config: PlacedConfig, plan: Plan, cluster: ClusterShape | None = None, *, file: str = ""
) -> list[str]:
    """What to write behind the command that names a recipe, so that it runs under a plan.

    ``cluster`` has the devices that the plan numbers; None: those of the recipe. The plan is saved
    in ``file``; empty: nowhere, and it is written out.

    Raises:
        ConfigError: The recipe cannot describe the cluster.
    """
    machine = [] if cluster is None else cluster_overrides(config, cluster)
    dropped = [f"~cluster.{key}" for key in PLACING if getattr(config.cluster, key)]
    found = [*machine, *dropped, f"cluster.plan={file or json.dumps(plan.written())}"]
    stages = max(part.pipeline_stages for part in plan.components.values())
    own = max(config.pipeline_stages(name) for name in config.components)
    if config.pipeline_key and stages != own:
        found.append(f"{config.pipeline_key}={stages}")
    return found


# -- the fastest plan ---------------------------------------------------------------------------


def find_plan(
    config: PlacedConfig,
    flow: Flow,
    profile: Profile,
    *,
    cluster: ClusterShape | None = None,
    limits: Constraints | None = None,
    alternatives: int = 3,
) -> Planned:
    """The fastest plan of a recipe, whose own placement plays no role.

    Without a ``cluster`` it may run on that of the recipe; without ``limits`` its components can do
    what the recipe says.

    Raises:
        ConfigError: There is none; says which limit binds.
    """
    shape = cluster or cluster_of(config)
    if cluster is None:
        check_measured(config, profile)
    limits = limits or config.planning.constraints
    return solve(flow, profile, shape, limits, alternatives=alternatives)


@dataclass(frozen=True)
class AcceptedPlan:
    """The fastest plan that a recipe accepts."""

    config: PlacedConfig  # the recipe under it
    found: Planned  # the plan; its alternatives are accepted, too
    passed_over: str = ""
    """In one line, the faster plans that the recipe refuses, and why; or empty."""


def find_accepted_plan(
    config: PlacedConfig, flow: Flow, profile: Profile, *, cluster: ClusterShape | None = None
) -> AcceptedPlan:
    """The fastest plan that a recipe accepts, on another ``cluster`` or its own.

    What the recipe asks of one component, or of one loop, its constraints say, and every plan keeps
    to them. What it asks of several is asked here, of one plan after the other, the fastest first.

    Raises:
        ConfigError: There is no plan, and which limit binds; or the recipe refuses all, and why.
    """
    candidates = _Candidates(config, flow, profile, cluster)
    legal: list[tuple[PlacedConfig, Planned]] = []
    refused: list[str] = []  # in one line each, without that which names the recipe
    for plan in candidates:
        try:
            legal.append((placed_by(config, plan.plan, cluster), plan))
        except ConfigError as error:
            if not legal:
                lines = str(error).splitlines()
                why = " ".join(" ".join(lines[1:] or lines).split())
                refused.append(f"{plan.shape} in {plan.seconds:.4g} s: {why}")
                candidates.look_beside(plan)
    if not legal:
        raise ConfigError(
            f"the recipe refuses all plans that were found ({len(refused)}); the fastest: "
            f"{refused[0]}{_WITHOUT_MOVES if config.cluster.auto_scheduler else ''}"
        )
    (placed, best), *others = legal
    best = replace(best, alternatives=tuple(plan for _, plan in others))
    more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
    passed_over = f"passed over, as the recipe refuses it: {refused[0]}{more}" if refused else ""
    return AcceptedPlan(placed, best, passed_over)


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
