"""Timeline of workers in the Chrome trace format, which Perfetto and chrome://tracing load.

Each process keeps its events; the driver writes them when they have piled up, and at the end.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.process import current_process, current_worker_name, is_outside

_log = logging.getLogger("rlinf")
_FLUSH_EVENTS = 512

Event = dict[str, Any]


def within(
    context: Callable[[tuple[Any, ...]], AbstractContextManager[None]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function, plain or async, each call of which runs in a context made of its arguments."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with context(args):
                return await function(*args, **kwargs)

        return run_async

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context(args):
            return function(*args, **kwargs)

    return run


class Tracer:
    """Writes events to a file, one JSON object per line; without one, calls return at once.

    Raises:
        SchedulerUsageError: The file cannot be made. One that can be no longer written, as on a
            full disk, ends with a warning: the trace is no reason to stop what it is of.
    """

    _sink: Callable[[list[Event]], None] | None = None
    _events: list[Event]
    _named: set[tuple[str, int]]
    _lock = threading.Lock()

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise SchedulerUsageError(
                f"the trace {self._path} cannot be written: {error.strerror}. Name another file in "
                "cluster.tracer.output_file"
            ) from error
        self._file_lock = threading.Lock()

    def record(self, event: Event) -> None:
        """Append one event."""
        self.record_all([event])

    def record_all(self, events: list[Event]) -> None:
        """Append events and write them out; ignored after `finalize`."""
        with self._file_lock:
            if not self._file.closed:
                # What JSON does not know is written as text: a span is no place to fail.
                lines = [json.dumps(event, default=str, skipkeys=True) for event in events]
                with self._ending_where_it_is_full():
                    self._file.writelines(line + "\n" for line in lines)
                    self._file.flush()

    def finalize(self) -> str:
        """Close the file, and write the events once more beside it as one JSON document.

        Viewers load that one; the file of lines survives a run that was killed. Returns the path
        of the file of lines.
        """
        with self._file_lock:
            if self._file.closed:
                return str(self._path)
            self._file.close()
            lines = self._path.read_text(encoding="utf-8").splitlines()
            document = '{"traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"
            with self._ending_where_it_is_full():
                self._path.with_suffix(".json").write_text(document, encoding="utf-8")
        return str(self._path)

    @contextmanager
    def _ending_where_it_is_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _log.warning("the trace %s is not continued: %s", self._path, error.strerror)
            with suppress(OSError):
                self._file.close()

    @classmethod
    def enable(cls, sink: Callable[[list[Event]], None]) -> None:
        """Record in this process and hand batches of events to ``sink``."""
        cls._events, cls._named, cls._sink = [], set(), sink

    @classmethod
    def disable(cls) -> None:
        """Hand over what was recorded and record no more."""
        cls.flush()
        cls._sink = None

    @classmethod
    def flush(cls) -> None:
        """Hand over what was recorded so far."""
        if cls._sink is None:
            return
        with cls._lock:
            events, cls._events = cls._events, []
        if events:
            cls._sink(events)

    @classmethod
    def trace_begin(cls, name: str, cat: str = "", args: dict[str, Any] | None = None) -> None:
        """Record that a span begins on this thread."""
        cls._add("B", name, cat, args)

    @classmethod
    def trace_end(cls, name: str, cat: str = "") -> None:
        """Record that the span which began last on this thread ends."""
        cls._add("E", name, cat, None)

    @classmethod
    @contextmanager
    def trace_span(
        cls, name: str, cat: str = "", args: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """Record a block as a span."""
        if cls._sink is None:
            yield
            return
        cls.trace_begin(name, cat, args)
        try:
            yield
        finally:
            cls.trace_end(name, cat)

    @classmethod
    def trace_func(cls, func_or_cat: Callable[..., Any] | str = "", cat: str = "") -> Any:
        """Decorator that records every call of a function, plain or async, as a span.

        Used as ``@trace_func``, ``@trace_func("category")`` or ``@trace_func(cat="category")``.
        """
        category = func_or_cat if isinstance(func_or_cat, str) and func_or_cat else cat

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return within(lambda _: cls.trace_span(function.__name__, category), function)

        return decorate(func_or_cat) if callable(func_or_cat) else decorate

    @classmethod
    def _add(cls, phase: str, name: str, cat: str, args: dict[str, Any] | None) -> None:
        if cls._sink is None:
            return
        owner = current_worker_name()
        place = {"pid": os.getpid(), "tid": threading.get_native_id()}
        event: Event = {"ph": phase, "name": name, "ts": time.time_ns() / 1000, **place}
        event["cat"] = cat or owner.partition(":")[0]
        if args:
            event["args"] = args
        with cls._lock:
            cls._events += [*cls._names(place, owner), event]
            full = len(cls._events) >= _FLUSH_EVENTS
        if full:
            cls.flush()

    @classmethod
    def _names(cls, place: dict[str, int], owner: str) -> Iterator[Event]:
        """What names the process and the thread of an event where none has before it."""
        process = current_process()
        # A process of `ray` runs one worker, that of `local` all of them as threads.
        several = process is not None and process.runtime == "local"
        names = {"process_name": "rlinf" if several else owner, "thread_name": owner}
        for kind, key in (("process_name", "pid"), ("thread_name", "tid")):
            if (kind, place[key]) not in cls._named:
                cls._named.add((kind, place[key]))
                yield {"ph": "M", "name": kind, "ts": 0, **place, "args": {"name": names[kind]}}


def _record_nothing() -> None:
    """In a forked child, which hands nothing over by the endpoint of its parent."""
    if is_outside():
        Tracer._sink, Tracer._lock = None, threading.Lock()


os.register_at_fork(after_in_child=_record_nothing)
