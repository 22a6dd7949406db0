"""Workers: the base class of every process of a program, and groups of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf.scheduler.worker.base import Worker

if TYPE_CHECKING:
    from rlinf.scheduler.worker_group import WorkerGroup, WorkerGroupFuncResult

__all__ = ["Worker", "WorkerGroup", "WorkerGroupFuncResult"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rlinf.scheduler import worker_group

        return getattr(worker_group, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
