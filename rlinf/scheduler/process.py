"""What this process is in a cluster: its endpoint, its workers, and how it waits."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from rlinf.errors import RLinfError
from rlinf.scheduler.accelerators import AcceleratorType, process_device
from rlinf.scheduler.errors import (
    SchedulerError,
    SchedulerUsageError,
    WaitTimeout,
    WithdrawnError,
    WorkerDiedError,
)
from rlinf.scheduler.services.channels import ChannelService
from rlinf.scheduler.services.diagnosis import Row, WaitTable, render
from rlinf.scheduler.services.failed_calls import FailedCalls, Wait
from rlinf.scheduler.services.mailbox import MailboxService
from rlinf.scheduler.services.network import Network
from rlinf.scheduler.services.silent_workers import SilentWorkers
from rlinf.scheduler.transport.blocks import hand_over, process_number
from rlinf.scheduler.transport.copies import private_copy
from rlinf.scheduler.transport.endpoint import Endpoint, wait_for
from rlinf.scheduler.transport.payload import Codec, Payload
from rlinf.scheduler.transport.sockets import process_at

if TYPE_CHECKING:
    from rlinf.scheduler.transport.accelerator import PairTransfer
    from rlinf.scheduler.worker import Worker

ENDED = "_rlinf_ended"
"""Attribute of a worker that was closed while a thread of it computed."""

_REPORT_SECONDS = 10.0
_MOST_DEFERRED = 64
_TAKE_BACK_SECONDS = 5.0
"""For so long it is waited at most for what a withdrawal comes too late for, to give it back."""


@dataclass(eq=False, kw_only=True)
class Process:
    """The services that every process of a cluster has, and the blocking calls."""

    runtime: Literal["local", "ray"]
    endpoint: Endpoint  # mailbox of this process
    codec: Codec | None
    """Encodes what leaves this process; None on the local runtime, which nothing leaves."""
    driver: str  # endpoint address of the driver
    node_rank: int  # of this process
    deadline_seconds: float  # how long a wait may take
    look_seconds: float = 5.0
    """After which a waiter looks at whether what it waits for can still come."""

    def __post_init__(self) -> None:
        self.mailbox = MailboxService(self.endpoint)
        self.waits = WaitTable(self.endpoint)
        self.failed_calls = FailedCalls(self.discard)
        self.silent_workers = SilentWorkers()
        self.network: Network | None = None  # one that is imagined, with slow links
        self.channels = ChannelService(self.endpoint, self.mailbox.check_alive)
        self.mailbox.on_death = self.channels.remove_getters
        self.mailbox.discard = self.channels.discard = self.discard
        self.channels.hand_over = self._hand_over
        self._deferred: deque[Future[Any]] = deque()
        self._deferred_host: str | None = None
        self._deferred_lock = threading.Lock()

    def encode(
        self,
        value: Any,
        receivers: Sequence[str] | int = 1,
        *,
        reader_node: int | None = None,
        inline: bool = False,
        shared: bool = False,
        pair: PairTransfer | None = None,
    ) -> Payload:
        """Make a value ready to travel, as `Codec.encode` does; on the local runtime, copy it as
        `private_copy` does, unless it is ``shared``: nobody changes it from now on.

        ``receivers`` are the endpoints of those who decode it, or, where these are not known yet,
        their number.
        Shared memory never leaves its node: ``reader_node`` is that of those who read the frames as
        they are. An endpoint that carries them re-encodes for a peer elsewhere, so it is None; that
        is for one, and what several elsewhere read is ``inline`` from the beginning.
        """
        if self.codec is None:
            return Payload(reference=value if shared else private_copy(value))
        inline = inline or reader_node not in (None, self.node_rank)
        owners: Sequence[int] = ()
        if not isinstance(receivers, int):
            owners = [process_number(*process_at(address)) for address in receivers]
            receivers = len(owners)
        return self.codec.encode(
            value, receivers=receivers, owners=owners, inline=inline, pair=pair
        )

    def decode(self, payload: Payload, receiver: int = 0, receivers: int = 1) -> Any:
        """The value that travelled."""
        if self.codec is None:
            return payload.reference if receivers == 1 else private_copy(payload.reference)
        return self.codec.decode(payload, receiver=receiver, receivers=receivers)

    def discard(self, payload: Payload, receiver: int = 0, receivers: int = 1) -> None:
        """Give back the shared memory of what arrived, and its receiver will not look at."""
        if self.codec is not None and payload.blocks:
            with suppress(Exception):  # its sender, and with it the memory, may be gone
                self.codec.decode(payload, receiver=receiver, receivers=receivers)

    @property
    def number(self) -> int:
        """The number of this process in the headers of blocks."""
        return process_number(self.node_rank, os.getpid())

    def _hand_over(self, payload: Payload, number: int | None) -> None:
        """Shared memory of what waits here is for the process of a number from now on, or for this
        one: it is given back where that one ends before it has looked."""
        for block in payload.blocks:
            hand_over(block, self.number if number is None else number)

    def ask_driver(self, kind: str, *arguments: Any, what: str | None = None) -> Any:
        """Request something small from the driver and wait for it."""
        future = self.endpoint.request(self.driver, kind, *arguments)
        return self.wait(future, what or f"the driver's answer to {kind}").value

    def wait(self, future: Future[Any], what: str) -> Any:
        """Block until a future is done; after the deadline WaitTimeout tells who waits for whom."""
        if future.done():
            return future.result()
        if _thread.chain is not None:
            _thread.chain.step_aside()
        with self.waits.waiting(current_worker_name(), what, future):
            # An interrupt of the driver must not hit the handling of somebody's message.
            wait_here = wait_for if current_worker() is None else self.endpoint.wait

            def done_within(seconds: float) -> bool:
                wait_here(future, seconds)
                return future.done()

            if self.wait_watching(done_within, self.deadline_seconds):
                return future.result()
            raise self._timed_out(what, self._report())

    def wait_watching(
        self, done_within: Callable[[float], bool], seconds: float, workers: Sequence[str] = ()
    ) -> bool:
        """Wait for so many seconds at most, perhaps for some workers; raise a call that failed if
        the wait is in vain, and WaitTimeout where a worker does not answer for the deadline."""
        end, wait = time.monotonic() + seconds, Wait()
        while not done_within(min(seconds, self.look_seconds)):
            seconds = end - time.monotonic()
            if seconds <= 0:
                return False
            self._check_failed_calls(current_worker_name(), wait)
            if workers and self.runtime != "local":
                self.silent_workers.check(workers, self._report, self.deadline_seconds)
        return True

    async def wait_async(self, future: Future[Any], what: str) -> Any:
        """Wait on the event loop until a future is done; raises like `wait`."""
        if future.done():
            return future.result()
        with self.waits.waiting(current_worker_name(), what, future):
            waiting = asyncio.wrap_future(future)
            end, wait = time.monotonic() + self.deadline_seconds, Wait()
            while (seconds := end - time.monotonic()) > 0:
                done, _ = await asyncio.wait([waiting], timeout=min(seconds, self.look_seconds))
                if done:
                    return waiting.result()
                await self.check_failed_calls(wait)
            raise self._timed_out(what, await asyncio.to_thread(self._report))

    async def check_failed_calls(self, wait: Wait) -> None:
        """On the event loop: raise a call that failed if what is waited for cannot come then; the
        same object at every look of one wait."""
        name = current_worker_name()
        await asyncio.to_thread(self._check_failed_calls, name, wait)

    def _check_failed_calls(self, caller: str, wait: Wait) -> None:
        self.failed_calls.check(caller, wait, self._report, self.look_seconds)

    def defer_put(self, host: str, put: Future[Any]) -> None:
        """Let a channel's host answer a put later; raises for an earlier one that failed."""
        due = []
        with self._deferred_lock:
            self._deferred_host = host
            waiting = self._deferred
            waiting.append(put)
            while waiting and (waiting[0].done() or len(waiting) > _MOST_DEFERRED):
                due.append(waiting.popleft())
        for earlier in due:
            self.wait(earlier, "a channel to take an item")

    def settle_puts(self, host: str | None = None) -> None:
        """Wait for the answers of deferred puts, before sending to another than their host."""
        if not self._deferred or host == self._deferred_host:
            return
        with self._deferred_lock:
            due, self._deferred = self._deferred, deque()
        for put in due:
            self.wait(put, "a channel to take an item")

    def who_waits(self) -> str:
        """Who waits for whom, since when, and the innermost lines of the stacks."""
        return render(self._report())

    def _report(self) -> list[Row]:
        try:
            asked = self.endpoint.request(self.driver, "diagnosis.report")
            rows: list[Row] = asked.result(_REPORT_SECONDS).value
        except (FutureTimeoutError, SchedulerError):
            return self.waits.rows()
        return rows

    def _timed_out(self, what: str, rows: list[Row]) -> WaitTimeout:
        minutes = self.deadline_seconds / 60
        return WaitTimeout(
            f"{current_worker_name()} waited longer than {minutes:g} minutes for {what}. If that "
            "is expected, raise cluster.timeout_minutes, or RLINF_TIMEOUT where the recipe sets "
            f"none.\n{render(rows)}"
        )


class _Abandoned:
    """Operations whose handle is gone, to be taken back.

    Not where it goes: that may be anywhere, under any lock. A thread does it, or whoever here is
    the first to use a channel again, whose item would be lost.
    """

    def __init__(self) -> None:
        self._operations: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()

    def add(self, take_back: Callable[[], object]) -> None:
        """Take an operation back soon."""
        self._operations.append(take_back)
        threading.Thread(target=self.take_back, name="rlinf-abandoned", daemon=True).start()

    def take_back(self) -> None:
        """Take back all of them; they are when this returns."""
        if not self._operations:
            return
        with self._lock:
            while self._operations:
                with suppress(RLinfError):  # the cluster or the channel is gone
                    self._operations[0]()
                self._operations.popleft()


abandoned = _Abandoned()


class AsyncWork:
    """An operation that was started with ``async_op=True``.

    Args:
        future: Done when the operation is.
        what: What a waiter waits for, in words.
        finish: Turns what the future holds into the result, on the thread that waits.
        abandon: Called when a deadline passes, or nobody has the handle any more, so that what
            comes later is not lost to a handle that nobody waits for. It must not wait itself.
        give_back: Called with what the future holds where the handle is gone and nobody took it:
            it was there already, or on its way when the operation was abandoned.
    """

    def __init__(
        self,
        future: Future[Any],
        what: str,
        finish: Callable[[Any], Any] | None = None,
        abandon: Callable[[], object] | None = None,
        give_back: Callable[[Any], object] = lambda held: None,
    ) -> None:
        self._future = future
        self._what = what
        self._finish = finish
        self._abandon = abandon
        self._owner = os.getpid()
        self._give_back = give_back
        self._lock = threading.Lock()
        self._taken = False
        self._finished = False
        self._result: Any = None

    def __del__(self) -> None:
        """Take back what the operation asked for, where its result can reach nobody any more."""
        if os.getpid() != self._owner:  # the copy in a child that was forked
            return
        if sys.is_finalizing() or self._abandon is None or self._taken or _failed(self._future):
            return
        abandoned.add(partial(_take_back, self._future, self._abandon, self._give_back))

    def wait(self) -> Any:
        """Block until done and return the result; again returns the same result."""
        try:
            return self._take(require_process().wait(self._future, self._what))
        except WaitTimeout:
            self._give_up()
            raise

    def wait_alone(self) -> Any:
        """As `wait`, where nobody else has the handle: whatever ends the wait, a failure elsewhere
        or an interrupt too, what comes later is not lost to it."""
        try:
            return self.wait()
        except BaseException:
            self._give_up()
            raise

    def take_now(self) -> Any:
        """The result if it is there already; otherwise None, and what comes later is not lost to
        this handle, which nobody waits for."""
        self._give_up()
        if self._future.cancelled():
            return None
        with suppress(WithdrawnError):
            return self.wait()
        return None

    async def async_wait(self) -> Any:
        """Wait on the event loop until done and return the result."""
        try:
            return self._take(await require_process().wait_async(self._future, self._what))
        except WaitTimeout:
            self._give_up()
            raise

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def done_within(self, seconds: float) -> bool:
        """Whether `wait` would return at once, by the end of a time that this waits for."""
        if seconds > 0 and not self._future.done():
            wait_for(self._future, seconds)
        return self._future.done()

    def then(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AsyncWork:
        """Call ``func(*args, **kwargs)`` after this operation; its result is the new handle's.

        Where that is a handle itself, the new one is done when it is, with its result.
        """
        chained: Future[Any] = Future()

        def run() -> None:
            try:
                self.wait()
                result = func(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - raised where the handle is waited for
                chained.set_exception(error)
                return
            if isinstance(result, AsyncWork):
                result._chain(partial(_settle, chained, result.wait))
            else:
                chained.set_result(result)

        self._chain(run)
        return AsyncWork(chained, f"{self._what}, then {getattr(func, '__name__', func)}")

    def _chain(self, job: Callable[[], None]) -> None:
        worker = current_worker()
        self._future.add_done_callback(lambda _: _chain().add(job, worker))

    def _give_up(self) -> None:
        if self._abandon is not None and not self._future.done():
            self._abandon()

    def _take(self, raw: Any) -> Any:
        with self._lock:
            self._taken = True
            if not self._finished:
                self._result = raw if self._finish is None else self._finish(raw)
                self._finished = True
            return self._result


def _failed(future: Future[Any]) -> bool:
    """Whether it is known that a future holds nothing."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def _take_back(
    future: Future[Any], abandon: Callable[[], object], give_back: Callable[[Any], object]
) -> None:
    """Abandon an operation whose handle is gone, and give back what it has got."""
    if not future.done():
        abandon()
        wait_for(future, _TAKE_BACK_SECONDS)
    give_back_when_done(future, give_back)


def give_back_when_done(future: Future[Any], give_back: Callable[[Any], object]) -> None:
    """Call ``give_back`` with what a future holds, now or when that comes; nobody takes it."""

    def done(future: Future[Any]) -> None:
        if not _failed(future):
            with suppress(RLinfError):  # the cluster is gone, and with it what was held
                give_back(future.result())

    future.add_done_callback(done)


def finished_work(result: Any, what: str) -> AsyncWork:
    """A handle of something that is done already."""
    future: Future[Any] = Future()
    future.set_result(result)
    return AsyncWork(future, what)


def _settle(future: Future[Any], compute: Callable[[], Any]) -> None:
    try:
        future.set_result(compute())
    except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
        future.set_exception(error)


class _Chain:
    """Runs chained functions in order, each as soon as the one before it ends or waits."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Worker | None]] = SimpleQueue()
        self._start()

    def add(self, job: Callable[[], None], worker: Worker | None) -> None:
        """Run a function for a worker, or for the driver, when its turn comes."""
        self._jobs.put((job, worker))

    def step_aside(self) -> None:
        """Let the next functions run: what the calling one waits for may come of them."""
        _thread.chain = None
        self._start()

    def _start(self) -> None:
        # Not of a pool: at the end of the program nobody waits for a function that waits.
        threading.Thread(target=self._run, name="rlinf-then", daemon=True).start()

    def _run(self) -> None:
        _thread.chain = self
        while _thread.chain is not None:
            job, worker = self._jobs.get()
            _worker_here.set(worker)
            job()


@cache
def _chain() -> _Chain:
    return _Chain()


class _ThreadContext(threading.local):
    launching: Any = None
    chain: _Chain | None = None


_process: Process | None = None
_inherited: Process | None = None
"""Of a forked child: that of its parent. It is kept, as what it holds is the parent's to end."""
_process_worker: Worker | None = None
# Of a context and not of a thread, so that what a worker hands to ``asyncio.to_thread`` is its own.
_worker_here: ContextVar[Worker | None] = ContextVar("worker", default=None)
_thread = _ThreadContext()


def current_process() -> Process | None:
    """The process's part in a cluster, None outside one."""
    return _process


def require_process() -> Process:
    """The process's part in a cluster; SchedulerUsageError without one, WorkerDiedError in what a
    thread still computes for a worker that was closed."""
    worker = _worker_here.get()
    if worker is not None and getattr(worker, ENDED, False):
        raise WorkerDiedError(f"worker '{worker.get_name()}' died: its group was closed")
    if is_outside():
        raise SchedulerUsageError(
            "this process was forked by one of a cluster, and cannot speak in its parent's name: "
            "call Cluster() in it first, which gives it a place of its own, or let the parent send "
            "and receive"
        )
    if _process is None:
        raise SchedulerUsageError(
            "there is no cluster in this process: create one with Cluster(...) before launching "
            "worker groups or creating channels"
        )
    return _process


def set_process(process: Process | None) -> None:
    """Enter or leave a cluster."""
    global _process  # noqa: PLW0603 - one cluster per process is the interface
    _process = process


def was_forked() -> bool:
    """Whether this process was forked by one of a cluster on ``ray``."""
    return _inherited is not None


def is_outside() -> bool:
    """Whether it was, and has not entered a cluster since."""
    return _inherited is not None and _process is None


def _begin_anew() -> None:
    """In a forked child: with the endpoint of its parent it would take part in its connections and
    count its requests again, and what it asked would be answered to the parent.

    On the local runtime nothing leaves a process, and a child has a copy of all, which harms no
    other.
    """
    global _process, _inherited, _process_worker
    if _process is None or _process.runtime == "local":
        return
    _inherited, _process, _process_worker = _process, None, None
    _worker_here.set(None)
    _thread.chain = None
    _chain.cache_clear()  # its thread is not there


os.register_at_fork(after_in_child=_begin_anew)


def current_worker() -> Worker | None:
    """The worker that this thread runs; None in the driver."""
    return _worker_here.get() or _process_worker


def set_current_worker(worker: Worker | None, *, whole_process: bool) -> None:
    """Say which worker this thread, or the whole process, runs."""
    global _process_worker  # noqa: PLW0603 - a worker's process has one worker
    if whole_process:
        _process_worker = worker
    else:
        _worker_here.set(worker)


def current_worker_name() -> str:
    """Name of the current worker, or ``driver``."""
    worker = current_worker()
    return "driver" if worker is None else worker.worker_address.get_name()


def own_device() -> str:
    """Device string of torch for what the current worker, or this process, computes.

    Workers that are threads of one process all see every device of the machine: each computes on
    the first of its own. A process sees its own devices alone, and computes on the current one.
    """
    worker = current_worker()
    if worker is None:
        return process_device()
    if not worker.has_accelerator:
        return process_device(AcceleratorType.NO_ACCEL)
    shared = require_process().runtime == "local"
    number = worker.worker_info.accelerator_rank if shared else None
    return process_device(worker.hardware_type, number)


def set_launching(launch: Any) -> None:
    """Leave the launch parameters where `Worker.__init__` on this thread finds them."""
    _thread.launching = launch


def waiting_launch() -> Any:
    """The launch parameters that are left for this thread; None where there are none."""
    return _thread.launching


def take_launching() -> Any:
    """The launch parameters that were left for this thread, once."""
    launch, _thread.launching = _thread.launching, None
    return launch
