"""Workers that are Ray actors: starting them, finding them, calling their methods."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf.scheduler.errors import SchedulerUsageError, SchedulerValueError, WorkerDiedError
from rlinf.scheduler.process import require_process, set_launching, was_forked
from rlinf.scheduler.runtime.attach import copy_output, enter_cluster, show_log
from rlinf.scheduler.runtime.base import Runtime, WorkerHandle
from rlinf.scheduler.runtime.execution import (
    Outcome,
    check_built,
    coroutines,
    failed_outcome,
    has_async_methods,
    run_async_method,
    run_method,
)
from rlinf.scheduler.runtime.launch import (
    PATH_VARIABLES,
    Arguments,
    Launch,
    apply_environment,
    order_paths,
)
from rlinf.scheduler.transport.blocks import call_number, hand_over, take_back
from rlinf.scheduler.transport.endpoint import try_fail, try_resolve
from rlinf.scheduler.transport.payload import Payload

_CAUSE_SECONDS = 5.0


class RayWorker(WorkerHandle):
    """One worker that is a Ray actor; ``on_death`` is told why, before a call of it fails."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.on_death: Callable[[str], object] = lambda cause: None

    def call(self, method: str, arguments: Payload) -> Future[Outcome]:
        """Start a method call; the future fails if the worker's process ends."""
        _check_ray()
        number = call_number()
        for block in arguments.blocks:
            hand_over(block, number)
        wire = to_wire(arguments, method, require_process().node_rank)
        return RayCall(self, self.actor._rlinf_invoke.remote(wire), arguments.blocks, number)

    def kill(self) -> None:
        """End the process."""
        if ray.is_initialized():
            ray.kill(self.actor, no_restart=True)

    def cause_of_death(self) -> str | None:
        """Why the process ended, in Ray's words; None while Ray does not know of it."""
        if ray.is_initialized():
            try:
                ray.get(self.actor.__ray_ready__.remote(), timeout=_CAUSE_SECONDS)
            except RayActorError as error:
                return describe_death(error)
            except GetTimeoutError:
                pass  # it is busy
        return None


class RayCall(Future[Outcome]):
    """A method call in flight.

    Whoever waits for it alone asks Ray directly; another thread's answer, which several waiters or
    a callback need, takes a tenth longer.

    Args:
        worker: Whose method it is.
        ref: Ray's promise of the answer.
        blocks: What its arguments are in.
        number: Whose these blocks are while the worker has not looked at them.
    """

    def __init__(
        self, worker: RayWorker, ref: Any, blocks: Sequence[str] = (), number: int = 0
    ) -> None:
        super().__init__()
        self._worker, self._ref, self._watched = worker, ref, False
        self._blocks, self._number = blocks, number

    def done(self) -> bool:
        """Whether the answer, or the end of the worker, is known."""
        if not self._watched and not super().done() and ray.is_initialized():
            try:
                answered, _ = ray.wait([self._ref], timeout=0)
            except ValueError:  # the program stopped that Ray, and this one knows no such call
                return False
            if answered:
                self._ask(None)
            else:
                self._watch()
        return super().done()

    def add_done_callback(self, fn: Callable[[Future[Outcome]], object]) -> None:
        """Call back when it is done, from another thread."""
        self._watch()
        super().add_done_callback(fn)

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome; raises what :meth:`exception` returns, or a TimeoutError."""
        self._ask(timeout)
        return super().result(timeout if self._watched else 0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; the end of the worker if that came first, a TimeoutError if nothing did."""
        self._ask(timeout)
        return super().exception(timeout if self._watched else 0)

    def _ask(self, timeout: float | None) -> None:
        if self._watched or super().done():
            return
        try:
            answer = ray.get(self._ref, timeout=timeout)
        except GetTimeoutError:
            return
        except RayError as error:
            self._watched = True
            self._fail(error)
        else:
            self._watched = True  # nothing is left to watch for
            self._resolve(answer)

    def _watch(self) -> None:
        # Of a Ray that has ended no answer comes, and none can be asked for.
        if not self._watched and not super().done() and ray.is_initialized():
            self._watched = True
            self._ref.future().add_done_callback(self._answered)

    def _answered(self, answer: Future[bytes]) -> None:
        error = answer.exception()
        if error is None:
            self._resolve(answer.result())
        else:
            self._fail(error)

    def _resolve(self, answer: bytes) -> None:
        payload, (failed, seconds) = from_wire(answer)
        try_resolve(self, Outcome(payload, failed, seconds))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, RayActorError):
            for block in self._blocks:
                take_back(block, self._number)
            cause = describe_death(error)
            self._worker.on_death(cause)
            error = WorkerDiedError(f"worker '{self._worker.name}' died: {cause}")
        try_fail(self, error)


def describe_death(error: RayActorError) -> str:
    """Ray's account of an actor's end, on one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(
        line for line in lines if line and "class_name:" not in line and "actor_id:" not in line
    )


class RayClientRuntime(Runtime):
    """The runtime in a worker, or in another process that attached to the cluster."""

    @cached_property
    def _started(self) -> dict[str, RayWorker]:
        """Workers that this process started, by the names of their actors."""
        return {}

    def start(
        self, launch: Launch, worker_class: type, arguments: Arguments, max_concurrency: int | None
    ) -> RayWorker:
        """Start one actor without waiting for it."""
        _check_ray()
        actor_name = f"{launch.name}@{launch.incarnation}"
        node = self.nodes[launch.placement.cluster_node_rank]
        options: dict[str, Any] = {
            "name": actor_name,
            "namespace": self.namespace,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
        }
        if max_concurrency is not None:
            options["max_concurrency"] = max_concurrency
        if runtime_env := _runtime_env(launch):
            options["runtime_env"] = runtime_env
        encoded = to_wire(self.process.encode(arguments, reader_node=node.node_rank))
        actor = actor_class(worker_class).options(**options).remote(launch, encoded)
        worker = RayWorker(launch.name, actor)
        self._started[actor_name] = worker
        return worker

    def find(self, worker_name: str, incarnation: str) -> RayWorker:
        """A running worker by name and incarnation of its group."""
        _check_ray()
        actor_name = f"{worker_name}@{incarnation}"
        if actor_name in self._started:
            return self._started[actor_name]
        try:
            return RayWorker(worker_name, ray.get_actor(actor_name, namespace=self.namespace))
        except (ValueError, RayError):
            raise SchedulerValueError(f"there is no running worker '{worker_name}'") from None

    def shutdown(self) -> None:
        """Nothing here is this process's to stop."""


def _check_ray() -> None:
    """Refuse what would wait for ever: of Ray's threads a forked process has none."""
    if was_forked():
        raise SchedulerUsageError(
            "a process that was forked cannot launch groups or call their methods, as Ray does not "
            "work in it: let its parent do that; messages and channels it has after Cluster()"
        )


def _runtime_env(launch: Launch) -> dict[str, Any]:
    """Ray's environment of a process; only what must be in place before it starts: paths, and what
    the configuration of its nodes says, which modules may read while they are imported.

    Everything else is set when the worker is built: an environment of its own would cost the
    process Ray's pre-started interpreters.
    """
    names = {*PATH_VARIABLES, *launch.configured}
    early = {k: v for k, v in launch.environment.items() if k in names}
    environment: dict[str, Any] = {"env_vars": early} if early else {}
    if launch.interpreter is not None:
        environment["py_executable"] = launch.interpreter
    return environment


def to_wire(payload: Payload, *more: Any) -> bytes:
    """A payload, and small values, as an argument or result of a Ray call.

    Bytes are what Ray carries fastest: it copies them and pickles nothing.
    """
    frames = [bytes(frame) for frame in payload.frames or ()]
    return pickle.dumps((frames, payload.blocks, *more), 5)


def from_wire(wire: bytes) -> tuple[Payload, list[Any]]:
    """A payload, and small values, that Ray carried."""
    frames, blocks, *more = pickle.loads(wire)
    return Payload(frames, blocks=blocks), more


@cache
def actor_class(worker_class: type) -> Any:
    """The Ray actor class of a worker class, a subclass: ``handle.method.remote()`` calls it."""
    is_async = has_async_methods(worker_class)
    members = {
        "__init__": _build,
        "__module__": worker_class.__module__,
        "__qualname__": worker_class.__qualname__,
        "__doc__": worker_class.__doc__,
        "_rlinf_user_class": worker_class,
        "_rlinf_unseen": frozenset() if is_async else coroutines(worker_class),
        "_rlinf_invoke": _invoke_async if is_async else _invoke,
    }
    return ray.remote(type(worker_class)(worker_class.__name__, (worker_class,), members))


def _build(self: Any, launch: Launch, arguments: bytes) -> None:
    """Prepare the process, then build the user's worker in it."""
    apply_environment(launch.environment, launch.cores)
    order_paths(launch)
    if launch.log_directory is not None:
        copy_output(launch)
        launch = dataclasses.replace(launch, log_directory=None)  # all that it logs is in there
    if launch.imports_torch:
        with suppress(ImportError, OSError):  # of a node without it nobody expects tensors
            importlib.import_module("torch")
    process = enter_cluster(launch.membership)
    show_log()
    self._rlinf_start_error = None
    try:
        args, kwargs = process.decode(from_wire(arguments)[0])
        set_launching(launch)
        self._rlinf_tell(launch)  # Ray has made the object before it knew this
        self._rlinf_user_class.__init__(self, *args, **kwargs)
        check_built(self)
    except BaseException as error:  # noqa: BLE001 - every call of the worker raises it
        self._rlinf_start_error = error


def _invoke(self: Any, call: bytes) -> bytes:
    arguments, (method, caller_node) = from_wire(call)
    if self._rlinf_start_error is not None:
        return _answer(failed_outcome(self._rlinf_start_error, "__init__", caller_node))
    return _answer(run_method(self, method, arguments, caller_node))


async def _invoke_async(self: Any, call: bytes) -> bytes:
    arguments, (method, caller_node) = from_wire(call)
    if self._rlinf_start_error is not None:
        return _answer(failed_outcome(self._rlinf_start_error, "__init__", caller_node))
    return _answer(await run_async_method(self, method, arguments, caller_node))


def _answer(outcome: Outcome) -> bytes:
    return to_wire(outcome.payload, outcome.failed, outcome.seconds)
