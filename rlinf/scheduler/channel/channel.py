"""Channels: named queues through which workers and the driver hand items to each other."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

from rlinf.scheduler.address import WorkerAddress
from rlinf.scheduler.errors import (
    LocalChannelError,
    SchedulerTypeError,
    SchedulerUsageError,
    SchedulerValueError,
    WithdrawnError,
)
from rlinf.scheduler.process import (
    AsyncWork,
    Process,
    abandoned,
    current_worker,
    current_worker_name,
    give_back_when_done,
    require_process,
)
from rlinf.scheduler.services.channels import ChannelService, Ticket
from rlinf.scheduler.services.network import joined, slow_network, wire_bytes
from rlinf.scheduler.services.registry import ChannelRecord
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.endpoint import Endpoint, Reply
from rlinf.scheduler.transport.payload import Payload

if TYPE_CHECKING:
    from rlinf.scheduler.worker import Worker

DEFAULT_KEY = "default_queue"

_tickets = itertools.count()
_Result = TypeVar("_Result")


@dataclass(order=True)
class WeightedItem:
    """An item of a channel with its weight for ``get_batch``."""

    weight: int
    item: Any = field(compare=False)


class Channel:
    """A queue with a name; every key of it is a queue of its own.

    It can be passed to workers as an argument. It is no process: it lives at the driver, at a
    worker (``host``), or at a small process of another node.
    """

    def __init__(
        self, record: ChannelRecord, *, endpoint: Endpoint | None = None, at_worker: bool = False
    ) -> None:
        self._record = record
        self._endpoint = endpoint
        self._at_worker = at_worker
        self._pins: dict[Hashable, str] = {}
        self._current_worker = current_worker()

    @classmethod
    def create(  # noqa: PLR0917 - the published signature
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        disable_distributed_log: bool = True,
        host: WorkerAddress | str | None = None,
    ) -> Channel:
        """Create a channel, on the driver or in a worker.

        Args:
            name: Name, unique in the cluster. If it exists, a warning is given and the existing
                channel returned, with its own maximal size.
            maxsize: Most items per key; 0 for any number.
            distributed: Keep a key on the node of the worker that uses it first.
            node_rank: Node that hosts the channel.
            local: Only for this process, without a name that others can connect to; it takes no
                ``async_op``.
            disable_distributed_log: Accepted for programs that pass it; channels write no log.
            host: Worker that hosts the channel: an item that it takes travels once, not twice.

        Raises:
            SchedulerUsageError: There is no cluster.
            SchedulerTypeError: ``maxsize`` is no whole number.
        """
        if not isinstance(maxsize, SupportsIndex):
            raise SchedulerTypeError(
                f"maxsize of channel '{name}' is a number of items, or 0 for any, got {maxsize!r}"
            )
        process = require_process()  # which waits for a local channel, too
        if local:
            endpoint = Endpoint()
            ChannelService(endpoint, process.mailbox.check_alive)
            record = ChannelRecord(name, maxsize, {0: endpoint.address}, False)
            channel = cls(record, endpoint=endpoint)
            endpoint.request(endpoint.address, "channel.open", name, maxsize).result()
            return channel
        hosts = _hosts(process, distributed, node_rank, host)
        worker = host.get_name() if isinstance(host, WorkerAddress) else host
        wanted = ChannelRecord(name, maxsize, hosts, distributed, worker)
        what = f"channel '{name}' to open"
        record, new = process.ask_driver("registry.add_channel", wanted, what=what)
        if not new:
            warnings.warn(
                f"channel '{name}' exists: connecting to it (its maxsize is {record.maxsize})",
                stacklevel=2,
            )
            return cls(record)
        return cls(record, at_worker=host is not None)

    @classmethod
    def connect(cls, name: str, current_worker: Worker | None = None) -> Channel:
        """Connect to a channel that exists; SchedulerValueError if there is none."""
        record = require_process().ask_driver("registry.channel", name)
        if record is None:
            raise SchedulerValueError(
                f"there is no channel '{name}': create it first with Channel.create('{name}')"
            )
        return cls(record)

    @property
    def name(self) -> str:
        """Name of the channel."""
        return self._record.name

    @property
    def maxsize(self) -> int:
        """Most items per key; 0 for any number."""
        return self._record.maxsize

    @property
    def is_local(self) -> bool:
        """Whether only this process can use it."""
        return self._endpoint is not None

    @property
    def distributed(self) -> bool:
        """Whether keys live on the node that uses them first."""
        return self._record.distributed

    def put(
        self, item: Any, weight: int = 0, key: Hashable = DEFAULT_KEY, async_op: bool = False
    ) -> AsyncWork | None:
        """Add an item; waits while the key's queue is full.

        In a worker, a put into a channel without a maximal size does not wait for its answer; if
        the channel was closed, the next operation or the end of the worker's method raises.

        Args:
            item: Anything that can be sent.
            weight: What it counts in `get_batch`, 0 or more.
            key: Queue to add to.
            async_op: Return a handle that is done when the item was accepted.

        Raises:
            WaitTimeout: The queue stayed full for the deadline.
            SchedulerTypeError: The key is not hashable; so from every method with a key.
            SchedulerValueError: The weight is none.
            LocalChannelError: ``async_op`` of a local channel; so from every method that has it.
        """
        self._check_async(async_op)
        weight = _weight(weight)
        ticket, what = _ticket(), f"room in channel '{self.name}'"
        with Tracer.trace_span(f"put {self.name}", cat="channel"):
            payload = self._encode(item, key)
            future = self._put("put", key, weight, ticket, payload=payload)
            if async_op:
                return AsyncWork(future, what, lambda _: None)
            if self.maxsize == 0 and not self.is_local and current_worker() is not None:
                require_process().defer_put(self._host(key), future)
            else:
                self._wait(future, what, partial(self._withdraw, key, ticket))
        return None

    def post(self, item: Any, weight: int = 0, key: Hashable = DEFAULT_KEY) -> None:
        """Add an item to a channel without maximal size, asking for no answer.

        For streams that end in a way of their own: a channel that was closed swallows the item, and
        on the local runtime the item itself is passed, which nobody changes any more.

        Raises:
            SchedulerUsageError: The channel has a maximal size.
            WorkerDiedError: The process that hosts it is gone.
        """
        if self.maxsize:
            raise SchedulerUsageError(
                f"channel '{self.name}' holds at most {self.maxsize} items: use put, which waits"
            )
        weight = _weight(weight)
        payload = self._encode(item, key, shared=True)
        endpoint, host = self._reach(key)

        def put() -> None:
            endpoint.tell(host, "channel.put", self.name, key, weight, None, payloads=[payload])

        self._after_crossing(payload, put)

    def put_nowait(self, item: Any, weight: int = 0, key: Hashable = DEFAULT_KEY) -> None:
        """Add an item; ``asyncio.QueueFull`` if the key's queue is full."""
        weight = _weight(weight)
        future = self._put("put_nowait", key, weight, payload=self._encode(item, key))
        require_process().wait(future, f"channel '{self.name}'")

    def get(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> Any:
        """Take the oldest item; waits while there is none, WaitTimeout after the deadline.

        Of a handle (``async_op``) that nobody has any more the item is put back, before the others.
        """
        return self._take(key, None, async_op)

    def get_nowait(self, key: Hashable = DEFAULT_KEY) -> Any:
        """Take the oldest item; ``asyncio.QueueEmpty`` if there is none."""
        ask = self._asking(key)
        future = self._arriving(ask("get_nowait", _ticket()))
        try:
            reply = require_process().wait(future, f"channel '{self.name}'")
        except BaseException:
            give_back_when_done(future, partial(_put_back, ask))
            raise
        return self._first(reply)

    def get_batch(
        self, target_weight: int = 0, key: Hashable = DEFAULT_KEY, async_op: bool = False
    ) -> Any:
        """Take a list of items, oldest first, as long as their weights sum to at most the target.

        Waits for more items until the target is reached or the next item would exceed it; a first
        item heavier than the target gives ``[]``. Items of weight 0 alone never reach a target, so
        with only such items it returns as soon as it has some and the queue is empty.
        """
        return self._take(key, _weight(target_weight), async_op)

    def qsize(self, key: Hashable = DEFAULT_KEY) -> int:
        """Number of items under a key."""
        size: int = self._ask("size", key).value[0]
        return size

    def empty(self, key: Hashable = DEFAULT_KEY) -> bool:
        """Whether a key has no item."""
        return self.qsize(key) == 0

    def full(self, key: Hashable = DEFAULT_KEY) -> bool:
        """Whether a key holds as many items as it may."""
        size, maxsize = self._ask("size", key).value
        return bool(0 < maxsize <= size)

    def is_here(self, key: Hashable = DEFAULT_KEY) -> bool:
        """Whether a key lives in this process, so that what it has is given without a wait."""
        endpoint, host = self._reach(key)
        return host == endpoint.address

    def close(self, reason: str | None = None) -> None:
        """End the channel: whoever waits on it, or uses it later, gets an error with the reason."""
        endpoint = self._endpoint or require_process().endpoint
        for address in set(self._record.hosts.values()):
            future = endpoint.request(address, "channel.close", self.name, reason)
            require_process().wait(future, f"channel '{self.name}' to close")
        if not self.is_local:
            require_process().ask_driver("registry.remove_channel", self.name)

    def __str__(self) -> str:
        """All items of the default key, without taking them."""
        process = require_process()
        reply = self._ask("items", DEFAULT_KEY)
        items = [
            payload.reference if payload.frames is None or process.codec is None
            else process.codec.decode(payload, peek=True)
            for payload in reply.payloads
        ]  # fmt: skip
        return str(list(map(WeightedItem, reply.value, items)))

    def __reduce__(self) -> Any:
        if self.is_local:
            raise SchedulerUsageError(
                f"channel '{self.name}' was created with local=True, so it cannot leave its process"
            )
        return _rebuild, (self._record, self._at_worker)

    def _encode(self, item: Any, key: Hashable, *, shared: bool = False) -> Payload:
        process = require_process()
        own = self._at_worker and self._host(key) == process.endpoint.address
        if self.is_local or own:
            return Payload(reference=item)
        # For its host until it is given to someone: so its memory is given back with that one.
        return process.encode(item, [self._host(key)], shared=shared)

    def _host(self, key: Hashable) -> str:
        try:
            hash(key)
        except TypeError:
            raise SchedulerTypeError(
                f"a key of channel '{self.name}' has to be hashable, such as text, a number or a "
                f"tuple of those, got {key!r}"
            ) from None
        if not self._record.distributed or len(self._record.hosts) == 1:
            return self._record.main_host
        host = self._pins.get(key)
        if host is None:
            process = require_process()
            host = process.ask_driver("registry.pin", self.name, key, process.node_rank)
            self._pins[key] = host
        return host

    def _reach(self, key: Hashable) -> tuple[Endpoint, str]:
        """By which endpoint, and at which, a key is reached after earlier puts elsewhere."""
        host = self._host(key)
        if self._endpoint is not None:
            return self._endpoint, host
        process = require_process()
        abandoned.take_back()
        process.settle_puts(host)
        return process.endpoint, host

    def _asking(self, key: Hashable) -> Callable[..., Future[Reply]]:
        """How to ask the host of a key for something, in this cluster and no later one."""
        endpoint, host = self._reach(key)

        def ask(kind: str, *arguments: Any, payloads: Sequence[Payload] = ()) -> Future[Reply]:
            return endpoint.request(
                host, f"channel.{kind}", self.name, key, *arguments, payloads=payloads
            )

        return ask

    def _put(self, kind: str, key: Hashable, *arguments: Any, payload: Payload) -> Future[Reply]:
        endpoint, host = self._reach(key)

        def put() -> Future[Reply]:
            return endpoint.request(
                host, f"channel.{kind}", self.name, key, *arguments, payloads=[payload]
            )

        return self._after_crossing(payload, put)

    def _after_crossing(
        self, payload: Payload, put: Callable[[], _Result]
    ) -> _Result | Future[Any]:
        """Put an item, or promise to once it has crossed a slow link to where the channel is."""
        process = require_process()
        if self.is_local or process.network is None:
            return put()
        way = (current_worker_name(), self._place)
        slow = slow_network(process, *way)
        return joined(slow.cross(*way, wire_bytes(payload), put)) if slow else put()

    def _arriving(self, answer: Future[Reply]) -> Future[Reply]:
        """An answer with items, once they have crossed a slow link from where the channel is."""
        process = require_process()
        if self.is_local or process.network is None:
            return answer
        way = (self._place, current_worker_name())
        if (slow := slow_network(process, *way)) is None:
            return answer

        def cross(reply: Reply) -> Future[Reply]:
            return slow.cross(*way, sum(map(wire_bytes, reply.payloads)), lambda: reply)

        return joined(answer, cross)

    @property
    def _place(self) -> str:
        return self._record.worker or f"{self.name}:0"

    def _ask(self, kind: str, key: Hashable) -> Reply:
        reply: Reply = require_process().wait(self._asking(key)(kind), f"channel '{self.name}'")
        return reply

    def _take(self, key: Hashable, target: int | None, async_op: bool) -> Any:
        """One item for no target weight, else a batch."""
        self._check_async(async_op)
        what = "an item" if target is None else f"items of weight {target}"
        what = f"{what} of channel '{self.name}', key {key!r}"
        finish, ticket = self._first if target is None else self._all, _ticket()
        ask = self._asking(key)
        future = self._arriving(ask("get", target, ticket))
        withdraw, put_back = partial(ask, "withdraw", ticket), partial(_put_back, ask)
        if async_op:
            return AsyncWork(future, what, finish, withdraw, put_back)
        with Tracer.trace_span(f"get {self.name}", cat="channel"):
            try:
                reply = self._wait(future, what, withdraw)
            except BaseException:
                give_back_when_done(future, put_back)
                raise
            return finish(reply)

    def _check_async(self, async_op: bool) -> None:
        if async_op and self.is_local:
            raise LocalChannelError(
                f"channel '{self.name}' was created with local=True, so it takes no async_op: "
                "leave it out, or create the channel without local"
            )

    def _wait(
        self, future: Future[Reply], what: str, withdraw: Callable[[], Future[Reply]]
    ) -> Reply:
        process = require_process()
        try:
            reply: Reply = process.wait(future, what)
        except BaseException as error:
            if future.done():
                raise
            # Without this a later item would be given to a request that nobody waits for.
            withdrawal = withdraw()
            if not isinstance(error, Exception):  # an interrupt waits for nothing
                raise
            if process.wait(withdrawal, "a withdrawal").value:
                raise
            reply = process.wait(future, what)
        return reply

    def _withdraw(self, key: Hashable, ticket: Ticket) -> Future[Reply]:
        endpoint = self._endpoint or require_process().endpoint
        return endpoint.request(self._host(key), "channel.withdraw", self.name, key, ticket)

    def _first(self, reply: Reply) -> Any:
        return self._all(reply)[0]

    def _all(self, reply: Reply) -> list[Any]:
        if reply.value is None:
            raise WithdrawnError(
                f"the wait for items of channel '{self.name}' was given up; ask for them anew"
            )
        process = require_process()
        return [process.decode(payload) for payload in reply.payloads]


def _weight(value: Any) -> Any:
    """A weight, checked here: one that cannot be added would break the queue of others."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, int | float) or not number >= 0:
        raise SchedulerValueError(
            f"the weight of an item or a batch is a number of 0 or more, got {value!r}"
        )
    return number


def _put_back(ask: Callable[..., Future[Reply]], reply: Reply) -> None:
    """Put items back that nobody took, to the host that ``ask`` asks."""
    if reply.payloads:
        ask("restore", reply.value, payloads=reply.payloads)


def _rebuild(record: ChannelRecord, at_worker: bool) -> Channel:
    return Channel(record, at_worker=at_worker)


def _ticket() -> Ticket:
    return Ticket(current_worker_name(), require_process().number, next(_tickets))


def _hosts(
    process: Process, distributed: bool, node_rank: int, host: WorkerAddress | str | None
) -> dict[int, str]:
    """Endpoints that host a new channel, by node."""
    workers: dict[int, str | None]
    if host is None:
        workers = process.ask_driver("cluster.channel_hosts", distributed, node_rank)
    else:
        workers = {0: host if isinstance(host, str) else host.get_name()}
    return {
        node: process.ask_driver("registry.lookup", name, what=f"worker {name} to start")
        if name
        else process.driver
        for node, name in workers.items()
    }
