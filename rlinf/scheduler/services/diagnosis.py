"""Who waits for what: the wait-for list that a deadline's error message holds."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rlinf.scheduler.errors import WorkerDiedError
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, all_done, try_fail, try_resolve

_STACK_LINES = 3
_WAITS, _IDLE, _SILENT = "waiting for", "idle", "not answering"
_ANSWER_SECONDS = 2.0
_OWN_FILES = ("/rlinf/scheduler/", "/threading.py", "/concurrent/futures/", "/asyncio/")


@dataclass(frozen=True)
class Row:
    """One line of the wait-for list: who, what it waits for or which method it runs, since when.

    ``stack`` are the innermost lines of user code.
    """

    worker: str
    doing: str
    seconds: float = 0.0
    stack: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it waits for another."""
        return self.doing.startswith(_WAITS)

    @property
    def idle(self) -> bool:
        """Whether no call of it runs on a thread; one of an async method may."""
        return self.doing == _IDLE

    @property
    def silent(self) -> bool:
        """Whether its process did not answer."""
        return self.doing == _SILENT


@dataclass
class _Doing:
    worker: str
    what: str
    future: Future[Any] | None = None
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)


class WaitTable:
    """What the workers of this process do at the moment."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._running: dict[tuple[str, int], _Doing] = {}
        self._waiting: dict[int, _Doing] = {}
        self._numbers = itertools.count()
        self._idle: dict[str, float] = {}
        self._lock = threading.Lock()
        endpoint.register("diagnosis.rows", self.rows)

    def add_worker(self, worker: str) -> None:
        """List a worker from now on, idle at first."""
        self._idle[worker] = time.monotonic()

    def remove_worker(self, worker: str, error: Exception) -> None:
        """Forget a worker and fail whatever it waits for."""
        self._idle.pop(worker, None)
        with self._lock:
            waits = [doing for doing in self._waiting.values() if doing.worker == worker]
        for doing in waits:
            if doing.future is not None:
                try_fail(doing.future, error)

    @contextmanager
    def running(self, worker: str, method: str) -> Iterator[None]:
        """Note that a worker runs a method on this thread."""
        doing = _Doing(worker, f"running {method}")
        key = (worker, doing.thread)
        before = self._running.get(key)
        self._running[key] = doing
        try:
            yield
        finally:
            if before is not None:
                self._running[key] = before
            else:
                del self._running[key]
                if worker in self._idle:
                    self._idle[worker] = time.monotonic()

    @contextmanager
    def waiting(self, worker: str, what: str, future: Future[Any] | None = None) -> Iterator[None]:
        """Note that a worker waits on this thread."""
        key = next(self._numbers)
        with self._lock:
            self._waiting[key] = _Doing(worker, f"{_WAITS} {what}", future)
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[key]

    def rows(self) -> list[Row]:
        """One row per worker and thread of this process."""
        now = time.monotonic()
        frames = _frames()
        with self._lock:
            doing = list(self._waiting.values())
        waiting = {(item.worker, item.thread) for item in doing}
        doing += [item for key, item in self._running.copy().items() if key not in waiting]
        rows = [
            Row(item.worker, item.what, now - item.since, _stack(frames.get(item.thread)))
            for item in doing
        ]
        idle = self._idle.keys() - {row.worker for row in rows}
        return rows + [Row(worker, _IDLE, now - self._idle[worker]) for worker in sorted(idle)]


def _frames() -> dict[int, FrameType]:
    """What every thread is at. Python holds a lock for it without which no thread begins or ends:
    a collection of garbage meanwhile, whose finalizers let other threads run, stops all of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def ask_everyone(endpoint: Endpoint, endpoints: dict[str, list[str]]) -> Future[Reply]:
    """Rows of all workers, by endpoint; who does not answer soon is listed as silent."""
    answers: dict[str, Future[Reply]] = {}
    for address in endpoints:
        with suppress(WorkerDiedError):
            answers[address] = endpoint.request(address, "diagnosis.rows")
    result: Future[Reply] = Future()
    all_done(list(answers.values()), _ANSWER_SECONDS).add_done_callback(
        lambda _: try_resolve(result, Reply(_told(endpoints, answers)))
    )
    return result


def _told(endpoints: dict[str, list[str]], answers: dict[str, Future[Reply]]) -> list[Row]:
    """What was answered, and a row for each worker of which nothing is known."""
    rows: list[Row] = []
    for address, workers in endpoints.items():
        answer = answers.get(address)
        if answer and answer.done() and not answer.cancelled() and answer.exception() is None:
            rows += answer.result().value
        else:
            rows += [Row(name, _SILENT) for name in workers]
    return rows


def render(rows: list[Row]) -> str:
    """The wait-for list as text."""
    lines = ["Who waits for whom:"]
    for row in sorted(rows, key=lambda row: row.worker):
        since = f" for {row.seconds:.1f} s" if row.seconds else ""
        lines.append(f"  {row.worker}: {row.doing}{since}")
        lines.extend(f"      {line}" for line in row.stack)
    return "\n".join(lines)


def _stack(frame: Any) -> tuple[str, ...]:
    summary = traceback.extract_stack(frame) if frame else ()
    outside = [s for s in summary if not any(part in s.filename for part in _OWN_FILES)]
    return tuple(
        f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line}"
        for entry in outside[-_STACK_LINES:]
    )
