"""A trace of what ran where and when, in the format that Perfetto and chrome://tracing read.

Each worker records into its own :class:`Timeline`; what it drains are plain dicts that travel with
its results. The driver writes the dicts of all workers to one :class:`TimelineFile`. All times are
nanoseconds of the system clock, which the processes of a machine share.

Format: "Trace Event Format", complete events (``ph: X``) and metadata events (``ph: M``).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO, TypedDict

logger = logging.getLogger(__name__)


class Event(TypedDict):
    """One span of a run or of a simulation; times are nanoseconds of the system clock."""

    name: str
    cat: str
    begin_ns: int
    end_ns: int
    process: str
    thread: str
    args: dict[str, Any]


_OFF: AbstractContextManager[None] = nullcontext()


class Timeline:
    """Records spans of this process; may be shared by threads.

    Args:
        enabled: False makes every call return at once.
        process: Its name in the trace; by default host and process id.
        thread: Name of the track; by default that of the thread that records.
    """

    def __init__(
        self, *, enabled: bool = True, process: str | None = None, thread: str | None = None
    ) -> None:
        self.enabled = enabled
        self._process = process or f"{socket.gethostname()} {os.getpid()}"
        self._thread = thread
        self._events: deque[Event] = deque()

    def span(
        self, name: str, *, category: str = "stage", **arguments: Any
    ) -> AbstractContextManager[None]:
        """Record the time between entering and leaving a ``with`` block, with JSON arguments.

        Categories are ``stage``, ``lease``, ``transfer``, ``residency``, …
        """
        return self._timed(name, category, arguments) if self.enabled else _OFF

    @contextmanager
    def _timed(self, name: str, category: str, arguments: dict[str, Any]) -> Iterator[None]:
        begin = time.time_ns()
        try:
            yield
        except BaseException as error:
            arguments["failed"] = type(error).__name__
            raise
        finally:
            self.record(name, begin, time.time_ns(), category=category, **arguments)

    def record(
        self, name: str, begin_ns: int, end_ns: int, *, category: str = "stage", **arguments: Any
    ) -> None:
        """Record a span that has ended; times are those of ``time.time_ns``."""
        if self.enabled:
            # Appending to this very deque is atomic, so that threads need no lock.
            self._events.append(
                {
                    "name": name,
                    "cat": category,
                    "begin_ns": begin_ns,
                    "end_ns": max(begin_ns, end_ns),
                    "process": self._process,
                    "thread": self._thread or threading.current_thread().name,
                    "args": arguments,
                }
            )

    def drain(self) -> list[Event]:
        """Return the events so far, as plain dicts, and forget them."""
        return [self._events.popleft() for _ in range(len(self._events))]


class TimelineFile:
    """Writes events of any number of processes to one trace.

    The file is a JSON array without its end, which the format allows: it opens in Perfetto while
    the run goes on, and after the run was killed. Where it can no longer be written, it ends with
    a warning. A context manager that closes it.

    Args:
        path: The file. An existing one is continued.
        enabled: False writes nothing and makes no file.
    """

    def __init__(self, path: Path | str, *, enabled: bool = True) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._file: TextIO | None = None
        if enabled:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - lives as the run
            self._first_process = _make_ready(self.path, self._file)

    def write(self, events: Iterable[Event]) -> None:
        """Append what :meth:`Timeline.drain` returned, in any process."""
        if self._file is None:
            return
        with self._lock:
            lines = [line for event in events for line in self._lines(event)]
            try:
                self._file.write("".join(json.dumps(line) + ",\n" for line in lines))
                self._file.flush()
            except OSError as error:
                logger.warning("%s is not continued: %s.", self.path, error.strerror)
                self.close()

    def close(self) -> None:
        """Close the file, without another try to write what could not be written."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def __enter__(self) -> TimelineFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lines(self, event: Event) -> Iterable[dict[str, Any]]:
        """The event with numbers for its process and thread, after the names of new ones."""
        process, thread = event["process"], event["thread"]
        if process not in self._processes:
            self._processes[process] = self._first_process + len(self._processes)
            yield _named("process_name", self._processes[process], 0, process)
        pid = self._processes[process]
        if (process, thread) not in self._threads:
            self._threads[process, thread] = 1 + len(self._threads)
            yield _named("thread_name", pid, self._threads[process, thread], thread)
        yield {
            "ph": "X",
            "name": event["name"],
            "cat": event["cat"],
            "pid": pid,
            "tid": self._threads[process, thread],
            # The format counts in microseconds; fractions of them are allowed.
            "ts": event["begin_ns"] / 1000,
            "dur": (event["end_ns"] - event["begin_ns"]) / 1000,
            "args": event["args"],
        }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _make_ready(path: Path, file: TextIO) -> int:
    """Let the file end where a line may follow; return the first process number that is free.

    A long run leaves millions of lines: only those are looked at that name a process.
    """
    used = end = 0
    with open(path, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):  # a killed process left half of it
                break
            end += len(line)
            if b'"process_name"' in line:
                with suppress(ValueError):  # damaged
                    used = max(used, json.loads(line.rstrip(b",\n"))["pid"])
    file.truncate(end)
    if not end:
        file.write("[\n")
        file.flush()
    return 1 + used


def read_events(path: Path | str) -> list[Event]:
    """The events that were written to a trace, as :meth:`Timeline.drain` gave them."""
    names: dict[tuple[str, int, int], str] = {}
    found: list[Event] = []
    for line in read_timeline(path):
        pid, tid = line["pid"], line["tid"]
        if line["ph"] == "M":
            names[line["name"], pid, tid] = line["args"]["name"]
        elif line["ph"] == "X":
            found.append(
                {
                    "name": line["name"],
                    "cat": line["cat"],
                    "begin_ns": round(line["ts"] * 1000),
                    "end_ns": round((line["ts"] + line["dur"]) * 1000),
                    "process": names.get(("process_name", pid, 0), ""),
                    "thread": names.get(("thread_name", pid, tid), "?"),
                    "args": line["args"],
                }
            )
    return found


def read_timeline(path: Path | str) -> Iterator[dict[str, Any]]:
    """The lines of a trace file, one by one, also of one that was not closed or was cut off."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        next(lines, None)  # the beginning of the array
        for line in lines:
            if line.endswith("\n"):
                with suppress(ValueError):  # damaged
                    yield json.loads(line.rstrip(",\n"))
