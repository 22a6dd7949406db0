"""Groups of workers: launch them, call their methods on all ranks, collect the results."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rlinf.scheduler.errors import (
    InvalidRankError,
    SchedulerUsageError,
    SchedulerValueError,
    WaitTimeout,
)
from rlinf.scheduler.process import current_worker_name, require_process
from rlinf.scheduler.services.registry import GroupRecord
from rlinf.scheduler.tracer import Tracer
from rlinf.scheduler.worker.execution import Outcome, result_of

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.placement import PlacementStrategy
    from rlinf.scheduler.runtime.base import PendingCall, Runtime, WorkerHandle

Reduction = Literal["max", "min", "mean"]

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}
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
        from rlinf.scheduler.cluster_launch import plan_launches

        if self._handles:
            raise SchedulerUsageError(f"worker group '{self._name}' is running already")
        self._name = name or f"worker_group_{self._worker_cls.__name__}"
        self._attach_methods()
        launches = plan_launches(
            cluster, self._name, placement_strategy, isolate_gpu, disable_distributed_log
        )
        self._cluster = cluster
        self._worker_names = tuple(launch.name for launch in launches)
        record = GroupRecord(
            self._name, self.worker_cls_name, self._worker_names, launches[0].incarnation
        )
        cluster.register_group(record, launches)
        self._handles = [
            cluster.runtime.start(launch, self._worker_cls, self._arguments, max_concurrency)
            for launch in launches
        ]
        return self

    @classmethod
    def from_group_name(cls, worker_cls: type, name: str) -> WorkerGroup:
        """A group that is running, by name, from any process.

        Raises:
            SchedulerValueError: There is no such group.
        """
        from rlinf.scheduler.cluster import Cluster

        record: GroupRecord | None = require_process().ask_driver("registry.group", name)
        if record is None:
            raise SchedulerValueError(f"there is no running worker group '{name}'")
        group = cls(worker_cls)
        group._name = name
        group._cluster = Cluster()
        group._worker_names = record.worker_names
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
        base = set(dir(_worker_base()))
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
        calls = [self._handles[rank].call(method, process.encode((args, kwargs))) for rank in ranks]
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


class WorkerGroupFuncResult:
    """A method call on several ranks.

    Args:
        group: The group.
        method: Name of the method.
        ranks: Ranks that run it, in the order of the results.
        names: Their worker names.
        calls: Their calls.
        runtime: Runtime that carries them.
    """

    def __init__(  # noqa: PLR0917 - built by WorkerGroup alone
        self,
        group: WorkerGroup,
        method: str,
        ranks: tuple[int, ...],
        names: list[str],
        calls: list[PendingCall],
        runtime: Runtime,
    ) -> None:
        self._group = group
        self._method = method
        self._ranks = ranks
        self._names = names
        self._calls = calls
        self._runtime = runtime
        self._outcomes: dict[int, Outcome] = {}
        self._results: dict[int, Any] = {}

    def wait(self) -> list[Any]:
        """Wait for all ranks and return their results in order of the ranks.

        Raises:
            WorkerCallError: The method raised on a rank; raised as soon as the first one does. It
                is also of the type that the worker raised.
            WorkerDiedError: A worker's process ended.
            WaitTimeout: A worker's process did not start within the deadline.
        """
        with Tracer.trace_span(self._method, cat="group call"):
            while len(self._results) < len(self._calls):
                self._wait_some()
        return [self._results[index] for index in range(len(self._calls))]

    async def async_wait(self) -> list[Any]:
        """Wait on the event loop for all ranks; raises like `wait`."""
        waiting = {asyncio.ensure_future(call.outcome_async()) for call in self._calls}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    finished.result()
                self._collect()
        finally:
            for task in waiting:
                task.cancel()
        return self.wait()

    def done(self) -> bool:
        """Whether every rank has finished."""
        return all(call.done() for call in self._calls)

    def consume_duration(self, reduction: Reduction = "max") -> float:
        """Seconds of the call, over the ranks; waits for it.

        Where the method is decorated with ``Worker.timer``, what that recorded; otherwise the time
        of the call itself.
        """
        return _reduce(self._durations_of_method(), reduction)

    def consume_durations(
        self, reduction: Reduction = "max", return_per_rank: bool = False
    ) -> dict[str, float] | tuple[dict[str, float], list[dict[str, float]]]:
        """Seconds of every tag that the workers timed, and of the call itself; clears the timers.

        Args:
            reduction: How to combine the ranks.
            return_per_rank: Also return the table of every rank.
        """
        self.wait()
        own = [self._outcomes[index].seconds for index in range(len(self._calls))]
        timed = self._group.execute_on(*self._ranks)._call("pop_execution_times").wait()
        tables = [{self._method: mine, **table} for mine, table in zip(own, timed, strict=True)]
        tags = {tag: None for table in tables for tag in table}
        reduced = {
            tag: _reduce([table[tag] for table in tables if tag in table], reduction)
            for tag in tags
        }
        return (reduced, tables) if return_per_rank else reduced

    def _durations_of_method(self) -> list[float]:
        self.wait()
        own = [self._outcomes[index].seconds for index in range(len(self._calls))]
        try:
            recorded: list[float] = (
                self._group.execute_on(*self._ranks)
                ._call("pop_execution_time", self._method)
                .wait()
            )
        except SchedulerValueError:
            return own
        return recorded

    def _collect(self) -> None:
        for index, call in enumerate(self._calls):
            if index not in self._results and call.done():
                self._take(index)

    def _take(self, index: int) -> None:
        outcome = self._calls[index].outcome()
        self._outcomes[index] = outcome
        self._results[index] = result_of(outcome, self._names[index], self._method)

    def _wait_some(self) -> None:
        """Wait for one more rank; a process that does not even start has a deadline."""
        process = require_process()
        missing = [index for index in range(len(self._calls)) if index not in self._results]
        names = [self._names[index] for index in missing]
        with process.waits.waiting(current_worker_name(), f"{self._method} of {names}"):
            calls = [self._calls[index] for index in missing]
            position = self._runtime.wait_any(calls, process.deadline_seconds)
        if position is not None:
            self._take(missing[position])
            return
        for name in names:
            if not process.ask_driver("registry.started", name):
                raise WaitTimeout(
                    f"worker '{name}' did not start within {process.deadline_seconds / 60:g} "
                    "minutes; see the cluster's logs for why its process is missing"
                )


def _reduce(values: Sequence[float], reduction: str) -> float:
    if reduction not in _REDUCTIONS:
        raise SchedulerValueError(
            f"unknown reduction '{reduction}'; known: {', '.join(_REDUCTIONS)}"
        )
    return _REDUCTIONS[reduction](values)


def _refuse_hidden(name: str, *args: Any, **kwargs: Any) -> None:
    raise SchedulerValueError(
        f"method '{name}' is hidden (starts with an '_'): a group calls public methods only"
    )


def _worker_base() -> type:
    from rlinf.scheduler.worker.base import Worker

    return Worker
