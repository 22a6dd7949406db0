"""Groups of workers: launch them, call their methods on all ranks, collect the results."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from typing import TYPE_CHECKING, Any, Literal

from rlinf.scheduler.cluster import Cluster
from rlinf.scheduler.cluster_launch import start_group
from rlinf.scheduler.errors import (
    InvalidRankError,
    SchedulerTypeError,
    SchedulerUsageError,
    SchedulerValueError,
    WaitTimeout,
)
from rlinf.scheduler.placement import PlacementStrategy
from rlinf.scheduler.process import current_process, current_worker_name, require_process
from rlinf.scheduler.runtime.execution import Outcome, result_of
from rlinf.scheduler.services.failed_calls import Wait
from rlinf.scheduler.services.registry import GroupRecord
from rlinf.scheduler.services.tracer import Tracer

if TYPE_CHECKING:
    from rlinf.scheduler.runtime.base import WorkerHandle

Reduction = Literal["max", "min", "mean"]

_NOT_GROUP_METHODS = frozenset({"create_group", "timer", "mro", "worker_timer"})
# Beside plain functions; the last is what functools.cache makes, whose type has no public name.
_KINDS_OF_METHOD = (staticmethod, classmethod, partialmethod, type(cache(len)))
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}


@dataclass(frozen=True)
class GroupMember:
    """One worker of a group: ``worker.method.remote(…)`` calls a method of this rank alone."""

    rank: int
    worker: Any


class _Selection:
    """Ranks for one call: the first one takes them, and the next has None, which is all."""

    def __init__(self, ranks: tuple[int, ...] | None = None) -> None:
        self._ranks = ranks

    def take(self) -> tuple[int, ...] | None:
        ranks, self._ranks = self._ranks, None
        return ranks


class _OfThread(threading.local):
    """What `WorkerGroup.execute_on` said last on each thread."""

    selection = _Selection()


class WorkerGroup:
    """Workers of one class.

    ``W.create_group(...)`` makes it, with the arguments of ``W.__init__``, and `launch` starts it;
    then every public method of ``W`` is a method of the group, which runs on all ranks and returns
    a `WorkerGroupFuncResult` at once.
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
        self._thread = _OfThread()
        self._methods: set[str] = set()
        self._name = self._incarnation = ""

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
            max_concurrency: Calls of one worker that may run at the same time; None or 0 runs plain
                methods one after another, and up to 1000 calls of a class with async methods.
            isolate_gpu: Whether a worker sees only its own devices.
            catch_system_failure: Accepted for programs that pass it, and told to the workers as
                ``CATCH_SYSTEM_FAILURE``. A failing call is always raised where it is waited for.
            disable_distributed_log: Write no per-worker log files for this group.

        Raises:
            SchedulerUsageError: The cluster was shut down.
            NameTakenError: A group of that name is alive (also a ``ValueError``).
            ValueError: The class has a public method with the name of a method of WorkerGroup.
        """
        if self._handles:
            raise SchedulerUsageError(f"worker group '{self._name}' is running already")
        _check_launch(cluster, placement_strategy, max_concurrency)
        self._name = name or f"worker_group_{self._worker_cls.__name__}"
        self._attach_methods()
        record, self._handles = start_group(
            cluster,
            self._name,
            self._worker_cls,
            placement_strategy,
            arguments=self._arguments,
            max_concurrency=max_concurrency or None,
            isolate=isolate_gpu,
            catch_failure=catch_system_failure,
            log=not disable_distributed_log,
        )
        self._cluster = cluster
        self._incarnation = record.incarnation
        self._worker_names, self._nodes = record.worker_names, record.nodes
        return self

    @classmethod
    def from_group_name(cls, worker_cls: type, group_name: str) -> WorkerGroup:
        """A group that is running, by name, from any process; SchedulerValueError without."""
        record: GroupRecord | None = require_process().ask_driver("registry.group", group_name)
        if record is None:
            raise SchedulerValueError(f"there is no running worker group '{group_name}'")
        group = cls(worker_cls)
        group._name = group_name
        group._cluster = Cluster()
        group._incarnation = record.incarnation
        group._worker_names, group._nodes = record.worker_names, record.nodes
        find = group._cluster.runtime.find
        group._handles = [find(worker, record.incarnation) for worker in record.worker_names]
        group._attach_methods()
        return group

    def execute_on(self, *ranks: int) -> WorkerGroup:
        """Run only the next method call only on these ranks; AssertionError for an unknown one.

        The next one of this thread: others may call methods of the group at the same time.
        Without ranks that call runs nowhere, and its results are ``[]``.
        """
        self._thread.selection = _Selection()
        every = range(len(self._handles))
        if any(not hasattr(rank, "__index__") or rank not in every for rank in ranks):
            raise InvalidRankError(
                f"Invalid rank(s) specified. Got {list(ranks)}; group '{self._name}' has ranks "
                f"0-{len(self._handles) - 1}."
            )
        self._thread.selection = _Selection(ranks)
        return self

    def _close(self) -> None:
        """End the workers and free the group's name."""
        if self._cluster is not None:
            if (process := current_process()) is not None:
                process.failed_calls.forget_workers(set(self._worker_names))
            self._cluster.close_group(self._name, self._incarnation, self._handles)
        self._handles = []

    def _attach_methods(self) -> None:
        own = set(dir(WorkerGroup))
        # The class that brings `create_group` is the base of all workers.
        bases = (kind for kind in self._worker_cls.__mro__ if "create_group" in vars(kind))
        base = set(dir(next(bases, object)))
        for name in dir(self._worker_cls):
            function = inspect.getattr_static(self._worker_cls, name)
            method = inspect.isfunction(function) or isinstance(function, _KINDS_OF_METHOD)
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
                self._methods.add(name)

    def _call(
        self, method: str, selection: _Selection, /, *args: Any, **kwargs: Any
    ) -> WorkerGroupFuncResult:
        if not self._handles:
            raise SchedulerUsageError(
                f"worker group of {self._worker_cls.__name__} is not running: launch it before "
                f"calling '{method}'"
            )
        every = tuple(range(len(self._handles)))
        ranks = selection.take()
        if ranks is None:  # of a method that was looked up before `execute_on`
            ranks = self._thread.selection.take()
        ranks = every if ranks is None else ranks
        encode = require_process().encode
        calls = [
            self._handles[rank].call(method, encode((args, kwargs), reader_node=self._nodes[rank]))
            for rank in ranks
        ]
        return WorkerGroupFuncResult(self, method, ranks, calls)

    def __getattr__(self, name: str) -> Any:
        # `launch` names the methods. Of one that another thread calls the ranks are those of the
        # thread that looked it up.
        if name in self.__dict__.get("_methods", ()):
            return partial(self._call, name, self._thread.selection)
        worker_class = self.__dict__.get("_worker_cls", type(self)).__name__
        raise AttributeError(
            f"worker group of {worker_class} has no method '{name}'; methods of the class are "
            "there after launch()"
        )

    def __reduce__(self) -> Any:
        return WorkerGroup.from_group_name, (self._worker_cls, self._name)


def _check_launch(cluster: object, strategy: object, max_concurrency: object) -> None:
    if not isinstance(cluster, Cluster):
        raise SchedulerTypeError(
            f"a group is launched on a cluster, such as Cluster(num_nodes=1), got {cluster!r}"
        )
    if not cluster.running:
        raise SchedulerUsageError(
            "the cluster was shut down: create another one, and launch the group on that"
        )
    if strategy is not None and not isinstance(strategy, PlacementStrategy):
        raise SchedulerTypeError(
            "placement_strategy is a strategy, such as NodePlacementStrategy([0]), got "
            f"{strategy!r}"
        )
    if max_concurrency is None:
        return
    if not isinstance(max_concurrency, int) or max_concurrency < 0:
        raise SchedulerValueError(
            f"max_concurrency is a number of calls, or None, got {max_concurrency!r}. Nearest "
            "legal: 1."
        )


def _refuse_hidden(name: str, /, *args: Any, **kwargs: Any) -> None:
    raise SchedulerValueError(
        f"method '{name}' is hidden (starts with an '_'): a group calls public methods only"
    )


class WorkerGroupFuncResult:
    """A method call on several ranks of a group: wait for it, take its results and its times."""

    def __init__(
        self, group: WorkerGroup, method: str, ranks: Sequence[int], calls: list[Future[Outcome]]
    ) -> None:
        self._group = group
        self._method = method
        self._ranks = ranks
        self._names = [group._worker_names[rank] for rank in ranks]
        self._calls = calls
        self._results: dict[int, Any] = {}  # by position
        self._raised = False
        self._owner = os.getpid()
        self._failed_calls = require_process().failed_calls
        for name, call in zip(self._names, calls, strict=True):
            take = partial(result_of, worker_name=name, method=method)
            self._failed_calls.watch(current_worker_name(), name, call, take)

    def __del__(self) -> None:
        """Of a call that nobody waits for any more, log what goes wrong."""
        if sys.is_finalizing() or not hasattr(self, "_failed_calls"):
            return
        if os.getpid() != self._owner:  # the copy in a child that was forked
            return
        for position, call in enumerate(self._calls):
            if position not in self._results:
                self._failed_calls.abandon(call)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for all ranks and return their results in order of the ranks.

        Args:
            timeout: Seconds; None: as long as it takes. The call goes on behind it, and may be
                waited for again.

        Raises:
            WorkerCallError: The method raised on a rank; raised as soon as the first one does. It
                is also of the type that the worker raised.
            WorkerDiedError: A worker's process ended.
            WaitTimeout: A worker's process did not start within the deadline, or the call took
                longer than the ``timeout``; then with who waits for whom.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with Tracer.trace_span(self._method, cat="group call"):
            while len(self._results) < len(self._calls):
                self._wait_some(end)
                self._collect()
        return [self._results[position] for position in range(len(self._calls))]

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """Wait on the event loop for all ranks; raises like `wait`."""
        process = require_process()
        end = math.inf if timeout is None else time.monotonic() + timeout
        calls, wait_itself = {asyncio.wrap_future(call) for call in self._calls}, Wait()
        while calls and (left := end - time.monotonic()) > 0:
            look = min(left, process.look_seconds)
            done, calls = await asyncio.wait(calls, timeout=look, return_when=FIRST_COMPLETED)
            self._collect()
            if not done and left > look:
                await process.check_failed_calls(wait_itself)
        return await asyncio.to_thread(self.wait, 0.0) if calls else self.wait()

    def done(self) -> bool:
        """Whether every rank has finished."""
        return all(call.done() for call in self._calls)

    def consume_duration(
        self, reduction_type: Reduction = "max", *, reduction: Reduction | None = None
    ) -> float:
        """Seconds of the call, over the ranks; waits for it.

        Where the method is decorated with ``Worker.timer``, what that recorded; otherwise the time
        of the call itself. ``reduction`` is the same by its other name.
        """
        own = self._own_seconds()
        found: list[float | None] = self._pop("_pop_recorded_time", self._method)
        recorded = [seconds for seconds in found if seconds is not None]
        if len(recorded) < len(found):
            recorded = own
        return _reduce(recorded, reduction or reduction_type)

    def consume_durations(
        self,
        reduction_type: Reduction = "max",
        return_per_rank: bool = False,
        *,
        reduction: Reduction | None = None,
    ) -> dict[str, float] | tuple[dict[str, float], list[dict[str, float]]]:
        """Seconds of every tag that the workers timed; waits for the call and clears the timers.

        ``return_per_rank`` also gives the table of every rank.
        """
        self.wait()
        by = reduction or reduction_type
        tables: list[dict[str, float]] = self._pop("pop_execution_times")
        tags = dict.fromkeys(tag for table in tables for tag in table)
        reduced = {
            tag: _reduce([table[tag] for table in tables if tag in table], by) for tag in tags
        }
        return (reduced, tables) if return_per_rank else reduced

    def _own_seconds(self) -> list[float]:
        self.wait()
        return [call.result().seconds for call in self._calls]

    def _pop(self, method: str, *arguments: Any) -> list[Any]:
        return self._group._call(method, _Selection(tuple(self._ranks)), *arguments).wait()

    def _collect(self) -> None:
        for position, call in enumerate(self._calls):
            if position not in self._results and call.done():
                name = self._names[position]
                self._failed_calls.forget(call)
                try:
                    self._results[position] = result_of(call.result(), name, self._method)
                except BaseException:
                    self._raised = True
                    for each in self._calls:
                        self._failed_calls.note_heard(each)
                    raise

    def _wait_some(self, end: float | None) -> None:
        """Wait for one more rank, until a time of the monotonic clock if one is given; a process
        that does not even start has a deadline."""
        process = require_process()
        missing = [p for p in range(len(self._calls)) if p not in self._results]
        names = [self._names[position] for position in missing]
        calls = [self._calls[position] for position in missing]
        left = math.inf if end is None else max(end - time.monotonic(), 0.0)
        with process.waits.waiting(current_worker_name(), f"{self._method} of {names}"):
            done_within = partial(_one_done, calls)
            if process.wait_watching(done_within, min(process.deadline_seconds, left), names):
                return
            if left < process.deadline_seconds:
                raise WaitTimeout(
                    f"{self._method} of {names} took longer than the timeout of its wait; it goes "
                    f"on.\n{process.who_waits()}"
                )
        for name in names:
            if not process.ask_driver("registry.started", name):
                raise WaitTimeout(
                    f"worker '{name}' did not start within {process.deadline_seconds / 60:g} "
                    "minutes; see the cluster's logs for why its process is missing"
                )


def _one_done(calls: Sequence[Future[Outcome]], seconds: float) -> bool:
    """Wait until one of several calls is done; False if none is by then."""
    if len(calls) > 1:
        if any(call.done() for call in calls):
            return True
        return bool(wait(calls, seconds, return_when=FIRST_COMPLETED).done)
    try:
        calls[0].exception(seconds)
    except TimeoutError:
        return False
    return True


def _reduce(values: Sequence[float], reduction: str) -> float:
    if reduction not in _REDUCTIONS:
        raise SchedulerValueError(
            f"unknown reduction '{reduction}'; known: {', '.join(_REDUCTIONS)}"
        )
    if not values:
        raise SchedulerValueError("a call that ran on no rank took no time")
    return _REDUCTIONS[reduction](values)
