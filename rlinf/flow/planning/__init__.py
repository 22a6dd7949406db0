"""The planner: where, when and in what pieces a flow runs fastest."""

from rlinf.flow.planning.constraints import ComponentConstraint, Constraints
from rlinf.flow.planning.predict import predict
from rlinf.flow.planning.report import Planned
from rlinf.flow.planning.solve import plan

__all__ = ["ComponentConstraint", "Constraints", "Planned", "plan", "predict"]
