"""The user's own module, which registers models and environments in every worker."""

from __future__ import annotations

import importlib
import os
import threading

from rlinf.scheduler.errors import SchedulerError

VARIABLE = "RLINF_EXT_MODULE"

_lock = threading.Lock()
_registered: set[str] = set()


def register_extensions() -> None:
    """Import the module that ``RLINF_EXT_MODULE`` names, if any, and call its ``register()``.

    Raises:
        SchedulerError: There is no such module, or it has no ``register``.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SchedulerError(
            f"{VARIABLE} names '{name}', but no module '{error.name}' can be imported. Install it, "
            "or put its folder on PYTHONPATH, on every node."
        ) from error
    register = getattr(module, "register", None)
    if register is None:
        raise SchedulerError(
            f"{VARIABLE} names '{name}', which has no function 'register()'. Add one "
            "that registers your models and environments."
        )
    register()


def register_extensions_once() -> None:
    """The same, but once for a module in this process: on ``local`` it has many workers.

    Raises:
        SchedulerError: As :func:`register_extensions`.
    """
    name = os.environ.get(VARIABLE)
    with _lock:
        if name and name not in _registered:
            register_extensions()
            _registered.add(name)
