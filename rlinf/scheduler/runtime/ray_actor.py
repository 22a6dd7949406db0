"""The Ray actor around a worker: the user's class itself, with a start-up and an entry point."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from functools import cache
from typing import Any

from rlinf.scheduler.process import set_launching
from rlinf.scheduler.runtime.attach import enter_cluster
from rlinf.scheduler.runtime.local import has_async_methods
from rlinf.scheduler.transport.payload import Payload
from rlinf.scheduler.worker.execution import (
    Outcome,
    failed_outcome,
    run_async_method,
    run_method,
)
from rlinf.scheduler.worker.launch import Launch, apply_environment


def to_wire(payload: Payload, *more: Any) -> bytes:
    """A payload, and small values, as an argument or result of a Ray call.

    Bytes are what Ray carries fastest: it copies them and pickles nothing.
    """
    frames = [bytes(frame) for frame in payload.frames or ()]
    return pickle.dumps((frames, payload.uses_blocks, *more), 5)


def from_wire(wire: bytes) -> tuple[Payload, list[Any]]:
    """A payload, and small values, that Ray carried."""
    frames, uses_blocks, *more = pickle.loads(wire)
    return Payload(frames, uses_blocks=uses_blocks), more


@cache
def actor_class(worker_class: type) -> Any:
    """The Ray actor class of a worker class.

    It is a subclass, so that ``handle.method.remote()`` calls the user's methods.
    """
    import ray

    members = {
        "__init__": _build,
        "__module__": worker_class.__module__,
        "__qualname__": worker_class.__qualname__,
        "__doc__": worker_class.__doc__,
        "_rlinf_user_class": worker_class,
        "_rlinf_invoke": _invoke_async if has_async_methods(worker_class) else _invoke,
    }
    return ray.remote(type(worker_class)(worker_class.__name__, (worker_class,), members))


def _build(self: Any, launch: Launch, arguments: bytes) -> None:
    """Prepare the process, then build the user's worker in it."""
    apply_environment(launch.environment, launch.cores)
    sys.path.extend(path for path in launch.import_paths if path not in sys.path)
    process = enter_cluster(
        token=launch.token,
        driver=launch.driver,
        node_rank=launch.placement.cluster_node_rank,
        network_ip=launch.network_ip,
        deadline_seconds=launch.deadline_seconds,
    )
    _set_up_logging()
    self._rlinf_start_error = None
    try:
        args, kwargs = process.decode(from_wire(arguments)[0])
        set_launching(launch)
        self._rlinf_user_class.__init__(self, *args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - every call of the worker raises it
        self._rlinf_start_error = error


def _set_up_logging() -> None:
    """Let the worker's log lines reach its output, which Ray shows on the driver."""
    logger = logging.getLogger("rlinf")
    logger.setLevel(os.environ.get("RLINF_LOG_LEVEL", "INFO").upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


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
