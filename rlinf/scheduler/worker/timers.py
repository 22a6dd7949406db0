"""Durations of named parts of a worker's work."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from rlinf.scheduler.errors import SchedulerValueError
from rlinf.scheduler.services.tracer import Tracer


class WorkerTimers:
    """Timers of a worker; durations of a tag add up until they are popped."""

    def __init__(self) -> None:
        self._durations: dict[str, float] = {}
        self._durations_lock = threading.Lock()

    @contextmanager
    def worker_timer(self, tag: str | None = None) -> Iterator[None]:
        """Time a block under a tag; without one, under the name of the calling method."""
        if tag is None:
            # Two frames up: contextlib's __enter__, then the caller.
            frame = inspect.currentframe()
            for _ in range(2):
                frame = frame.f_back if frame is not None else None
            tag = frame.f_code.co_name if frame is not None else "unnamed"
        with Tracer.trace_span(tag, cat="timer"):
            begin = time.perf_counter()
            try:
                yield
            finally:
                self.add_duration(tag, time.perf_counter() - begin)

    def add_duration(self, tag: str, seconds: float) -> None:
        """Add to the duration of a tag."""
        with self._durations_lock:
            self._durations[tag] = self._durations.get(tag, 0.0) + seconds

    def pop_execution_time(self, tag: str) -> float:
        """Seconds of a tag since it was last popped.

        Raises:
            SchedulerValueError: Nothing was timed under that tag.
        """
        with self._durations_lock:
            if tag not in self._durations:
                raise SchedulerValueError(
                    f"no duration was recorded for tag '{tag}'; recorded: "
                    f"{sorted(self._durations)}. Time it with @Worker.timer('{tag}') or "
                    f"worker_timer('{tag}')."
                )
            return self._durations.pop(tag)

    def pop_execution_times(self) -> dict[str, float]:
        """Seconds of every tag since they were last popped."""
        with self._durations_lock:
            durations, self._durations = self._durations, {}
            return durations

    @staticmethod
    def timer(tag: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that times a method, plain or async, under a tag or its own name."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            name = tag or function.__name__
            if inspect.iscoroutinefunction(function):

                @wraps(function)
                async def timed_async(self: WorkerTimers, *args: Any, **kwargs: Any) -> Any:
                    with self.worker_timer(name):
                        return await function(self, *args, **kwargs)

                return timed_async

            @wraps(function)
            def timed(self: WorkerTimers, *args: Any, **kwargs: Any) -> Any:
                with self.worker_timer(name):
                    return function(self, *args, **kwargs)

            return timed

        return decorate
