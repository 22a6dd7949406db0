"""Groups of workers: launch them, call their methods on all ranks, collect the results."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.cluster import Cluster
from rlinf.scheduler.cluster_launch import start_group
from rlinf.scheduler.errors import (
    InvalidRankError,
    SchedulerUsageError,
    SchedulerValueError,
)
from rlinf.scheduler.process import require_process
from rlinf.scheduler.runtime.group_call import WorkerGroupFuncResult
from rlinf.scheduler.services.registry import GroupRecord

if TYPE_CHECKING:
    from rlinf.scheduler.placement import PlacementStrategy
    from rlinf.scheduler.runtime.base import WorkerHandle

__all__ = ["GroupMember", "WorkerGroup", "WorkerGroupFuncResult"]

_NOT_GROUP_METHODS = frozenset({"create_group", "timer", "mro", "worker_timer"})


@dataclass(frozen=True)
class GroupMember:
    """One worker of a group.

    Args:
        rank: Its rank.
        worker: Its handle: ``worker.method.remote(...)`` calls a method of this rank alone.
    """

    rank: int
    worker: Any


class WorkerGroup:
    """Workers of one class.

    ``W.create_group(...)`` makes it and `launch` starts it; then every public method of ``W`` is a
    method of the group, which runs on all ranks and returns a `WorkerGroupFuncResult` at once.

    Args:
        worker_cls: Class of the workers.
        args: Positional arguments of its ``__init__``.
        kwargs: Keyword arguments of its ``__init__``.
    """

    def __init__(
        self, worker_cls: type, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        self._worker_cls = worker_cls
        self._arguments = (args, kwargs or {})
        self._cluster: Cluster | None = None
        self._handles: list[WorkerHandle] = []
        self._worker_names: tuple[str, ...] = ()
        self._nodes: tuple[int, ...] = ()
        self._selected: tuple[int, ...] | None = None
        self._name = ""

    @property
    def worker_group_name(self) -> str:
        """Name of the group, empty before the launch."""
        return self._name

    @property
    def worker_cls_name(self) -> str:
        """Name of the workers' class."""
        return self._worker_cls.__name__

    @property
    def worker_info_list(self) -> list[GroupMember]:
        """Rank and handle of every worker."""
        return [GroupMember(rank, handle.actor) for rank, handle in enumerate(self._handles)]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._handles)

    def launch(  # noqa: PLR0917 - the published signature
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        catch_system_failure: bool | None = None,
        disable_distributed_log: bool = False,
    ) -> WorkerGroup:
        """Start the workers; returns before they are up, and the first call waits for them.

        Args:
            cluster: Where to run.
            placement_strategy: Which process runs where; None is one per device of the cluster,
                or one process on node 0 without devices.
            name: Name of the group; ``worker_group_<Class>`` if None.
            max_concurrency: Calls of one worker that may run at the same time; None runs plain
                methods one after another, and up to 1000 calls of a class with async methods.
            isolate_gpu: Whether a worker sees only its own devices.
            catch_system_failure: Accepted for programs that pass it. A failing call is always
                raised where it is waited for.
            disable_distributed_log: Write no per-worker log files for this group.

        Raises:
            NameTakenError: A group of that name is alive (also a ``ValueError``).
            ValueError: The class has a public method with the name of a method of WorkerGroup.
        """
        if self._handles:
            raise SchedulerUsageError(f"worker group '{self._name}' is running already")
        self._name = name or f"worker_group_{self._worker_cls.__name__}"
        self._attach_methods()
        started = start_group(
            cluster,
            self._name,
            self._worker_cls,
            placement_strategy,
            arguments=self._arguments,
            max_concurrency=max_concurrency,
            isolate=isolate_gpu,
            log=not disable_distributed_log,
        )
        self._cluster = cluster
        self._worker_names, self._nodes = started.record.worker_names, started.record.nodes
        self._handles = started.handles
        return self

    @classmethod
    def from_group_name(cls, worker_cls: type, name: str) -> WorkerGroup:
        """A group that is running, by name, from any process.

        Raises:
            SchedulerValueError: There is no such group.
        """
        record: GroupRecord | None = require_process().ask_driver("registry.group", name)
        if record is None:
            raise SchedulerValueError(f"there is no running worker group '{name}'")
        group = cls(worker_cls)
        group._name = name
        group._cluster = Cluster()
        group._worker_names = record.worker_names
        group._nodes = record.nodes
        find = group._cluster.runtime.find
        group._handles = [find(worker, record.incarnation) for worker in record.worker_names]
        group._attach_methods()
        return group

    def execute_on(self, *ranks: int) -> WorkerGroup:
        """Run only the next method call, and only on these ranks.

        Raises:
            InvalidRankError: The group has no such rank (also an ``AssertionError``).
        """
        self._selected = None
        if not ranks or any(not 0 <= rank < len(self._handles) for rank in ranks):
            raise InvalidRankError(
                f"Invalid rank(s) specified. Got {list(ranks)}; group '{self._name}' has ranks "
                f"0-{len(self._handles) - 1}."
            )
        self._selected = ranks
        return self

    def _close(self) -> None:
        """End the workers and free the group's name."""
        if self._cluster is not None:
            self._cluster.close_group(self._name, self._handles)
        self._handles = []

    def _attach_methods(self) -> None:
        own = set(dir(WorkerGroup))
        # The class that brings `create_group` is the base of all workers.
        bases = (kind for kind in self._worker_cls.__mro__ if "create_group" in vars(kind))
        base = set(dir(next(bases, object)))
        for name in dir(self._worker_cls):
            function = inspect.getattr_static(self._worker_cls, name)
            method = inspect.isfunction(function) or isinstance(
                function, staticmethod | classmethod
            )
            if not method or name in _NOT_GROUP_METHODS:
                continue
            if name.startswith("_"):
                if not name.startswith("__") and name not in own and name not in base:
                    setattr(self, name, partial(_refuse_hidden, name))
            elif name in own:
                raise SchedulerValueError(
                    f"method '{name}' of {self._worker_cls.__name__} has the name of a method of "
                    "WorkerGroup, so the group could not call it. Rename it."
                )
            else:
                setattr(self, name, partial(self._call, name))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> WorkerGroupFuncResult:
        if self._cluster is None or not self._handles:
            raise SchedulerUsageError(
                f"worker group of {self._worker_cls.__name__} is not running: launch it before "
                f"calling '{method}'"
            )
        ranks = self._selected or tuple(range(len(self._handles)))
        self._selected = None
        process = require_process()
        calls = [
            self._handles[rank].call(
                method, process.encode((args, kwargs), reader_node=self._nodes[rank])
            )
            for rank in ranks
        ]
        names = [self._worker_names[rank] for rank in ranks]
        return WorkerGroupFuncResult(self, method, ranks, names, calls, self._cluster.runtime)

    def __getattr__(self, name: str) -> Any:
        # Group methods are set by `launch`; this tells type checkers so, and explains typos.
        worker_class = self.__dict__.get("_worker_cls", type(self)).__name__
        raise AttributeError(
            f"worker group of {worker_class} has no method '{name}'; methods of the class are "
            "there after launch()"
        )

    def __reduce__(self) -> Any:
        return WorkerGroup.from_group_name, (self._worker_cls, self._name)


def _refuse_hidden(name: str, *args: Any, **kwargs: Any) -> None:
    raise SchedulerValueError(
        f"method '{name}' is hidden (starts with an '_'): a group calls public methods only"
    )
