"""Calls that failed while their caller waits for something else, which may never come then."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from rlinf.errors import RLinfError, UserError
from rlinf.scheduler.errors import WorkerCallError, WorkerDiedError
from rlinf.scheduler.services.diagnosis import Row, render

if TYPE_CHECKING:
    from rlinf.scheduler.runtime.execution import Outcome
    from rlinf.scheduler.transport.payload import Payload

log = logging.getLogger(__name__)
_MOST_ABANDONED = 100
"""Failures that are kept although nobody will take them: a wait may be in vain for one."""


@dataclass(eq=False)
class Wait:
    """One wait, and when it began."""

    began: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Call:
    """A call of a worker's method; ``take`` raises what it failed with."""

    caller: str
    worker: str
    future: Future[Outcome]
    take: Callable[[Outcome], object]
    told: bool = False
    seen_at: float | None = None
    """When a wait first saw its failure; a wait that began later is not in vain for it."""
    stood_in: Wait | None = None
    """The wait at whose last look nothing went on any more."""
    heard: bool = False
    """Whether who waited for all ranks of a group has heard of the failure of another one."""

    @property
    def failed(self) -> bool:
        if not self.future.done():
            return False
        return self.future.exception() is not None or self.future.result().failed

    def reraise(self) -> NoReturn:
        self.take(self.future.result())
        raise AssertionError(f"a failed call of {self.worker} did not raise")


class FailedCalls:
    """The calls of this process of which nobody took the result yet.

    They are looked at, not called back: a call with a callback is answered later. ``discard`` is
    given the result of one that nobody will take.
    """

    def __init__(self, discard: Callable[[Payload], object] = lambda payload: None) -> None:
        self._discard = discard
        self._calls: dict[Future[Any], _Call] = {}
        self._abandoned: deque[Future[Any]] = deque()
        self._lock = threading.RLock()  # `abandon` may come of a collection of garbage in between

    def watch(
        self, caller: str, worker: str, future: Future[Outcome], take: Callable[[Outcome], object]
    ) -> None:
        """Follow a call; ``take`` raises what it failed with."""
        with self._lock:
            self._calls[future] = _Call(caller, worker, future, take)

    def forget(self, future: Future[Any]) -> None:
        """Somebody takes the result of a call."""
        with self._lock:
            self._calls.pop(future, None)

    def note_heard(self, future: Future[Any]) -> None:
        """Who waits for a call has heard that another rank failed: this one ends no later wait."""
        with self._lock:
            if future in self._calls:
                self._calls[future].heard = True

    def forget_workers(self, workers: set[str]) -> None:
        """A group is closed, and with it its calls are done with; a failure is logged. What others
        returned is there as long as somebody may take it."""
        for call in self._all():
            if call.worker in workers:
                _tell(call)
                if not call.future.done() or call.failed:
                    self.forget(call.future)

    def tell_unheard(self) -> None:
        """Log what failed and nobody has heard of, before the cluster ends."""
        for call in self._all():
            if not call.heard:
                _tell(call, deaths=True)

    def abandon(self, future: Future[Any]) -> None:
        """Nobody will take the result of a call: log what goes wrong with it."""
        call = self._calls.get(future)
        if call is None:
            return

        def ended(_: object) -> None:
            if call.failed:
                # In a thread of its own: whoever let go of the call may hold a lock.
                threading.Thread(target=self._keep_abandoned, args=(call,), daemon=True).start()
            else:
                self.forget(future)
                self._discard(future.result().payload)

        future.add_done_callback(ended)

    def _keep_abandoned(self, call: _Call) -> None:
        """Log a failure that nobody will take; keep it, of the newest, while it is unheard of."""
        _tell(call)
        if call.heard:
            self.forget(call.future)
            return
        _clear_frames(call)
        with self._lock:
            self._abandoned.append(call.future)
            if len(self._abandoned) > _MOST_ABANDONED:
                self.forget(self._abandoned.popleft())

    def _all(self) -> list[_Call]:
        with self._lock:
            return list(self._calls.values())

    def check(
        self, caller: str, wait: Wait, rows: Callable[[], list[Row]], still_seconds: float
    ) -> None:
        """Raise a failed call of a caller that waits, if the wait cannot end.

        That is so when no worker computes: all wait, or have nothing to do. Two looks in a row must
        find it so, as what is waited for may be on its way at one. The first time that a failure
        is seen it is only logged; one behind which a wait has ended is in nobody's way.

        Args:
            caller: Who waits.
            wait: The same object at every look of one wait.
            rows: Asks every worker what it does.
            still_seconds: For so long a worker has waited or been idle that does not compute; one
                that is between two messages has for less.
        """
        own = [call for call in self._all() if call.caller == caller]
        failed = [call for call in own if call.failed]
        # Before the workers are asked: one whose call ends in between has not stood still.
        called = {call.worker for call in own if not call.future.done()}
        for call in failed:
            call.seen_at = call.seen_at or time.monotonic()
            _tell(call)
            if call.heard:
                self.forget(call.future)
        known = [c for c in failed if c.seen_at and c.seen_at >= wait.began and not c.heard]
        if not known:
            return
        first, doing = known[0], rows()
        stood = first.stood_in is wait
        first.stood_in = wait if _stands_still(doing, called, still_seconds) else None
        if not stood or first.stood_in is None:
            return
        self.forget(first.future)
        try:
            first.reraise()
        except Exception as error:
            error.add_note(f"Since then {caller} waits in vain. {render(doing)}")
            raise


def _tell(call: _Call, *, deaths: bool = False) -> None:
    """Log once what a method raised; that its worker ended, which those who need it hear, only with
    ``deaths``."""
    if call.failed and not call.told and (deaths or call.future.exception() is None):
        try:
            call.reraise()
        except WorkerCallError as error:
            original = getattr(error, "original", None)
            # Of a mistake of the user no stack is told, whoever else has found it, too.
            said = f"{call.worker}: {original}" if isinstance(original, UserError) else error
            # Of a call to several ranks the first failure is raised.
            what = "another rank" if call.heard else "a call that nobody waits for"
            log.error("%s failed: %s", what, said)
        except WorkerDiedError as error:
            log.error("a call that nobody waits for failed: %s", error)
        except RLinfError:  # the cluster was shut down
            return
    call.told = True


def _clear_frames(call: _Call) -> None:
    """Let go of what a method computed with, which the stack of its exception holds where that is
    passed on as it is."""
    try:
        call.reraise()
    except Exception as error:  # noqa: BLE001 - whatever it failed with
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__


def _stands_still(rows: list[Row], called: set[str], seconds: float) -> bool:
    waiting = {row.worker for row in rows if row.waits}
    return called <= waiting and all(
        (row.waits or row.idle) and row.seconds >= seconds for row in rows
    )
