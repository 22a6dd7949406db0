"""Puts that nobody has to wait for.

A put into a channel without a maximal size is never refused, so a worker goes on without waiting
for the answer; waiting would double the time of an exchange. What others can observe stays in
order: messages to one process arrive in the order of sending, and before the worker turns to
another process, or its method ends, the answers have come in.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

_MOST = 64


class DeferredPuts:
    """Answers of puts that are still to come, all from one host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._host: str | None = None
        self._waiting: deque[Future[Any]] = deque()

    def add(self, host: str, put: Future[Any]) -> list[Future[Any]]:
        """Note a put; returns those to wait for before going on."""
        with self._lock:
            self._host = host
            self._waiting.append(put)
            due = []
            while self._waiting and (self._waiting[0].done() or len(self._waiting) > _MOST):
                due.append(self._waiting.popleft())
            return due

    def before(self, host: str | None) -> list[Future[Any]]:
        """Puts to wait for before this worker sends to ``host``; None is anyone."""
        if not self._waiting or host == self._host:
            return []
        with self._lock:
            due, self._waiting = list(self._waiting), deque()
            return due
