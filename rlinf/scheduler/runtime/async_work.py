"""Handles of operations that go on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from rlinf.scheduler.errors import WaitTimeout
from rlinf.scheduler.process import Process, require_process

_Finish = Callable[[Any], Any]


class AsyncWork:
    """An operation that was started with ``async_op=True``.

    Args:
        future: Done when the operation is.
        what: What a waiter waits for, in words.
        finish: Turns what the future holds into the result, on the thread that waits.
        abandon: Called when a deadline passes, so that what comes later is not lost to a handle
            that nobody waits for.
    """

    def __init__(
        self,
        future: Future[Any],
        what: str,
        finish: _Finish | None = None,
        abandon: Callable[[], object] | None = None,
    ) -> None:
        self._future = future
        self._abandon = abandon
        self._what = what
        self._finish = finish
        self._lock = threading.Lock()
        self._finished = False
        self._result: Any = None

    def wait(self) -> Any:
        """Block until done and return the result; again returns the same result."""
        try:
            raw = self._process().wait(self._future, self._what)
        except WaitTimeout:
            self._give_up()
            raise
        return self._take(raw)

    async def async_wait(self) -> Any:
        """Wait on the event loop until done and return the result."""
        try:
            raw = await self._process().wait_async(self._future, self._what)
        except WaitTimeout:
            self._give_up()
            raise
        return self._take(raw)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def done_within(self, seconds: float) -> bool:
        """Whether `wait` would return at once, by the end of a time that this waits for."""
        if seconds <= 0 or self._future.done():
            return self._future.done()
        return bool(wait_for([self._future], timeout=seconds).done)

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork:
        """Call ``func(*args, **kwargs)`` after this operation; its result is the new handle's."""
        chained: Future[Any] = Future()

        def run() -> None:
            try:
                self.wait()
                chained.set_result(func(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised where the handle is waited for
                chained.set_exception(error)

        self._future.add_done_callback(lambda _: _chains().submit(run))
        return AsyncWork(chained, f"{self._what}, then {getattr(func, '__name__', func)}")

    def _give_up(self) -> None:
        if self._abandon is not None and not self._future.done():
            self._abandon()

    def _take(self, raw: Any) -> Any:
        with self._lock:
            if not self._finished:
                self._result = raw if self._finish is None else self._finish(raw)
                self._finished = True
            return self._result

    @staticmethod
    def _process() -> Process:
        return require_process()


def finished_work(result: Any, what: str) -> AsyncWork:
    """A handle of something that is done already."""
    future: Future[Any] = Future()
    future.set_result(result)
    return AsyncWork(future, what)


class _Chains:
    pool: ThreadPoolExecutor | None = None


def _chains() -> ThreadPoolExecutor:
    """One thread runs chained functions, so that they keep their order."""
    if _Chains.pool is None:
        _Chains.pool = ThreadPoolExecutor(1, thread_name_prefix="rlinf-then")
    return _Chains.pool
