"""A process of the reward pool: builds the functions, then scores sample by sample.

Scoring happens in the main thread, because some libraries limit their time by signals. Imports no
torch unless a user's function does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import resource
import socket

from rlinf.child_process import watch_parent
from rlinf.errors import ConfigError, MissingPackageError, UserError
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import RewardInput
from rlinf.rewards.scorer import Scorer
from rlinf.rewards.wire import receive, send


def main(lifeline: int, commands: int, progress: int) -> None:
    """Serve one pool until it goes away.

    Args:
        lifeline: See :func:`~rlinf.child_process.watch_parent`.
        commands: Descriptor of the socket to the pool.
        progress: Descriptor of a file that holds the number of the function at work, for the case
            that it never ends.
    """
    watch_parent(lifeline)
    with (
        socket.socket(fileno=commands) as connection,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        _serve(connection, progress)


def _serve(connection: socket.socket, progress: int) -> None:
    settings = receive(connection)
    try:
        config = RewardConfig.model_validate(settings["config"])
        if config.memory_mib is not None:
            _limit_memory(config.memory_mib * 2**20)
        scorer = Scorer(config, at=lambda number: os.pwrite(progress, bytes([number]), 0))
    except UserError as error:
        send(connection, {"refused": _described(error)})
        return
    gc.collect()
    gc.freeze()
    send(connection, {"ready": os.getpid()})
    while True:
        sample = RewardInput(**receive(connection))
        send(connection, {"output": dataclasses.asdict(scorer.score(sample))})


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


def _described(error: UserError) -> dict[str, object]:
    if isinstance(error, MissingPackageError):
        return {"package": [error.package, error.extra, error.needed_for]}
    if isinstance(error, ConfigError):
        return {"reason": error.reason, "key": error.key}
    return {"reason": str(error), "key": ""}
