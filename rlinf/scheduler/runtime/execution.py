"""Running one method of a worker and bringing back what came of it."""

from __future__ import annotations

import inspect
import time
import traceback
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rlinf.scheduler.errors import WorkerCallError
from rlinf.scheduler.process import require_process
from rlinf.scheduler.transport.payload import Payload

if TYPE_CHECKING:
    from rlinf.scheduler.worker.base import Worker


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the driver."""

    exception: BaseException | None
    summary: str
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """What came of a call: the encoded result or failure, and how long it took."""

    payload: Payload
    failed: bool
    seconds: float


def run_method(
    worker: Worker, method: str, arguments: Payload, caller_node: int | None = None
) -> Outcome:
    """Run a method; whatever it raises is part of the outcome.

    Args:
        worker: Whose method.
        method: Its name.
        arguments: Encoded positional and keyword arguments.
        caller_node: Node of the process that reads the outcome; None on the local runtime.
    """
    process = require_process()
    begin = time.perf_counter()
    with process.waits.running(worker.worker_address.get_name(), method):
        try:
            args, kwargs = process.decode(arguments)
            result = getattr(worker, method)(*args, **kwargs)
            process.settle_puts()
            return _succeeded(result, begin, caller_node)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller
            return _failed(error, method, begin, caller_node)


async def run_async_method(
    worker: Worker, method: str, arguments: Payload, caller_node: int | None = None
) -> Outcome:
    """As :func:`run_method`, of a worker that has async methods; plain ones run on the loop too."""
    process = require_process()
    begin = time.perf_counter()
    try:
        args, kwargs = process.decode(arguments)
        result = getattr(worker, method)(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        process.settle_puts()
        return _succeeded(result, begin, caller_node)
    except BaseException as error:  # noqa: BLE001 - it is raised in the caller
        return _failed(error, method, begin, caller_node)


def failure_of(error: BaseException, method: str) -> Failure:
    """Describe an exception; ``sys.exit`` in a worker is a RuntimeError of the call."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        error = RuntimeError(
            f"method '{method}' called sys.exit({error.code!r}); a worker ends when its group is "
            "closed, not by exiting"
        )
    last = traceback.format_exception_only(error)[-1].strip()
    return Failure(error, last, text)


def failed_outcome(error: BaseException, method: str, caller_node: int | None = None) -> Outcome:
    """The outcome of a call that could not even begin."""
    return _failed(error, method, time.perf_counter(), caller_node)


def _succeeded(result: Any, begin: float, caller_node: int | None) -> Outcome:
    payload = require_process().encode(result, reader_node=caller_node)
    return Outcome(payload, False, time.perf_counter() - begin)


def _failed(error: BaseException, method: str, begin: float, caller_node: int | None) -> Outcome:
    failure = failure_of(error, method)
    process = require_process()
    try:
        payload = process.encode(failure, reader_node=caller_node)
        if process.codec is not None:
            process.codec.decode(payload)  # some exceptions pickle and cannot be rebuilt
    except Exception:  # noqa: BLE001 - then the text has to do
        text = Failure(None, failure.summary, failure.traceback)
        payload = process.encode(text, reader_node=caller_node)
    return Outcome(payload, True, time.perf_counter() - begin)


def result_of(outcome: Outcome, worker_name: str, method: str) -> Any:
    """The method's result in the caller.

    Raises:
        WorkerCallError: The method raised. The exception is also of the method's own type, and
            that one is its ``__cause__``.
    """
    value = require_process().decode(outcome.payload)
    if outcome.failed:
        raise_failure(value, worker_name, method)
    return value


def raise_failure(failure: Failure, worker_name: str, method: str) -> NoReturn:
    """Raise what a worker's method raised."""
    message = f"{worker_name}.{method} raised {failure.summary}"
    error = _both(failure.exception, message, worker_name, method, failure.traceback)
    raise error from failure.exception


def _both(
    original: BaseException | None, message: str, worker: str, method: str, trace: str
) -> WorkerCallError:
    if original is None or isinstance(original, WorkerCallError):
        return WorkerCallError(message, worker, method, trace)
    try:
        kind = _dual_class(cast(Any, type(original)))
        error = type(original).__new__(kind)
        error.__dict__.update(original.__dict__)
        if isinstance(original, OSError):
            error.errno, error.strerror = original.errno, original.strerror
    except TypeError:  # a class that cannot be subclassed or built without its own arguments
        return WorkerCallError(message, worker, method, trace)
    WorkerCallError.__init__(error, message, worker, method, trace)
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
