"""Device leases: who may use which devices now, and who is next.

A ticket is granted all its devices or none: when each is free and no earlier ticket that still
waits wants any of them. Nobody waits while holding, so no overlap of sets can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.process import current_worker_name, require_process
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, try_fail, try_resolve


class LeaseError(SchedulerError):
    """A lease that cannot be: released by another, or asked for in a way that would deadlock."""


@dataclass
class _Ticket:
    number: int
    holder: str
    devices: frozenset[int]
    granted: bool = False
    count: int = 0
    waiting: list[Future[Reply]] = field(default_factory=list)


# Of all clusters of a process, one after the other: who still gives up a ticket of the last one
# must not take away one of this.
_numbers = count(1)


class LeaseService:
    """Grants leases in the order in which they were asked for; ``check_alive`` raises for a worker
    that died, whose request may arrive after the news of its end."""

    def __init__(self, endpoint: Endpoint, check_alive: Callable[[str], None]) -> None:
        self._check_alive = check_alive
        self._tickets: dict[int, _Ticket] = {}
        for name in ("reserve", "acquire", "release", "cancel", "lock", "unlock", "withdraw"):
            endpoint.register(f"lease.{name}", getattr(self, name))

    def reserve(self, holder: str, devices: Iterable[int]) -> int:
        """Queue a request now; `acquire` waits for it later."""
        self._check_alive(holder)
        number = next(_numbers)
        self._tickets[number] = _Ticket(number, holder, frozenset(devices))
        self._settle()
        return number

    def acquire(self, number: int) -> Future[Reply] | None:
        """Wait until a ticket is granted; again by the same holder counts one more."""
        ticket = self._tickets.get(number)
        if ticket is None:
            raise LeaseError(f"lease {number} is over: released, cancelled, or its holder died")
        if ticket.granted:
            ticket.count += 1
            return None
        held = [t for t in self._granted() if t.holder == ticket.holder and t.count]
        if held and self._covering(ticket.holder, ticket.devices) is None:
            devices = sorted({device for t in held for device in t.devices})
            raise LeaseError(
                f"'{ticket.holder}' holds devices {devices} and asks for {sorted(ticket.devices)}: "
                "waiting while holding could deadlock. Release first, or ask for all at once."
            )
        future: Future[Reply] = Future()
        ticket.waiting.append(future)
        self._settle()
        return future

    def release(self, number: int) -> None:
        """Undo one `acquire`; the last one frees the devices."""
        ticket = self._tickets.get(number)
        if ticket is None or ticket.count < 1:
            raise LeaseError(f"lease {number} is not held, so it cannot be released")
        ticket.count -= 1
        if ticket.count == 0:
            self.cancel(number)

    def cancel(self, number: int) -> None:
        """Drop a ticket, held or waiting; nothing happens if it is gone already."""
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return
        for future in ticket.waiting:
            try_fail(future, LeaseError(f"lease {number} of '{ticket.holder}' was cancelled"))
        self._settle()

    def lock(self, holder: str, devices: Iterable[int]) -> Future[Reply] | None:
        """Reserve and acquire, or nest in what the holder has or is about to have."""
        self._check_alive(holder)
        wanted = frozenset(devices)
        held = self._covering(holder, wanted)
        if held is not None:
            held.count += 1
            return None
        number = self.reserve(holder, wanted)
        try:
            return self.acquire(number)
        except LeaseError:
            self.cancel(number)
            raise

    def unlock(self, holder: str, devices: Iterable[int]) -> None:
        """Undo one `lock`."""
        wanted = frozenset(devices)
        held = self._covering(holder, wanted)
        if held is None or held.count < 1:
            owners = sorted({t.holder for t in self._granted() if t.devices & wanted})
            owner = f"held by {owners}" if owners else "free"
            raise LeaseError(
                f"'{holder}' cannot release devices {sorted(wanted)}: they are {owner}"
            )
        self.release(held.number)

    def withdraw(self, holder: str, devices: Iterable[int]) -> None:
        """Stop waiting in `lock`, after a deadline."""
        wanted = frozenset(devices)
        for ticket in list(self._tickets.values()):
            if ticket.holder == holder and ticket.devices == wanted and ticket.waiting:
                self.cancel(ticket.number)

    def release_holder(self, holder: str) -> None:
        """Free everything of a holder that died."""
        for ticket in [t for t in self._tickets.values() if t.holder == holder]:
            self.cancel(ticket.number)

    def _granted(self) -> list[_Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.granted]

    def _covering(self, holder: str, devices: frozenset[int]) -> _Ticket | None:
        own = (t for t in self._granted() if t.holder == holder and t.devices >= devices)
        return next(own, None)

    def _settle(self) -> None:
        """Grant what can be granted, first come first served."""
        busy = {device for ticket in self._granted() for device in ticket.devices}
        for ticket in list(self._tickets.values()):
            if ticket.granted:
                continue
            # A lease that its holder waits for inside another one of its own is nested in that.
            nested = ticket.waiting and self._covering(ticket.holder, ticket.devices) is not None
            if nested or not ticket.devices & busy:
                ticket.granted = True
                waiting, ticket.waiting = ticket.waiting, []
                for future in waiting:
                    ticket.count += 1  # first: whoever gave up waiting releases it at once
                    if not try_resolve(future, Reply()):
                        ticket.count -= 1
            busy |= ticket.devices


class DeviceLock:
    """Sole use of a worker's devices, as a context manager that the worker may nest.

    All devices are granted together and in the order of asking. A worker without devices never
    waits. The lease of a worker that dies is free.
    """

    def __init__(self, holder: str, devices: Iterable[int]) -> None:
        self._holder = holder
        self._devices = tuple(devices)

    def acquire(self) -> None:
        """Wait for the devices: WaitTimeout after the deadline, LeaseError if it would deadlock."""
        if not self._devices:
            return
        process, own = require_process(), (self._holder, self._devices)

        def release(granted: Future[Reply]) -> None:
            if not granted.cancelled() and granted.exception() is None:
                process.endpoint.request(process.driver, "lease.unlock", *own)

        with Tracer.trace_span("lease", cat="lease"):
            future = process.endpoint.request(process.driver, "lease.lock", *own)
            try:
                process.wait(future, _what(self._devices))
            except BaseException:
                if not future.done():  # whatever ended the wait: nobody would use what is granted
                    future.add_done_callback(release)
                    process.endpoint.request(process.driver, "lease.withdraw", *own)
                raise

    def release(self) -> None:
        """Free the devices, or leave one level of nesting; LeaseError if not held."""
        if self._devices:
            require_process().ask_driver("lease.unlock", self._holder, self._devices)

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class LeaseTicket:
    """A place in the queue for devices, by its number; another worker can redeem it."""

    def __init__(self, number: int, devices: Iterable[int]) -> None:
        self.number = number
        self.devices = tuple(devices)

    def acquire(self) -> None:
        """Wait until the devices are granted; counts where it is called again.

        WaitTimeout after the deadline, LeaseError if the ticket was cancelled or released.
        """
        process = require_process()
        with Tracer.trace_span(f"lease {self.number}", cat="lease"):
            future = process.endpoint.request(process.driver, "lease.acquire", self.number)
            try:
                process.wait(future, _what(self.devices))
            except BaseException:
                if not future.done():
                    process.endpoint.request(process.driver, "lease.cancel", self.number)
                raise

    def release(self) -> None:
        """Undo one `acquire`; the last one frees the devices. LeaseError if not held."""
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


def _what(devices: tuple[int, ...]) -> str:
    return f"devices {list(devices)}"
