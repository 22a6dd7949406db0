"""Action chunks in real time: the next one is computed while the present one is executed."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from typing import Any, Protocol, Self

import numpy as np

from rlinf.serving.requests import PREFIX, PREFIX_WEIGHTS


class ChunkSource(Protocol):
    """What chunks are asked of: :class:`~rlinf.serving.client.ActionClient`, or what wraps it."""

    metadata: dict[str, Any]

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """``actions`` [C, A] for one observation."""


def prefix_weights(count: int, *, delay: int, overlap: int) -> np.ndarray:
    """How firmly each of ``count`` committed actions binds the next chunk, [count] float32.

    1 for the first ``delay``, which are executed before it arrives; then falling, over what both
    chunks cover, to 0 from ``overlap`` on, where the next one is free (Black, Galliker and Levine
    2025, equation 5): with c = (overlap − i) / (overlap − delay + 1), the weight is
    c (e^c − 1) / (e − 1).
    """
    place = np.arange(count)
    c = np.clip((overlap - place) / max(overlap - delay + 1, 1), 0.0, 1.0)
    weights = np.where(place < delay, 1.0, c * np.expm1(c) / math.expm1(1.0))
    return weights.astype(np.float32)


class RealTimeChunks:
    """Gives one action per control step, and does not pause between two chunks.

    After ``execute`` actions of a chunk the next one is asked for, with the present observation.
    Until it arrives the present one goes on; of the new one as many actions are left out as were
    executed meanwhile. A policy that continues chunks (``prefix`` in the metadata) is told what is
    left of the present one, so that the two agree where they meet. When a chunk ends before the
    next one is there, the robot waits, as it does at every chunk without this.

    Args:
        client: Who answers; used by one thread at a time.
        execute: Actions of a chunk after which the next one is asked for; from 1 to C − 1. None:
            half of the chunk.
        delays: So many of the last delays are looked at; the longest is what is expected.

    Raises:
        ValueError: Chunks are too short for it.
    """

    def __init__(
        self, client: ChunkSource, *, execute: int | None = None, delays: int = 10
    ) -> None:
        self._client = client
        chunk = int(client.metadata["chunk"])
        if chunk < 2:
            raise ValueError(
                "the policy answers with one action at a time: there is no chunk to go on with "
                "meanwhile; ask the client itself for each action"
            )
        execute = chunk // 2 if execute is None else execute
        if not 1 <= execute < chunk:
            raise ValueError(f"execute = {execute} of chunks of {chunk}; legal: 1 to {chunk - 1}")
        self._execute, self._continues = execute, bool(client.metadata.get("prefix"))
        self._delays: deque[int] = deque(maxlen=delays)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chunks")
        self.waits: list[float] = []
        """Seconds that each control step waited for a chunk; 0 where it had one."""
        self._next: Future[dict[str, Any]] | None = None
        self._chunk: np.ndarray | None = None
        self._place = self._asked_at = 0

    def act(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action [A] to execute now; what was observed may be overwritten once it is there."""
        began = time.perf_counter()
        waited = 0.0
        if self._chunk is None or (self._next is None and self._place == len(self._chunk)):
            self._chunk, self._place = self._client.infer(observation)["actions"], 0
            waited = time.perf_counter() - began
        if self._next is not None and (self._next.done() or self._place == len(self._chunk)):
            asked, ready = self._next, self._next.done()
            wait([asked])  # whoever interrupts this leaves it to `reset`, which waits for it
            self._next = None  # one that is refused must not be met again
            chunk = asked.result()["actions"]
            waited += 0.0 if ready else time.perf_counter() - began
            self._delays.append(self._place - self._asked_at)
            self._chunk, self._place = chunk, self._place - self._asked_at
        if self._next is None and self._place >= self._execute:
            self._asked_at = self._place
            # It is sent later, when whoever observes may have written the same arrays anew.
            request = deepcopy(dict(observation)) | self._prefix(self._chunk[self._place :])
            self._next = self._thread.submit(self._client.infer, request)
        action: np.ndarray = self._chunk[self._place]
        self._place += 1
        self.waits.append(waited)
        return action

    def _prefix(self, left: np.ndarray) -> dict[str, np.ndarray]:
        """What of the present chunk the next one begins with, where the policy can be told."""
        if not self._continues:
            return {}
        delay = min(max(self._delays, default=len(left)), len(left))
        weights = prefix_weights(len(left), delay=delay, overlap=len(left))
        return {PREFIX: left, PREFIX_WEIGHTS: weights}

    def reset(self) -> None:
        """Begin another episode: what is left of the present chunk is forgotten."""
        if self._next is not None:
            self._next.exception()  # whatever it was answered is of no use any more
        self._next, self._chunk = None, None

    def close(self) -> None:
        """Wait for what was asked, and end the thread; the client stays open."""
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
