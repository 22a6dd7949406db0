"""Running one method of a worker and bringing back what came of it."""

from __future__ import annotations

import inspect
import time
import traceback
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from rlinf.scheduler.errors import SchedulerUsageError, WorkerCallError
from rlinf.scheduler.process import current_process, require_process
from rlinf.scheduler.transport.payload import Payload

if TYPE_CHECKING:
    from rlinf.scheduler.worker import Worker


@dataclass(frozen=True)
class _Failure:
    """An exception on its way to the caller; None where it cannot be pickled."""

    exception: Any
    summary: str
    traceback: str


class _WithoutInit:
    """An exception that arrives as itself, but without a call of its ``__init__``.

    By default an exception is rebuilt from what it gave its base class, which many an ``__init__``
    does not take.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _without_init, (type(self._error), self._error.args, self._error.__dict__)


def _without_init(kind: Any, args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class Outcome:
    """What came of a call: the encoded result or failure, and how long it took."""

    payload: Payload
    failed: bool
    seconds: float


def has_async_methods(worker_class: type) -> bool:
    """Whether any public method of a class is a coroutine function."""
    return any(not name.startswith("_") for name in coroutines(worker_class))


def coroutines(worker_class: type) -> frozenset[str]:
    """Names of the methods of a class that are coroutine functions."""
    methods = inspect.getmembers(worker_class, inspect.iscoroutinefunction)
    return frozenset(name for name, _ in methods)


def check_built(worker: Any) -> None:
    """Raise if the class of a new worker left out what `Worker.__init__` does."""
    if not hasattr(worker, "_rlinf_launch"):
        name = type(worker).__name__
        raise SchedulerUsageError(
            f"{name}.__init__ does not call super().__init__(), so {name} is no worker of its "
            "group. Call it first."
        )


def run_method(
    worker: Worker, method: str, arguments: Payload, caller_node: int | None = None
) -> Outcome:
    """Run a method; whatever it raises is part of the outcome.

    The node of the process that reads the outcome is None on the local runtime.
    """
    process = require_process()
    begin = time.perf_counter()
    with process.waits.running(worker.worker_address.get_name(), method):
        try:
            args, kwargs = process.decode(arguments)
            return _returned(getattr(worker, method)(*args, **kwargs), caller_node, begin)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller
            return failed_outcome(error, method, caller_node, begin)


async def run_async_method(
    worker: Worker, method: str, arguments: Payload, caller_node: int | None = None
) -> Outcome:
    """As :func:`run_method`, of a worker that has async methods; plain ones run on the loop too."""
    begin = time.perf_counter()
    try:
        args, kwargs = require_process().decode(arguments)
        result = getattr(worker, method)(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return _returned(result, caller_node, begin)
    except BaseException as error:  # noqa: BLE001 - it is raised in the caller
        return failed_outcome(error, method, caller_node, begin)


def _returned(result: Any, caller_node: int | None, begin: float) -> Outcome:
    process = require_process()
    process.settle_puts()
    payload = process.encode(result, reader_node=caller_node, shared=True)
    return Outcome(payload, False, time.perf_counter() - begin)


def failed_outcome(
    error: BaseException, method: str, caller_node: int | None = None, begin: float | None = None
) -> Outcome:
    """The outcome of a call that raised; of one that could not begin without the time it did."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        error = RuntimeError(
            f"method '{method}' called sys.exit({error.code!r}); a worker ends when its group is "
            "closed, not by exiting"
        )
    summary = _in_a_line(error)
    process = current_process()
    if process is None:  # the cluster was shut down under the method: nobody reads it
        return Outcome(Payload(), True, 0.0)
    for carried in (error, _WithoutInit(error), None):  # with None the text has to do
        try:
            failure = _Failure(carried, summary, text)
            payload = process.encode(failure, reader_node=caller_node, shared=True)
            if process.codec is not None:
                process.codec.decode(payload, peek=True)  # not all that pickles can be rebuilt
            break
        except Exception:  # noqa: BLE001 - it is the next one's turn
            continue
    return Outcome(payload, True, 0.0 if begin is None else time.perf_counter() - begin)


def _in_a_line(error: BaseException) -> str:
    """Type and message of an exception."""
    if isinstance(error, WorkerCallError):  # of a worker that this one called
        return f"{WorkerCallError.__name__}: {error.message}"
    told = traceback.TracebackException.from_exception(error, lookup_lines=False)
    told.__notes__ = None  # which would stand behind the line with the type
    return list(told.format_exception_only())[-1].strip()


def result_of(outcome: Outcome, worker_name: str, method: str) -> Any:
    """The method's result in the caller.

    Raises:
        WorkerCallError: The method raised. The exception is also of the method's own type, and
            that one is its ``__cause__``.
    """
    value = require_process().decode(outcome.payload)
    if not outcome.failed:
        return value
    message = f"{worker_name}.{method} raised {value.summary}"
    original = value.exception
    raise _both(original, message, worker_name, method, value.traceback) from original


def _both(
    original: BaseException | None, message: str, worker: str, method: str, trace: str
) -> WorkerCallError:
    if isinstance(original, WorkerCallError):  # of a worker that the worker called
        original = getattr(original, "original", None)
    if original is None:
        return WorkerCallError(message, worker, method, trace)
    try:
        kind = _dual_class(cast(Any, type(original)))
        error = type(original).__new__(kind, *original.args)
        error.__dict__.update(original.__dict__)
        if isinstance(original, OSError):
            for name in ("errno", "strerror", "filename", "filename2"):
                setattr(error, name, getattr(original, name))
        WorkerCallError.__init__(error, message, worker, method, trace)
    except (TypeError, AttributeError):  # not to be subclassed, or with a message of its own
        return WorkerCallError(message, worker, method, trace)
    error.original = original
    both: WorkerCallError = error
    return both


@cache
def _dual_class(kind: Any) -> Any:
    """A class that is both a WorkerCallError and the exception that the worker raised."""
    namespace = {
        "__init__": WorkerCallError.__init__,
        "__str__": WorkerCallError.__str__,
        "__reduce__": _reduce_dual,
        "__module__": __name__,
    }
    return type(f"WorkerCallError({kind.__name__})", (WorkerCallError, kind), namespace)


def _reduce_dual(self: Any) -> Any:
    arguments = (self.original, self.message, self.worker_name, self.method, self.remote_traceback)
    return _both, arguments
