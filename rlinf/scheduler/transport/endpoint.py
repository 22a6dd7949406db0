"""How services and their clients talk: requests, messages without an answer, deferred answers.

Everything above this file is the same on both runtimes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.transport.payload import Payload


@dataclass(frozen=True)
class Reply:
    """Answer to a request: a small picklable value, and objects that are passed on encoded."""

    value: Any = None
    payloads: Sequence[Payload] = ()


class Endpoint:
    """Mailbox of one process; this class knows no other process, so a message is a call."""

    address = "local"

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._handlers: dict[str, Callable[..., Any]] = {}

    def register(self, kind: str, handler: Callable[..., Any]) -> None:
        """Answer messages of one kind by ``handler(*arguments, payloads=…)``.

        It runs under the lock and must not block. It returns a value, a `Reply`, or, where the
        answer has to wait, a `Future` of a `Reply`.
        """
        self._handlers[kind] = handler

    def request(
        self, address: str, kind: str, *arguments: Any, payloads: Sequence[Payload] = ()
    ) -> Future[Reply]:
        """Send a message and get a future of its answer."""
        if address == self.address:
            return self._answer(kind, arguments, payloads)
        return self._request(address, (kind, arguments), payloads)

    def tell(
        self, address: str, kind: str, *arguments: Any, payloads: Sequence[Payload] = ()
    ) -> None:
        """Send a message that has no answer."""
        if address == self.address:
            self._dispatch(kind, arguments, payloads)
        else:
            self._tell(address, (kind, arguments), payloads)

    def shares_memory(self, address: str) -> bool:
        """Whether a peer is on the same node as this process."""
        del address
        return True

    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait for an answer, at most so many seconds."""
        wait_for(future, timeout)

    def forget(self, address: str, error: Exception) -> None:
        """Fail every open request to a peer that is gone, and drop the connection."""

    def close(self) -> None:
        """Stop answering."""

    def _answer(
        self, kind: str, arguments: tuple[Any, ...], payloads: Sequence[Payload]
    ) -> Future[Reply]:
        answer: Future[Reply] = Future()
        try:
            result = self._dispatch(kind, arguments, payloads)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the answer
            answer.set_exception(error)
            return answer
        if isinstance(result, Future):
            return result
        answer.set_result(as_reply(result))
        return answer

    def _dispatch(self, kind: str, arguments: tuple[Any, ...], payloads: Sequence[Payload]) -> Any:
        handler = self._handlers.get(kind)
        if handler is None:
            raise SchedulerError(f"no service answers '{kind}' at {self.address}")
        with self.lock:
            return handler(*arguments, payloads=payloads) if payloads else handler(*arguments)

    def _request(self, address: str, content: Any, payloads: Sequence[Payload]) -> Future[Reply]:
        raise SchedulerError(f"no endpoint '{address}' on the local runtime")

    def _tell(self, address: str, content: Any, payloads: Sequence[Payload]) -> None:
        self._request(address, content, payloads)


def as_reply(result: Any) -> Reply:
    """What a handler returned, or promised, as a reply."""
    return result if isinstance(result, Reply) else Reply(result)


def wait_for(future: Future[Any], timeout: float) -> None:
    """Return when a future is done, or after so many seconds."""
    # A third of the cost of `concurrent.futures.wait`, which is made for many of them.
    with suppress(TimeoutError, CancelledError):
        future.exception(timeout)


def all_done(futures: Sequence[Future[Any]], timeout: float) -> Future[Reply]:
    """Done when all of these, at least one, are, with an error or without, or after a while [s]."""
    result: Future[Reply] = Future()
    lock, missing = threading.Lock(), len(futures)

    def count(_: Future[Any]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            last = not missing
        if last:
            timer.cancel()
            try_resolve(result, Reply())

    timer = threading.Timer(timeout, try_resolve, (result, Reply()))
    timer.daemon = True
    timer.start()
    for future in futures:
        future.add_done_callback(count)
    return result


def try_resolve(future: Future[Any], result: Any) -> bool:
    """Answer a waiting request; False if it was answered or cancelled meanwhile."""
    claimed = claim(future)
    if claimed:
        future.set_result(result)
    return claimed


def try_fail(future: Future[Any], error: BaseException) -> bool:
    """Answer a waiting request with an error; False if it was answered or cancelled meanwhile."""
    claimed = claim(future)
    if claimed:
        future.set_exception(error)
    return claimed


def claim(future: Future[Any]) -> bool:
    """Whether a future still wants an answer."""
    if future.running():
        return True
    return not future.done() and future.set_running_or_notify_cancel()
