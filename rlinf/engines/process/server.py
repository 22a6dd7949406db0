"""The child: builds an engine, then does what the parent says until it goes away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlinf.engines.process.messages import About, Start, Update, pickled, unpickled
from rlinf.engines.process.weight_block import BlockAddress
from rlinf.engines.protocol import Engine
from rlinf.processes.supervised import serve


def main(lifeline: int, commands: int) -> None:
    """Serve one parent; see :func:`~rlinf.processes.supervised.serve`."""
    serve(lifeline, commands, _Server().answer)


class _Server:
    """The engine, once it was built."""

    def __init__(self) -> None:
        self._engine: Engine
        self._address: BlockAddress | None = None
        self._weights: dict[str, torch.Tensor] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do one operation; what the engine returned, pickled."""
        arguments = unpickled(message["arguments"]) if "arguments" in message else ()
        if message["operation"] == "start":
            return {"result": pickled(self._start(*arguments))}
        engine = self._engine
        operations: dict[str, Callable[..., Any]] = {
            "submit": engine.submit,
            "step": engine.step,
            "progress": engine.progress,
            "abort": engine.abort,
            "update": self._update,
            "release": engine.release_memory,
            "restore": engine.restore_memory,
            "close": engine.close,
        }
        return {"result": pickled(operations[message["operation"]](*arguments))}

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
