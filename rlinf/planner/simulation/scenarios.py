"""Which placement wins where: shipped scenarios, planned and simulated at several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf.flow.constraints import Constraints
from rlinf.planner.cluster_shape import ClusterShape, parse_cluster_shape
from rlinf.planner.search import Planned, plan
from rlinf.planner.simulation.results import Simulation
from rlinf.planner.simulation.scenario_data import Scenario, find_scenario
from rlinf.planner.simulation.simulate import Conditions, simulate

# Enough to find the best plan of every mode among the next best ones.
CONSIDERED = 40


@dataclass(frozen=True)
class ScenarioResult:
    """One placement of one scenario on one cluster; all figures are simulated.

    Args:
        cluster: The cluster.
        items: Items of a step.
        mode: What the placement amounts to.
        planned: The plan, with what the planner expects.
        simulation: What the simulator found.
        best: Whether the planner chose it.
    """

    cluster: ClusterShape
    items: int
    mode: str
    planned: Planned
    simulation: Simulation
    best: bool


def run_scenario(
    name: str, *, clusters: tuple[str, ...] = (), steps: int = 10, staleness: int = 0, seed: int = 0
) -> Iterator[ScenarioResult]:
    """Plan and simulate the best collocated, disaggregated and hybrid placement at every size.

    A mode that takes more than twice as long as taking turns is left out.

    Args:
        name: Name of the scenario.
        clusters: Shapes such as ``16x8:H100``; by default those of the scenario. A shape that the
            scenario does not list has the items of its largest.
        steps: Steps to simulate.
        staleness: Steps by which weights may be old.
        seed: Seed of the lengths.

    Raises:
        ConfigError: The scenario is not known, a shape cannot be read, or nothing fits.
    """
    scenario = find_scenario(name)
    for text, items in _sizes(scenario, clusters):
        cluster = parse_cluster_shape(text)
        constraints = scenario.constraints(items, staleness)
        conditions = Conditions(steps=steps, seed=seed, generation=scenario.generation())
        yield from _outcomes(scenario, cluster, constraints, conditions)


def _sizes(scenario: Scenario, clusters: tuple[str, ...]) -> list[tuple[str, int]]:
    """Clusters and items that are to be simulated."""
    known = [(size.cluster, size.items) for size in scenario.clusters]
    largest = max(items for _, items in known)
    found = []
    for text in clusters:
        found += [size for size in known if size[0] == text] or [(text, largest)]
    return found or known


def _outcomes(
    scenario: Scenario, cluster: ClusterShape, constraints: Constraints, conditions: Conditions
) -> Iterator[ScenarioResult]:
    flow, profile = scenario.graph(), scenario.profile()
    best = plan(flow, profile, cluster, constraints, alternatives=CONSIDERED)
    seen: set[str] = set()
    for planned in (best, *best.alternatives):
        mode = planned.plan.mode
        if mode in seen:
            continue
        seen.add(mode)
        simulation = simulate(
            flow, planned.plan, profile, cluster, constraints,
            conditions=replace(conditions, hand_overs=planned.hand_overs),
        )  # fmt: skip
        yield ScenarioResult(cluster, constraints.items, mode, planned, simulation, planned is best)


HEADER = (
    "cluster", "items", "mode", "composition", "devices", "planned", "simulated", "10–90 %", "idle",
)  # fmt: skip


def table(outcomes: Iterator[ScenarioResult]) -> list[tuple[str, ...]]:
    """Column names, then a row per placement; the planner's choice has a star."""
    rows: list[tuple[str, ...]] = [HEADER]
    for outcome in outcomes:
        low, middle, high = outcome.simulation.quantiles(0.1, 0.5, 0.9)
        devices = {n: len(p.devices) for n, p in outcome.planned.plan.components.items()}
        rows.append(
            (
                str(outcome.cluster),
                str(outcome.items),
                outcome.mode + (" *" if outcome.best else ""),
                outcome.planned.shape,
                " ".join(f"{name} {count}" for name, count in devices.items()),
                f"{outcome.planned.seconds:.1f} s",
                f"{middle:.1f} s",
                f"{low:.1f}–{high:.1f} s",
                f"{100 * outcome.simulation.idle_fraction:.0f} %",
            )
        )
    return rows
