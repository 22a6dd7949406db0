"""What parent and child of an engine say to each other.

Requests and completions are objects of this package and travel pickled: both sides are one program.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlinf.engines.config import EngineConfig
from rlinf.engines.process.weight_block import BlockAddress
from rlinf.engines.protocol import ModelSource

Operation = Literal["submit", "step", "progress", "abort", "update", "release", "restore"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Build the engine; the answer holds an :class:`About`.

    Args:
        config: Which engine, without a process of its own.
        source: Its model, without a module.
        module: File with the pickled module of the source; None: it has none.
        threads: Threads that torch computes with.
    """

    config: EngineConfig
    source: ModelSource
    module: str | None
    threads: int


@dataclass(frozen=True)
class About:
    """What an engine says of itself."""

    continues_exactly: bool
    keeps_stale_caches: bool
    generates_between_steps: bool


@dataclass(frozen=True)
class Update:
    """The weights in a block are new.

    Args:
        address: Where they lie.
        version: Their number.
    """

    address: BlockAddress
    version: int


def pickled(content: Any) -> np.ndarray:
    """[n] uint8."""
    return np.frombuffer(pickle.dumps(content), np.uint8)


def unpickled(data: np.ndarray) -> Any:
    """What :func:`pickled` was given."""
    return pickle.loads(data.tobytes())
