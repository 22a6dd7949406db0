"""The child: builds an engine, then does what the parent says until it goes away."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlinf.child_process import watch_parent
from rlinf.engines.process.messages import (
    About,
    Call,
    Done,
    Failed,
    Operation,
    Refused,
    Start,
    Update,
)
from rlinf.engines.process.weight_block import BlockAddress
from rlinf.engines.protocol import Engine
from rlinf.errors import UserError


def main(lifeline: int, commands: int) -> None:
    """Serve one parent.

    Args:
        lifeline: See :func:`~rlinf.child_process.watch_parent`.
        commands: Socket to the parent.
    """
    watch_parent(lifeline)
    # An end of the connection is the end of the parent.
    with Connection(commands) as connection, contextlib.suppress(EOFError, OSError):
        _serve(connection)


def _serve(connection: Connection) -> None:
    server = _Server()
    while True:
        message = connection.recv()
        try:
            answer: Done | Refused | Failed = Done(server.answer(message))
        except Exception as error:  # noqa: BLE001 - the parent decides; this process only reports
            answer = _bad_news(message, error)
        connection.send(answer)
        if isinstance(message, Call) and message.operation == "close":
            return


def _bad_news(message: Start | Call, error: Exception) -> Refused | Failed:
    """What an error means: a step asks for nothing that could be refused."""
    stepping = isinstance(message, Call) and message.operation == "step"
    if isinstance(error, UserError | ValueError) and not stepping:
        return Refused(error)
    return Failed("".join(traceback.format_exception(error)))


class _Server:
    """The engine, once it was built."""

    def __init__(self) -> None:
        self._engine: Engine
        self._address: BlockAddress | None = None
        self._weights: dict[str, torch.Tensor] = {}

    def answer(self, message: Start | Call) -> Any:
        if isinstance(message, Start):
            return self._start(message)
        engine = self._engine
        operations: dict[Operation, Callable[..., Any]] = {
            "submit": engine.submit,
            "step": engine.step,
            "progress": engine.progress,
            "abort": engine.abort,
            "update": self._update,
            "release": engine.release_memory,
            "restore": engine.restore_memory,
            "close": engine.close,
        }
        return operations[message.operation](*message.arguments)

    def _start(self, start: Start) -> About:
        torch.set_num_threads(start.threads)
        source = start.source
        if start.module is not None:
            # Ours: the parent wrote it.
            module = torch.load(start.module, map_location="cpu", mmap=True, weights_only=False)
            source = replace(source, module=module, shared=False)
        self._engine = start.config.build(source)
        return About(
            continues_exactly=self._engine.continues_exactly,
            keeps_stale_caches=self._engine.keeps_stale_caches,
            generates_between_steps=self._engine.generates_between_steps,
        )

    def _update(self, update: Update) -> None:
        weights = self._weights
        if update.address != self._address:
            weights = update.address.open()
        self._engine.adopt_weights(weights.items(), update.version)
        self._address, self._weights = update.address, weights
