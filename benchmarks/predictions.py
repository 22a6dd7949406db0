"""What simulator and planner say about a mode, from a profile measured beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.cli.tasks import read_config
from rlinf.flow.graph import Flow
from rlinf.flow.plan import Plan
from rlinf.planner.cluster_shape import cluster_of
from rlinf.planner.profile import Profile
from rlinf.planner.search import predict
from rlinf.planner.simulation import Conditions, simulate

SIMULATED_STEPS = 12


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step; a plan whose components take turns is temporal."""

    simulated: float
    planned: float
    temporal: bool

    def errors(self, measured: float) -> tuple[float, float]:
        """Simulated and planned against measured, as parts of the latter."""
        return self.simulated / measured - 1, self.planned / measured - 1


def prediction(recipe: Path, words: list[str], profile: Profile) -> Prediction:
    """What a step of a run should take under its placement."""
    task, _, config = read_config(str(recipe), words)
    flow, limits, cluster = task.flow(config), config.planning.constraints, cluster_of(config)
    conditions = Conditions(steps=SIMULATED_STEPS)
    played = simulate(flow, config.plan, profile, cluster, limits, conditions=conditions)
    return Prediction(
        simulated=statistics.median(played.steady_seconds),
        planned=predict(flow, config.plan, profile, cluster, limits),
        temporal=not limits.staleness and _takes_turns(flow, config.plan),
    )


def _takes_turns(flow: Flow, plan: Plan) -> bool:
    """Whether no two components on different devices work at the same time."""
    return all(
        plan.overlap(one.components, other.components) for one in flow.nodes for other in flow.nodes
    ) and all(
        plan.components[node.components[0]].pipeline_stages == 1
        or len({plan.components[name].devices for name in node.components}) == 1
        for node in flow.nodes
    )


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Median absolute errors, of temporal plans and of the others."""
    found = {}
    for kind in (True, False):
        for source in ("simulated", "planned"):
            errors = [
                abs(row[f"{source}_error"])
                for row in rows.values()
                if row.get("temporal") is kind and f"{source}_error" in row
            ]
            if errors:
                word = "temporal" if kind else "spatial"
                found[f"{word}, {source}"] = statistics.median(errors)
    return found
