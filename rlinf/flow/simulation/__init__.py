"""The simulator: what a flow would take under a plan, on a cluster that need not exist."""

from rlinf.flow.simulation.generation import GenerationModel
from rlinf.flow.simulation.idle import DeviceGroup, idle_shares
from rlinf.flow.simulation.lengths import LengthDistribution, parse_lengths
from rlinf.flow.simulation.results import Simulation
from rlinf.flow.simulation.simulate import Conditions, simulate

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
