"""From a recipe that was planned to steps that are played: on machines that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.flow.planning_traits import Generation, PlanningTraits
from rlinf.planner.cluster_shape import ClusterShape
from rlinf.planner.profile import Measurement, Profile
from rlinf.planner.search import Constraints
from rlinf.planner.simulation import (
    Conditions,
    GenerationModel,
    LengthDistribution,
    Simulation,
    simulate,
)
from rlinf.planner.simulation.generation import calibrated
from rlinf.planner.simulation.lengths import ASSUMED_CORRELATION, ASSUMED_SIGMA

ASSUMED_MEAN_SHARE = 0.5
"""Mean length as a part of the limit where nobody knows it: 13975 of 27648 tokens are published
for the setting of the scenario ``math-1.5b``."""


@dataclass(frozen=True)
class SimulationOptions:
    """What is to be simulated beyond a plan.

    Args:
        steps: Steps to simulate.
        seed: Seed of lengths.
        lengths: Lengths of answers; None: those that the recipe lets expect.
        timeline: Whether to record events.
    """

    steps: int = 20
    seed: int = 0
    lengths: LengthDistribution | None = None
    timeline: bool = False


def expected_lengths(generation: Generation) -> LengthDistribution:
    """Lengths of answers by the limit that a recipe sets; the rest of it is assumed."""
    limit = generation.most_tokens
    if limit == 1:
        return LengthDistribution(mean=1.0, maximum=1, origin="limit of the recipe")
    return LengthDistribution(
        mean=max(1.0, ASSUMED_MEAN_SHARE * limit),
        maximum=limit,
        sigma=ASSUMED_SIGMA,
        correlation=ASSUMED_CORRELATION,
        origin="limit of the recipe; mean of half of it, spread and likeness assumed",
    )


def lengths_of(
    traits: PlanningTraits, wanted: LengthDistribution | None
) -> LengthDistribution | None:
    """Lengths of the answers of a recipe; None where it generates no text.

    Args:
        traits: Of the recipe.
        wanted: What is known of them; None: nothing.

    Raises:
        ConfigError: They are longer than the recipe lets them be, or it generates no text.
    """
    generation = traits.generation
    if generation is None:
        if wanted is not None:
            raise ConfigError("lengths have no effect: the recipe generates no text")
        return None
    if wanted is None:
        return expected_lengths(generation)
    if wanted.maximum > generation.most_tokens:
        raise ConfigError(
            f"lengths of up to {wanted.maximum} tokens: the recipe ends answers at "
            f"{generation.most_tokens}; nearest: {generation.most_tokens}"
        )
    return wanted


def simulate_planned(
    config: PlacedConfig,
    flow: Flow,
    plan: Plan,
    profile: Profile,
    cluster: ClusterShape,
    *,
    options: SimulationOptions | None = None,
) -> Simulation:
    """Play steps of a recipe under a plan.

    Where it generates text, generation takes in the median what the planner expects by the profile,
    and each step and engine differs from it by the lengths that it draws.

    Args:
        config: The recipe; its own placement plays no role.
        flow: What happens in a step.
        plan: As the planner found it.
        profile: What was measured.
        cluster: The devices that the plan numbers.
        options: How many steps, and what lengths.

    Raises:
        ConfigError: The lengths are not possible in the recipe, or the plan needs a size that was
            not measured.
    """
    options = options or SimulationOptions()
    traits = config.planning
    lengths = lengths_of(traits, options.lengths)
    models: dict[str, GenerationModel] = {}
    if traits.generation is not None and lengths is not None:
        name = traits.generation.component
        part = plan.components[name]
        measured = _measured(name, part, profile, cluster)
        models[name] = _generation(traits.generation, traits.constraints, lengths, part, measured)
    conditions = Conditions(
        steps=options.steps, seed=options.seed, timeline=options.timeline, generation=models
    )
    return simulate(flow, plan, profile, cluster, traits.constraints, conditions=conditions)


def _measured(
    name: str, part: ComponentPlan, profile: Profile, cluster: ClusterShape
) -> list[Measurement]:
    """Measurements on the kind of device that a component is on; all where none names it."""
    groups = enumerate(cluster.groups)
    kind = [g.kind for n, g in groups if cluster.offset(n) <= part.devices[0]][-1]
    found = profile.components[name].measurements
    return [m for m in found if m.device_kind in ("", kind)] or list(found)


def _generation(
    generation: Generation,
    constraints: Constraints,
    lengths: LengthDistribution,
    part: ComponentPlan,
    measured: Sequence[Measurement],
) -> GenerationModel:
    """A model of generation that takes what the planner expects."""
    if part.predicted_seconds is None:
        raise ConfigError(
            f"the plan does not say how long '{generation.component}' takes; simulate one that "
            "the planner found"
        )
    return calibrated(
        lengths,
        generation.max_running,
        measured,
        seconds=part.predicted_seconds,
        groups=constraints.items // constraints.group_size,
        group_size=constraints.group_size,
        engines=part.processes,
        devices_per_engine=part.devices_per_process,
    )
