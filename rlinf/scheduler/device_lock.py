"""Leases of devices: whole-set locks of a worker, and tickets that are queued ahead of time."""

from __future__ import annotations

from collections.abc import Iterable

from rlinf.scheduler.errors import WaitTimeout
from rlinf.scheduler.process import current_worker_name, require_process
from rlinf.scheduler.services.leases import LeaseError
from rlinf.scheduler.services.tracer import Tracer

__all__ = ["DeviceLock", "LeaseError", "LeaseTicket"]


class DeviceLock:
    """Sole use of a worker's devices, as a context manager.

    All devices are granted together and in the order of asking. The same worker may nest it. A
    worker without devices holds nothing and never waits. The lease of a worker that dies is free.

    Args:
        holder: Name of the worker.
        devices: Cluster-wide ranks of its devices.
    """

    def __init__(self, holder: str, devices: Iterable[int]) -> None:
        self._holder = holder
        self._devices = tuple(devices)

    def acquire(self) -> None:
        """Wait for the devices.

        Raises:
            WaitTimeout: They were not free within the deadline.
            LeaseError: The worker holds some of them, so waiting for all could deadlock.
        """
        if not self._devices:
            return
        process = require_process()
        what = f"devices {list(self._devices)}"
        with Tracer.trace_span("lease", cat="lease"):
            try:
                process.ask_driver("lease.lock", self._holder, self._devices, what=what)
            except WaitTimeout:
                process.ask_driver("lease.withdraw", self._holder, self._devices)
                raise

    def release(self) -> None:
        """Free the devices, or leave one level of nesting.

        Raises:
            LeaseError: The worker does not hold them.
        """
        if self._devices:
            require_process().ask_driver("lease.unlock", self._holder, self._devices)

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class LeaseTicket:
    """A place in the queue for some devices; picklable, so another worker can redeem it.

    Args:
        number: Number at the lease service.
        devices: Cluster-wide ranks of the devices.
    """

    def __init__(self, number: int, devices: Iterable[int]) -> None:
        self.number = number
        self.devices = tuple(devices)

    def acquire(self) -> None:
        """Wait until the devices are granted; counts where it is called again.

        Raises:
            WaitTimeout: They were not free within the deadline.
            LeaseError: The ticket was cancelled or released.
        """
        what = f"devices {list(self.devices)}"
        with Tracer.trace_span(f"lease {self.number}", cat="lease"):
            try:
                require_process().ask_driver("lease.acquire", self.number, what=what)
            except WaitTimeout:
                self.cancel()
                raise

    def release(self) -> None:
        """Undo one `acquire`; the last one frees the devices.

        Raises:
            LeaseError: It is not held.
        """
        require_process().ask_driver("lease.release", self.number)

    def cancel(self) -> None:
        """Give up the place or the devices; nothing happens if that was done already."""
        require_process().ask_driver("lease.cancel", self.number)

    def __enter__(self) -> LeaseTicket:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"LeaseTicket({self.number}, devices={list(self.devices)}, by {current_worker_name()})"
        )
