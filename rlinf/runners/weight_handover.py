"""New weights on their way from a trainer to rollout workers, while both may be at work."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlinf.scheduler.worker_group import WorkerGroupFuncResult

Start = Callable[[], WorkerGroupFuncResult]


class WeightHandover:
    """Both sides of a synchronisation, begun at different times.

    The sender begins before its next training phase, the receivers when their rollout has ended. A
    version is sent only after the one before was taken, so that which weights a rollout has does
    not depend on who is faster.

    Args:
        send: Starts the sending side.
        receive: Starts the receiving side, whose methods return the version.
    """

    def __init__(self, send: Start, receive: Start) -> None:
        self._send = send
        self._receive = receive
        self._taken: threading.Event | None = None

    def begin(self) -> Callable[[], int]:
        """Let the sender begin.

        Returns:
            What lets the receivers take the weights, and returns their version; to be called once,
            whatever happens, or the sender waits in vain.
        """
        if self._taken is not None:
            self._taken.wait()
        sent = self._send()
        taken = self._taken = threading.Event()

        def receive() -> int:
            try:
                received = self._receive()
                sent.wait()
                return int(received.wait()[0])
            finally:
                taken.set()

        return receive
