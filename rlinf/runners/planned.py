"""From a recipe and a profile to a plan, and back to a recipe that is placed by it."""

from __future__ import annotations

from rlinf.flow.cluster_shape import ClusterShape, NodeGroup
from rlinf.flow.graph import Flow
from rlinf.flow.plan import Plan
from rlinf.flow.planning import Planned
from rlinf.flow.planning import plan as solve
from rlinf.flow.profile import Profile
from rlinf.runners.placed_config import PlacedConfig
from rlinf.runners.planning_traits import plan_overrides
from rlinf.runners.profiling import changed


def cluster_of(config: PlacedConfig) -> ClusterShape:
    """The cluster that a recipe runs on; its devices are those that a placement can name."""
    nodes = config.cluster.num_nodes
    group = NodeGroup(nodes=nodes, devices_per_node=config.devices // nodes)
    return ClusterShape(groups=(group,))


def find_plan(
    config: PlacedConfig,
    flow: Flow,
    profile: Profile,
    *,
    cluster: ClusterShape | None = None,
    alternatives: int = 3,
) -> Planned:
    """The fastest plan of a recipe.

    Args:
        config: The recipe; its own placement plays no role.
        flow: What happens in a step.
        profile: What was measured.
        cluster: Where it may run; None: on the cluster of the recipe.
        alternatives: How many of the next best placements to return.

    Raises:
        ConfigError: There is none; says which limit binds.
    """
    shape = cluster or cluster_of(config)
    limits = config.planning.constraints
    return solve(flow, profile, shape, limits, alternatives=alternatives)


def placed_by(config: PlacedConfig, plan: Plan) -> PlacedConfig:
    """The recipe under a plan.

    Raises:
        ConfigError: The rules of the recipe refuse it.
    """
    return changed(config, plan_overrides(config.planning, plan))


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


def same_places(one: Plan, other: Plan) -> bool:
    """Whether two plans run everything in the same way, whatever their reasons."""
    return _places(one) == _places(other)


def _places(plan: Plan) -> dict[str, tuple[object, ...]]:
    return {
        name: (part.devices, part.processes, part.residency, part.pipeline_stages)
        for name, part in plan.components.items()
    }
