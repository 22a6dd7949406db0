"""The simulator: what a flow would take under a plan, on a cluster that need not exist."""

from rlinf.flow.simulation.generation import GenerationModel
from rlinf.flow.simulation.lengths import LengthDistribution
from rlinf.flow.simulation.results import Simulation
from rlinf.flow.simulation.simulate import Conditions, simulate

__all__ = ["Conditions", "GenerationModel", "LengthDistribution", "Simulation", "simulate"]
