"""What Ctrl-C does to a run: first ask it to end cleanly, then end it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yield a flag that the first Ctrl-C (or SIGTERM) sets; a second one ends the process.

    The runner looks at the flag between two steps, commits a checkpoint and returns. The second
    signal kills the child processes and exits with 130 without waiting for anything.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            _kill_children()
            os._exit(INTERRUPTED)
        stop.set()
        # A handler may interrupt a buffered write, so it writes past the buffers.
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            b"\nStopping: the current step ends, then a checkpoint is committed. "
            b"Ctrl-C again ends the run at once.\n",
        )

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
