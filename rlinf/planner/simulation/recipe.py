"""From a recipe that was planned to steps that are played: on machines that need not exist."""

from __future__ import annotations

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import Plan
from rlinf.flow.planning_traits import PlanningTraits
from rlinf.planner.cluster import ClusterShape
from rlinf.planner.profile import Profile
from rlinf.planner.simulation.generation import (
    ASSUMED_CORRELATION,
    ASSUMED_SIGMA,
    GenerationModel,
    LengthDistribution,
    calibrated,
)
from rlinf.planner.simulation.results import Simulation
from rlinf.planner.simulation.simulate import Conditions, simulate

SIMULATED_STEPS = 20
ASSUMED_MEAN_SHARE = 0.5
"""Mean length as a part of the limit where nobody knows it: 13975 of 27648 tokens are published
for the setting of the scenario ``math-1.5b``."""


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
    plan: Plan,
    profile: Profile,
    cluster: ClusterShape,
    *,
    steps: int = SIMULATED_STEPS,
    lengths: LengthDistribution | None = None,
    timeline: bool = False,
) -> Simulation:
    """Play steps of a recipe under a plan as the planner found it.

    Where it generates text, generation takes in the median what the planner expects by the profile,
    and each step and engine differs from it by the lengths that it draws.

    Args:
        config: The recipe; its own placement plays no role.
        flow: What happens in a step.
        plan: As the planner found it.
        profile: What was measured.
        cluster: The devices that the plan numbers.
        steps: Steps to simulate.
        lengths: Lengths of answers; None: those that the recipe lets expect.
        timeline: Whether to record events.

    Raises:
        ConfigError: The lengths are not possible in the recipe, or the plan needs a size that was
            not measured.
    """
    traits, constraints = config.planning, config.planning.constraints
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
    conditions = Conditions(steps=steps, timeline=timeline, generation=models)
    return simulate(flow, plan, profile, cluster, constraints, conditions=conditions)
