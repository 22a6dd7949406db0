"""From a recipe and a profile to a plan, and back to a recipe that is placed by it."""

from __future__ import annotations

from rlinf.config.ranges import device_ranges, device_span, ranges_of
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.flow.planning_traits import PlanningTraits
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.described_cluster import check_measured, cluster_of, cluster_overrides
from rlinf.planner.profile import Profile
from rlinf.planner.search import Constraints, Planned
from rlinf.planner.search import plan as solve
from rlinf.planner.variants import changed


def find_plan(
    config: PlacedConfig,
    flow: Flow,
    profile: Profile,
    *,
    cluster: ClusterShape | None = None,
    limits: Constraints | None = None,
    alternatives: int = 3,
) -> Planned:
    """The fastest plan of a recipe.

    Args:
        config: The recipe; its own placement plays no role.
        flow: What happens in a step.
        profile: What was measured.
        cluster: Where it may run; None: on the cluster of the recipe.
        limits: What its components can do; None: what the recipe says.
        alternatives: How many of the next best placements to return.

    Raises:
        ConfigError: There is none; says which limit binds.
    """
    shape = cluster
    if shape is None:
        shape = cluster_of(config)
        check_measured(config, profile)
    limits = limits or config.planning.constraints
    return solve(flow, profile, shape, limits, alternatives=alternatives)


def placed_by(
    config: PlacedConfig, plan: Plan, cluster: ClusterShape | None = None
) -> PlacedConfig:
    """The recipe under a plan.

    Args:
        config: The recipe.
        plan: Where its components are to run.
        cluster: The devices that the plan numbers; None: those of the recipe.

    Raises:
        ConfigError: The rules of the recipe refuse it, or it cannot describe the cluster.
    """
    machine = [] if cluster is None else cluster_overrides(config, cluster)
    return changed(config, [*machine, *plan_overrides(config.planning, plan)])


def plan_overrides(traits: PlanningTraits, plan: Plan) -> list[str]:
    """What to write into a recipe, as on the command line, so that it runs under a plan."""
    parts = plan.components.items()
    placement = ", ".join(f'{name}: "{placement_text(part)}"' for name, part in parts)
    residency = ", ".join(f"{name}: {part.residency}" for name, part in parts)
    # Written for every component: what is left out would be decided anew.
    found = [
        f"cluster.component_placement={{{placement}}}",
        f"cluster.residency={{{residency}}}",
    ]
    stages = max((part.pipeline_stages for _, part in parts), default=1)
    if traits.pipeline_key:
        found.append(f"{traits.pipeline_key}={stages}")
    return found


def placement_text(part: ComponentPlan) -> str:
    """Devices and processes of a component in the grammar of placements."""
    if part.processes == len(part.devices):
        return device_ranges(part.devices)
    texts, first = [], 0
    for begin, end in ranges_of(part.devices):
        count = part.processes * (end - begin) // len(part.devices)
        texts.append(f"{device_span(begin, end)}:{device_span(first, first + count)}")
        first += count
    return ",".join(texts)


def command_overrides(
    config: PlacedConfig, plan: Plan, cluster: ClusterShape | None = None
) -> list[str]:
    """What to write behind the command that names a recipe, so that it runs under a plan.

    The placement of the recipe is dropped first, as its components may be written together.

    Args:
        config: The recipe.
        plan: Where its components are to run.
        cluster: The devices that the plan numbers; None: those of the recipe.

    Raises:
        ConfigError: The recipe cannot describe the cluster.
    """
    machine = [] if cluster is None else cluster_overrides(config, cluster)
    written = ("component_placement", "residency")
    dropped = [f"~cluster.{key}" for key in written if getattr(config.cluster, key)]
    return [*machine, *dropped, *plan_overrides(config.planning, plan)]


def explained(placed: Plan, found: Plan) -> Plan:
    """The plan of a placed recipe with the figures and reasons of the plan that it is placed by."""
    kept = ("predicted_seconds", "predicted_bytes", "reason")
    return Plan(
        components={
            name: part.model_copy(
                update={key: getattr(found.components[name], key) for key in kept}
            )
            for name, part in placed.components.items()
        }
    )
