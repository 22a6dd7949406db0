"""A process of the reward pool: builds the functions, then scores sample by sample.

Scoring happens in the main thread, because some libraries limit their time by signals. Imports no
torch unless a user's function does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import threading

from rlinf.errors import ConfigError, MissingPackageError, UserError
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import RewardInput
from rlinf.rewards.scorer import Scorer
from rlinf.rewards.wire import receive, send


def main(commands: int, lifeline: int, progress: int) -> None:
    """Serve one pool until it goes away.

    Args:
        commands: Descriptor of the socket to the pool.
        lifeline: Descriptor of a pipe whose closing says that the pool is gone.
        progress: Descriptor of a file that holds the number of the function at work, for the case
            that it never ends.
    """
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the pool, which ends us
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    with (
        socket.socket(fileno=commands) as connection,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        _serve(connection, progress)


def _exit_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    # The pool started us as the leader of a group: whatever we started ends with us.
    os.killpg(0, signal.SIGKILL)


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


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
