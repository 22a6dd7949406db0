"""The child: builds an engine, then does what the parent says until it goes away.

Requests and completions are objects of this package and travel pickled: both sides are one program.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlinf.engines.config import EngineConfig
from rlinf.engines.process.weight_block import BlockAddress
from rlinf.engines.protocol import Engine, ModelSource
from rlinf.processes.allocator import keep_freed_memory
from rlinf.processes.child import serve

TOLD = ("continues_exactly", "keeps_stale_caches", "generates_between_steps")
"""What the parent is told of the engine when it is built."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the child builds."""

    config: EngineConfig  # without a process of its own
    source: ModelSource  # without a module
    module: str | None  # file with the pickled module of the source; None: it has none
    threads: int  # that torch computes with


def pickled(content: Any) -> np.ndarray:
    """[n] uint8."""
    return np.frombuffer(pickle.dumps(content), np.uint8)


def unpickled(data: np.ndarray) -> Any:
    """What :func:`pickled` was given."""
    return pickle.loads(data.tobytes())


def main(lifeline: int, commands: int) -> None:
    """Serve one parent; see :func:`~rlinf.processes.child.serve`."""
    serve(lifeline, commands, _Server().answer)


class _Server:
    _engine: Engine
    _address: BlockAddress | None = None
    _weights: dict[str, torch.Tensor]

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do one operation; what the engine returned, pickled."""
        operation = message["operation"]
        arguments = unpickled(message["arguments"]) if "arguments" in message else ()
        owner = self if operation in ("start", "replace_weights") else self._engine
        return {"result": pickled(getattr(owner, operation)(*arguments))}

    def start(self, start: Start) -> dict[str, bool]:
        torch.set_num_threads(start.threads)
        keep_freed_memory()
        source = start.source
        if start.module is not None:
            # Ours: the parent wrote it.
            module = torch.load(start.module, map_location="cpu", mmap=True, weights_only=False)
            source = replace(source, module=module, shared=False)
        self._engine = start.config.build(source)
        return {name: getattr(self._engine, name) for name in TOLD}

    def replace_weights(self, address: BlockAddress, version: int) -> None:
        """The weights that lie there are new."""
        weights = self._weights if address == self._address else address.open()
        self._engine.adopt_weights(weights.items(), version)
        self._address, self._weights = address, weights
