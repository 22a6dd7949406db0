"""The planner: where, when and in what pieces a flow runs fastest."""

from rlinf.flow.planning_traits import ComponentConstraint, Constraints
from rlinf.planner.search.composition import predict
from rlinf.planner.search.report import Planned
from rlinf.planner.search.solve import plan

__all__ = ["ComponentConstraint", "Constraints", "Planned", "plan", "predict"]
