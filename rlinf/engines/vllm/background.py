"""A thread with an event loop, and what it tells a thread that waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from rlinf.engines.vllm.requests import Growing

T = TypeVar("T")
_LOOK = 1.0  # seconds between two looks at whether what is waited for can still come


class EventLoop:
    """An event loop in a thread of its own.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
        """What the coroutine returns or raises, computed in the loop.

        Args:
            coroutine: What to do.
            check: Raises where its end need no longer be waited for.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not wait([future], timeout=_LOOK).done:
            try:
                check()
            except BaseException:
                future.cancel()
                raise
        return future.result()

    def close(self) -> None:
        """Cancel what still runs in the loop, and end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class News:
    """What happened in the background since it was last asked for."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._grown = False
        self._ended: list[Growing] = []

    def note(self, growing: Growing, *, ended: bool) -> None:
        """A sequence has got tokens, or ended."""
        with self._condition:
            self._grown = True
            if ended:
                self._ended.append(growing)
            self._condition.notify()

    def wake(self) -> None:
        """Let whoever waits look at whether something went wrong."""
        with self._condition:
            self._condition.notify()

    def wait(self, check: Callable[[], None]) -> list[Growing]:
        """The sequences that ended; waits until at least one has got a token or ended.

        Args:
            check: Raises where nothing need be waited for any more.
        """
        with self._condition:
            while not self._grown:
                check()
                self._condition.wait(_LOOK)
            self._grown = False
            ended, self._ended = self._ended, []
        return ended

    def forget(self, growing: list[Growing]) -> None:
        """Tell nobody of these any more."""
        with self._condition:
            self._ended = [item for item in self._ended if item not in growing]
            self._grown = bool(self._ended)
