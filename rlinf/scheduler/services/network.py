"""An imagined network: what crosses a slow link of it arrives as late as it would there.

The driver books every crossing, so that workers which share a link wait for each other; a process
holds back what it sends until it is due.
"""

from __future__ import annotations

import heapq
import io
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf.scheduler.address import SlowLinks, place_of
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, try_fail, try_resolve
from rlinf.scheduler.transport.payload import Payload

if TYPE_CHECKING:
    from rlinf.scheduler.process import Process

_TENSOR_HEADER_BYTES = 256

_log = logging.getLogger("rlinf")
_Result = TypeVar("_Result")


@dataclass
class _SharedLink:
    """What some workers share: how fast it is, and until when it is taken in each direction."""

    seconds_per_byte: float
    sends_until: float = -math.inf
    receives_until: float = -math.inf


class NetworkService:
    """The book of the links; ``endpoint`` answers for it."""

    def __init__(self, endpoint: Endpoint, slow: SlowLinks) -> None:
        self._delays = slow.delays
        self._links: dict[str, _SharedLink] = {}
        for members, bandwidth in slow.bandwidths:
            self._links |= dict.fromkeys(members, _SharedLink(1 / bandwidth))
        self._latest: dict[tuple[str, str], float] = {}
        self._random = Random(0)
        self._unseen = {_group(name) for pair in self._delays for name in pair}
        endpoint.register("network.is_slow", self.is_slow)
        endpoint.register("network.book", self.book)

    def is_slow(self, source: str, destinations: Sequence[str]) -> bool:
        """Whether a message from one worker to some others crosses a slow link."""
        self._unseen -= {_group(name) for name in (source, *destinations)}
        return any((place_of(source), place_of(name)) in self._delays for name in destinations)

    def book(self, source: str, destinations: Sequence[str], nbytes: int) -> float:
        """Let so many bytes cross from now on; seconds until the last bit has arrived everywhere.

        They leave their sender once, and each group that receives gets them once. A link takes one
        message after the other; the first bit arrives a delay after it was sent, and the receiving
        end takes in what has arrived while the rest is still on its way. Where delays are drawn, a
        message does not overtake the one before it.
        """
        now = time.monotonic()
        sender = place_of(source)
        links = [(name, self._delays.get((sender, name))) for name in map(place_of, destinations)]
        uplink = self._links.get(sender) or _SharedLink(0.0)
        first = max(now, uplink.sends_until)
        last = first + nbytes * uplink.seconds_per_byte
        arrived, charged = now, list[_SharedLink]()
        for name, link in links:
            if link is None:
                continue
            delay = link.draw(self._random)
            uplink.sends_until = last
            downlink = self._links.get(name) or _SharedLink(0.0)
            if not any(downlink is each for each in charged):
                charged.append(downlink)
                begun = max(first + delay, downlink.receives_until)
                taken_in = begun + nbytes * downlink.seconds_per_byte
                downlink.receives_until = max(last + delay, taken_in)
            before = self._latest.get((sender, name), now)
            there = max(before, last + delay, downlink.receives_until)
            self._latest[sender, name] = there
            arrived = max(arrived, there)
        return arrived - now

    def close(self) -> None:
        """Say of which groups no worker was heard of: their names may be mistyped."""
        if self._unseen:
            _log.warning(
                "cluster.net_emulation names %s, but no such worker sent or received anything",
                ", ".join(sorted(self._unseen)),
            )


class Network:
    """The imagined network as one process meets it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._slow: dict[tuple[str, tuple[str, ...]], bool] = {}
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def is_slow(self, source: str, *destinations: str) -> bool:
        """Whether a message crosses a slow link; asked from the driver once."""
        way = (source, destinations)
        if way not in self._slow:
            self._slow[way] = self._process.ask_driver("network.is_slow", source, destinations)
        return self._slow[way]

    def cross(
        self,
        source: str,
        destinations: str | Sequence[str],
        nbytes: int,
        arrive: Callable[[], _Result],
    ) -> Future[_Result]:
        """Call ``arrive`` when so many bytes have crossed; messages of a link keep their order."""
        arrived: Future[_Result] = Future()
        began = time.monotonic()
        receivers = (destinations,) if isinstance(destinations, str) else tuple(destinations)

        def enter(booked: Future[Reply]) -> None:
            try:
                self._add(began + booked.result().value, lambda: _settle(arrived, arrive))
            except Exception as error:  # noqa: BLE001 - the driver is gone: told who waits
                try_fail(arrived, error)

        endpoint, driver = self._process.endpoint, self._process.driver
        booking = endpoint.request(driver, "network.book", source, receivers, nbytes)
        booking.add_done_callback(enter)
        return arrived

    def _add(self, due: float, job: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._under_way, (due, next(self._numbers), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rlinf-network", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._under_way:
                    self._changed.wait()
                remaining = self._under_way[0][0] - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                    continue
                job = heapq.heappop(self._under_way)[2]
            job()


def slow_network(process: Process, source: str, *destinations: str) -> Network | None:
    """The imagined network where a message crosses a slow link of it."""
    network = process.network
    return network if network is not None and network.is_slow(source, *destinations) else None


def _settle(future: Future[Any], compute: Callable[[], Any]) -> None:
    try:
        try_resolve(future, compute())
    except Exception as error:  # noqa: BLE001 - raised where the future is waited for
        try_fail(future, error)


def joined(outer: Future[Any], then: Callable[[Any], Any] | None = None) -> Future[Any]:
    """What a future gives, or ``then`` makes of it, once that is no future itself."""
    result: Future[Any] = Future()

    def take(future: Future[Any], step: Callable[[Any], Any] | None = None) -> None:
        try:
            value = future.result() if step is None else step(future.result())
        except Exception as error:  # noqa: BLE001 - raised where the future is waited for
            try_fail(result, error)
            return
        if isinstance(value, Future):
            value.add_done_callback(take)
        else:
            try_resolve(result, value)

    outer.add_done_callback(lambda future: take(future, then))
    return result


def _group(worker: str) -> str:
    return place_of(worker).partition(":")[0]


def wire_bytes(value: Any) -> int:
    """What a value takes on a network: its tensors, a header each, and the pickle of the rest."""
    if isinstance(value, Payload):
        return wire_bytes(value.reference) if value.frames is None else value.nbytes
    counted = _Counted()
    # What cannot be pickled travels by reference on one machine: what was seen of it counts.
    with suppress(Exception):
        counted.dump(value)
    return counted.tensor_bytes + counted.written()


class _Counted(pickle.Pickler):
    """Leaves tensors and arrays out of the pickle, and counts them."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensor_bytes = 0

    def written(self) -> int:
        return self._file.tell()

    def persistent_id(self, value: Any) -> int | None:
        if not hasattr(value, "dtype") or not isinstance(getattr(value, "nbytes", None), int):
            return None
        self.tensor_bytes += value.nbytes + _TENSOR_HEADER_BYTES
        return 0
