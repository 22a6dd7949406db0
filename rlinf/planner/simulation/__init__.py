"""The simulator: what a flow would take under a plan, on a cluster that need not exist."""

from rlinf.planner.simulation.answer_lengths import (
    GenerationModel,
    LengthDistribution,
    parse_lengths,
)
from rlinf.planner.simulation.results import DeviceGroup, Simulation, idle_shares
from rlinf.planner.simulation.simulate import Conditions, simulate

__all__ = [
    "Conditions",
    "DeviceGroup",
    "GenerationModel",
    "LengthDistribution",
    "Simulation",
    "idle_shares",
    "parse_lengths",
    "simulate",
]
