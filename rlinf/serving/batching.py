"""Requests of several clients become batches: a bounded wait, a bounded size, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rlinf.errors import RLinfError
from rlinf.serving.acting import ActingPolicy
from rlinf.serving.latency import Latencies
from rlinf.serving.requests import ActionRequest, RefusedRequestError

log = logging.getLogger(__name__)

_MOST_WAITING = 1024
ResultT = TypeVar("ResultT")


class PolicyFailure(RLinfError):  # noqa: N818 - a failure of the policy, not of who asks
    """The policy raised, and the message is that of the first failure; or its actions are none."""


@dataclass(frozen=True)
class Answer:
    """Actions [B, C, A] of one forward pass, under one version of the weights, and seconds."""

    actions: np.ndarray
    version: int
    queue: float
    act: float


@dataclass(eq=False)
class _Asked:
    request: ActionRequest
    answer: asyncio.Future[Answer]
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """Collects requests while the policy acts, and hands it those that wait.

    The policy has a thread of its own, in which weights are changed too: no batch is answered
    under two versions.

    Args:
        policy: Who acts.
        rows: Rows of a batch, at most; a request with more is a batch by itself.
        wait: Seconds that the first request of a batch waits for others, at most. It does not wait
            when everyone who could ask (``clients``) has asked.
        latencies: Where batches are counted.
    """

    def __init__(
        self, policy: ActingPolicy, *, rows: int, wait: float, latencies: Latencies
    ) -> None:
        self._policy, self._rows, self._wait, self._latencies = policy, rows, wait, latencies
        self._waiting: deque[_Asked] = deque()
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._stopping = False
        self.clients = 0

    async def ask(self, request: ActionRequest) -> Answer:
        """What the policy answers; whoever cancels this is left out of the batches to come.

        Raises:
            RefusedRequestError: The server is stopping, or too many wait.
            PolicyFailure: The policy raised, or gives no finite actions.
        """
        if self._stopping:
            raise RefusedRequestError("the server is stopping")
        if len(self._waiting) >= _MOST_WAITING:
            raise RefusedRequestError(f"{_MOST_WAITING} requests are waiting; ask again later")
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._changed.set()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if asked in self._waiting:
                self._waiting.remove(asked)
            raise

    async def exclusively(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function in the thread of the policy, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def stop(self) -> None:
        """Take no more requests; :meth:`run` returns when all that wait are answered."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Answer until stopped."""
        while self._waiting or not self._stopping:
            if self._waiting:
                batch = await self._collect()
                if batch:
                    await self._answer(batch)
            else:
                await self._next_change(None)
        self._thread.shutdown()

    async def _next_change(self, timeout: float | None) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return

    async def _collect(self) -> list[_Asked]:
        """The next batch, in the order of arrival, without those who have gone."""
        deadline = self._waiting[0].since + self._wait
        while not self._stopping:
            rows = sum(asked.request.count for asked in self._waiting)
            left = deadline - time.perf_counter()
            if rows >= self._rows or len(self._waiting) >= self.clients or left <= 0:
                break
            await self._next_change(left)
        batch: list[_Asked] = []
        rows = 0
        while self._waiting:
            rows += self._waiting[0].request.count
            if batch and rows > self._rows:
                break
            batch.append(self._waiting.popleft())
        return [asked for asked in batch if not asked.answer.done()]

    async def _answer(self, batch: Sequence[_Asked]) -> None:
        requests = [asked.request for asked in batch]
        begun = time.perf_counter()
        running = asyncio.ensure_future(
            self.exclusively(lambda: (self._policy.act(requests), self._policy.version))
        )
        await asyncio.wait([running])
        seconds = time.perf_counter() - begun
        error = running.exception()
        if error is not None and len(batch) > 1:
            # Whatever one request brought about must not fail those of other robots.
            log.warning("a batch of %d requests failed: %s; each is tried alone", len(batch),
                        _line(error))  # fmt: skip
            for asked in batch:
                if not asked.answer.done():
                    await self._answer([asked])
            return
        self._latencies.counters["batches"] += 1
        self._latencies.counters["rows"] += sum(request.count for request in requests)
        for number, asked in enumerate(batch):
            if asked.answer.done():  # who asked has gone
                continue
            if error is not None:
                failure = PolicyFailure(f"the policy failed: {_line(error)}")
                failure.__cause__ = error
                asked.answer.set_exception(failure)
                continue
            actions, version = running.result()
            if not np.isfinite(actions[number]).all():  # a robot must not get these
                failure = PolicyFailure("the policy gives no finite actions")
                asked.answer.set_exception(failure)
                continue
            queue = begun - asked.since
            asked.answer.set_result(Answer(actions[number], version, queue, seconds))


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
