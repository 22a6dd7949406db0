"""The local runtime: every worker is a thread of this process, and messages are copies in it."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import importlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.errors import SchedulerValueError, WorkerDiedError
from rlinf.scheduler.process import (
    ENDED,
    Process,
    set_current_worker,
    set_launching,
    set_process,
)
from rlinf.scheduler.runtime.attach import close_log
from rlinf.scheduler.runtime.base import Runtime, WorkerHandle
from rlinf.scheduler.runtime.execution import (
    Outcome,
    check_built,
    failed_outcome,
    has_async_methods,
    result_of,
    run_async_method,
    run_method,
)
from rlinf.scheduler.runtime.launch import Arguments, Launch, pin_thread
from rlinf.scheduler.runtime.node_probe import probe_node
from rlinf.scheduler.transport.endpoint import Endpoint, claim, try_fail
from rlinf.scheduler.transport.payload import Payload

_JOIN_SECONDS = 2.0
_MOST_OVERLAPPING = 1000  # calls of a worker with async methods
_SOFT = 1  # omp_pause_soft: what the next computation needs comes back by itself

_Call = tuple[str, Payload, "Future[Outcome]"]
_threads: WeakSet[threading.Thread] = WeakSet()
"""Those of all workers of this process."""


class LocalRuntime(Runtime):
    """Runs workers as threads."""

    def __init__(self, config: ClusterConfig, deadline_seconds: float) -> None:
        if config.num_nodes > 1:
            raise SchedulerValueError(
                f"the local runtime is one process, so cluster.num_nodes must be 1, got "
                f"{config.num_nodes}. Use cluster.runtime: ray for several machines."
            )
        nodes = [probe_node(config)]
        process = Process(
            runtime="local",
            endpoint=Endpoint(),
            codec=None,
            driver=Endpoint.address,
            node_rank=0,
            deadline_seconds=deadline_seconds,
        )
        set_process(process)
        super().__init__(process, nodes, "local", "local", {})
        # Weak: one that was closed, and all that it holds, goes when its threads end.
        self._workers: WeakValueDictionary[str, LocalWorker] = WeakValueDictionary()

    def start(
        self, launch: Launch, worker_class: type, arguments: Arguments, max_concurrency: int | None
    ) -> WorkerHandle:
        """Start one worker thread."""
        arguments = self.process.decode(self.process.encode(arguments))  # each rank its own
        worker = LocalWorker(self.process, launch, worker_class, arguments, max_concurrency)
        self._workers[launch.name] = worker
        return worker

    def find(self, worker_name: str, incarnation: str) -> WorkerHandle:
        """A running worker by name."""
        worker = self._workers.get(worker_name)
        if worker is None or worker.killed:
            raise SchedulerValueError(f"there is no running worker '{worker_name}'")
        return worker

    def shutdown(self) -> None:
        """End every worker thread; one that computes ends after its current method."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.kill()
        limit = time.monotonic() + _JOIN_SECONDS
        for worker in workers:
            worker.join(limit)


class LocalWorker(WorkerHandle):
    """One worker thread, or several where calls may overlap."""

    def __init__(
        self,
        process: Process,
        launch: Launch,
        worker_class: type,
        arguments: Arguments,
        max_concurrency: int | None,
    ) -> None:
        self._process = process
        self._launch = launch
        self._class = worker_class
        self._arguments = arguments
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._open: set[Future[Outcome]] = set()
        self._worker: Any = None
        self._start_error: BaseException | None = None
        self._built = threading.Event()
        self.killed = False
        self.actor = _LocalActor(self)
        is_async = has_async_methods(worker_class)
        self._run = self._run_loop if is_async else self._run_calls
        self._most_threads = 1 if is_async else max_concurrency or 1
        self._overlapping = max_concurrency or _MOST_OVERLAPPING
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._start_thread()

    def call(self, method: str, arguments: Payload) -> Future[Outcome]:
        """Queue a method call; what the caller computed with is free for the worker."""
        release_compute_threads()
        future: Future[Outcome] = Future()
        if self.killed:
            future.set_exception(self._ended())
        else:
            self._open.add(future)
            future.add_done_callback(self._open.discard)
            self._calls.put((method, arguments, future))
            self._start_thread()
        return future

    def _start_thread(self) -> None:
        """Start the first thread, and another one for each call that would wait for a free one."""
        with self._lock:
            count = len(self._threads)
            if self.killed or (count and count >= min(self._most_threads, len(self._open))):
                return
            thread = threading.Thread(
                target=self._run, args=(count == 0,), name=self._launch.name, daemon=True
            )
            self._threads.append(thread)
            _threads.add(thread)
            thread.start()

    def call_for_result(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a method call; the future holds the result."""
        result: Future[Any] = Future()

        def finish(done: Future[Outcome]) -> None:
            try:
                result.set_result(result_of(done.result(), self._launch.name, method))
            except Exception as error:  # noqa: BLE001 - raised where the future is asked
                result.set_exception(error)

        self.call(method, self._process.encode((args, kwargs))).add_done_callback(finish)
        return result

    def kill(self) -> None:
        """Fail every open call and let the threads end."""
        with self._lock:
            if self.killed:
                return
            self.killed = True
            self._mark_ended()
            for _ in self._threads:
                self._calls.put(None)
        close_log(self._launch.name)
        self._process.waits.remove_worker(self._launch.name, self._ended())
        for future in list(self._open):
            try_fail(future, self._ended())

    def join(self, limit: float) -> None:
        """Wait for the threads to end, until a time of the monotonic clock."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(limit - time.monotonic(), 0.0))

    def _mark_ended(self) -> None:
        """What its threads still compute reaches nobody, and no later cluster."""
        if self.killed and self._worker is not None:
            setattr(self._worker, ENDED, True)

    def _ended(self) -> WorkerDiedError:
        return WorkerDiedError(f"worker '{self._launch.name}' died: its group was closed")

    def _enter(self, first: bool) -> None:
        """Prepare this thread; the first one builds the worker."""
        if self._launch.cores:
            pin_thread(self._launch.cores)
            importlib.import_module("torch")
        if torch := sys.modules.get("torch"):
            # Asked first: else it would take the number of whichever worker was the last to set
            # one when it first computes.
            usual = torch.get_num_threads()
            torch.set_num_threads(len(self._launch.cores) or usual)
        if not first:
            self._built.wait()
            set_current_worker(self._worker, whole_process=False)
            return
        args, kwargs = self._arguments
        set_launching(self._launch)
        try:
            self._worker = self._class(*args, **kwargs)
            check_built(self._worker)
        except BaseException as error:  # noqa: BLE001 - every call of the worker raises it
            self._start_error = error
        with self._lock:
            self._mark_ended()
        release_compute_threads()
        self._built.set()

    def _run_calls(self, first: bool) -> None:
        self._enter(first)
        while call := self._calls.get():
            method, arguments, future = call
            if claim(future):
                failed = self._start_failure()
                outcome = failed or run_method(self._worker, method, arguments)
                release_compute_threads()
                _settle(future, outcome)

    def _run_loop(self, first: bool) -> None:
        self._enter(first)
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        limit = asyncio.Semaphore(self._overlapping)
        tasks: set[asyncio.Task[None]] = set()
        arrived: asyncio.Queue[_Call | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over() -> None:
            while call := self._calls.get():
                loop.call_soon_threadsafe(arrived.put_nowait, call)
            loop.call_soon_threadsafe(arrived.put_nowait, None)

        # Not one of asyncio's threads, for which a program that ends without a shutdown waits.
        threading.Thread(target=hand_over, daemon=True).start()
        while call := await arrived.get():
            task = asyncio.create_task(self._serve_call(*call, limit))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()

    async def _serve_call(
        self, method: str, arguments: Payload, future: Future[Outcome], limit: asyncio.Semaphore
    ) -> None:
        async with limit:
            failed = self._start_failure()
            _settle(future, failed or await run_async_method(self._worker, method, arguments))

    def _start_failure(self) -> Outcome | None:
        return failed_outcome(self._start_error, "__init__") if self._start_error else None


def _keep_status() -> None:
    """At the end of the program: leave it its own status where a worker still computes.

    The interpreter ends a thread that returns to it by then by unwinding its stack, which C++ code
    such as torch's does not allow: the program would be aborted. Here that thread waits for ever,
    as it does by itself from Python 3.14 on. When the C library is told the status, it leaves at
    once: what it would take apart first is what the thread computes with.
    """
    if any(thread.is_alive() for thread in _threads):
        with suppress(OSError, AttributeError):  # other libraries than those of GNU
            library = ctypes.CDLL(None)
            library.fflush(None)
            library.on_exit(library._exit, None)
            set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
            set_terminate(library.pause)


# Before any cluster asks for its shutdown, and so behind that.
atexit.register(_keep_status)


def _settle(future: Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


class _LocalActor:
    """Stands where the ``ray`` runtime has an actor handle: ``actor.method.remote(...)``."""

    def __init__(self, worker: LocalWorker) -> None:
        self._worker = worker

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=partial(self._worker.call_for_result, method))


def release_compute_threads() -> None:
    """End the OpenMP threads that the calling thread keeps for its next computation.

    Where those of all threads are more than cores, OpenMP no longer lets them wait busily, and to
    wake them takes longer than a small operation does.
    """
    pause = _pause() if "torch" in sys.modules else None
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` (OpenMP 5.0, §3.2.44) of the library that torch computes with."""
    libraries = Path(sys.modules["torch"].__file__ or "").parent / "lib"
    for library in sorted(libraries.glob("lib*omp*")):
        if library.name.startswith(("libgomp", "libomp", "libiomp")):
            with suppress(OSError, AttributeError):
                pause: Callable[[int], int] = ctypes.CDLL(str(library)).omp_pause_resource_all
                return pause
    return None
