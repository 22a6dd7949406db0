"""Whether a process is over."""

import time

import psutil


def ended(process: psutil.Process) -> bool:
    """Wait for the end of a process, ten seconds at most; what is left of it may stay."""
    for _ in range(1000):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False
