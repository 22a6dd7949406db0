"""Workers: the base class of every process of a program, and groups of them."""

from rlinf.scheduler.worker.base import Worker
from rlinf.scheduler.worker_group import WorkerGroup, WorkerGroupFuncResult

__all__ = ["Worker", "WorkerGroup", "WorkerGroupFuncResult"]
