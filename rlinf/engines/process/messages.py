"""What parent and child of an engine say to each other, pickled over a socket pair.

Every call is answered by exactly one of :class:`Done`, :class:`Refused` or :class:`Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlinf.engines.config import EngineConfig
from rlinf.engines.process.weight_block import BlockAddress
from rlinf.engines.protocol import ModelSource

Operation = Literal["submit", "step", "progress", "abort", "update", "release", "restore", "close"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Build the engine; the first call. Its answer holds an :class:`About`.

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
class Call:
    """One operation.

    Args:
        operation: What to do.
        arguments: A request, numbers of requests, or an :class:`Update`.
    """

    operation: Operation
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Update:
    """The weights in a block are new.

    Args:
        address: Where they lie.
        version: Their number.
    """

    address: BlockAddress
    version: int


@dataclass(frozen=True)
class Done:
    """It was done.

    Args:
        result: What the engine returned.
    """

    result: Any = None


@dataclass(frozen=True)
class Refused:
    """The call, which was no step, was not legal and changed nothing.

    Args:
        error: What the engine raised.
    """

    error: Exception


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on.

    Args:
        stack: Where and why.
    """

    stack: str
