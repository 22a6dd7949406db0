"""A method call on several workers of a group: wait for it, take its results and its times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rlinf.scheduler.errors import SchedulerValueError, WaitTimeout
from rlinf.scheduler.process import current_worker_name, require_process
from rlinf.scheduler.runtime.execution import Outcome, result_of
from rlinf.scheduler.services.tracer import Tracer

if TYPE_CHECKING:
    from rlinf.scheduler.runtime.base import PendingCall, Runtime
    from rlinf.scheduler.worker_group import WorkerGroup

Reduction = Literal["max", "min", "mean"]

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}


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
