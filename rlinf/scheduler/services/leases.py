"""Device leases: who may use which devices now, and who is next.

A ticket asks for a set of devices and is granted all of them or none. It is granted when each of
its devices is free and no earlier ticket that still waits wants any of them. Nobody waits while
holding, so no overlap of sets can deadlock: a holder may nest a lease over devices that it holds
already, and having to wait for others is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlinf.scheduler.errors import SchedulerError
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


class LeaseService:
    """Grants leases in the order in which they were asked for."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._tickets: dict[int, _Ticket] = {}
        self._next = 0
        names = ("reserve", "acquire", "release", "cancel", "lock", "unlock", "withdraw", "holders")
        for name in names:
            endpoint.register(f"lease.{name}", getattr(self, name))

    def reserve(self, holder: str, devices: Iterable[int]) -> int:
        """Queue a request now; `acquire` waits for it later."""
        self._next += 1
        self._tickets[self._next] = _Ticket(self._next, holder, frozenset(devices))
        self._settle()
        return self._next

    def acquire(self, number: int) -> Future[Reply] | None:
        """Wait until a ticket is granted; again by the same holder counts one more."""
        ticket = self._find(number)
        if ticket.granted:
            ticket.count += 1
            return None
        self._refuse_waiting_while_holding(ticket)
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

    def holders(self) -> dict[int, str]:
        """Who holds which device."""
        return {device: t.holder for t in self._granted() for device in sorted(t.devices)}

    def _granted(self) -> list[_Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.granted]

    def _covering(self, holder: str, devices: frozenset[int]) -> _Ticket | None:
        own = (t for t in self._granted() if t.holder == holder and t.devices >= devices)
        return next(own, None)

    def _find(self, number: int) -> _Ticket:
        ticket = self._tickets.get(number)
        if ticket is None:
            raise LeaseError(f"lease {number} is over: released, cancelled, or its holder died")
        return ticket

    def _refuse_waiting_while_holding(self, ticket: _Ticket) -> None:
        held = [t for t in self._granted() if t.holder == ticket.holder and t.count]
        if held and self._covering(ticket.holder, ticket.devices) is None:
            devices = sorted({device for t in held for device in t.devices})
            raise LeaseError(
                f"'{ticket.holder}' holds devices {devices} and asks for {sorted(ticket.devices)}: "
                "waiting while holding could deadlock. Release first, or ask for all at once."
            )

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
                self._wake(ticket)
            busy |= ticket.devices

    @staticmethod
    def _wake(ticket: _Ticket) -> None:
        waiting, ticket.waiting = ticket.waiting, []
        ticket.count += sum(try_resolve(future, Reply()) for future in waiting)
