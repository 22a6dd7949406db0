"""Messages from worker to worker: send, receive, broadcast."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from functools import reduce
from itertools import compress
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.accelerators import AcceleratorType, CollectiveGroupOptions
from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import SchedulerError, SchedulerTypeError, SchedulerValueError
from rlinf.scheduler.process import AsyncWork, Process, finished_work, require_process
from rlinf.scheduler.services.mailbox import PAIR, Stream
from rlinf.scheduler.services.network import joined, slow_network, wire_bytes
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.endpoint import Reply
from rlinf.scheduler.transport.payload import LARGE_BYTES, Payload

if TYPE_CHECKING:
    import torch

    from rlinf.scheduler.transport.accelerator import PairTransfer

_MOST_BYTES_IN_FLIGHT = 256 << 20

Rank = int | Sequence[int]


class Messaging:
    """Point-to-point messages and broadcasts of a worker.

    Messages of a pair arrive in the order in which they were sent. A send does not wait for the
    receiver, nor a broadcast for its receivers, up to a bound on large data in flight. Sends and
    receives of one worker must come from one thread.
    """

    _worker_address: WorkerAddress
    _worker_info: WorkerInfo

    def __init__(self) -> None:
        self.__peer_infos: dict[str, WorkerInfo] = {}
        self.__heard: set[str] = set()
        self.__in_flight: dict[Hashable, deque[tuple[int, Future[Reply]]]] = {}

    def send(  # noqa: PLR0917 - the published signature
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        piggyback_payload: Any = None,
    ) -> AsyncWork | None:
        """Send an object to a worker.

        Args:
            object: Tensor, container or dataclass of tensors, or anything picklable.
            dst_group_name: Group of the receiver.
            dst_rank: Its rank, or the path of ranks of a child worker.
            async_op: Return a handle instead of waiting.
            options: For accelerator tensors: how the pair's first communication sets itself up.
            piggyback_payload: Something small that `recv` returns beside the object.

        Raises:
            WorkerDiedError: The receiver is dead.
            ValueError: An accelerator tensor is not contiguous.
        """
        peer = _name(dst_group_name, dst_rank)
        return self.__send(object, peer, ("object", piggyback_payload), async_op, options)

    def recv(
        self,
        src_group_name: str,
        src_rank: Rank,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
    ) -> Any:
        """Receive the next object from a worker; ``(object, payload)`` if the sender piggybacked.

        Raises:
            ValueError: A running group has no such rank.
            WorkerDiedError: The sender died.
            WaitTimeout: Nothing came within the deadline.
        """
        return self.__receive(_name(src_group_name, src_rank), "object", async_op)

    def send_tensor(
        self,
        tensor: torch.Tensor,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
    ) -> AsyncWork | None:
        """Send a tensor to a worker that calls `recv_tensor`; SchedulerTypeError for another."""
        if not hasattr(tensor, "dtype"):
            raise SchedulerTypeError(
                f"send_tensor sends a tensor, got a {type(tensor).__name__}; `send` takes anything"
            )
        peer = _name(dst_group_name, dst_rank)
        return self.__send(tensor, peer, ("tensor", None), async_op, options)

    def recv_tensor(
        self,
        tensor: torch.Tensor,
        src_group_name: str,
        src_rank: Rank,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
    ) -> AsyncWork | None:
        """Receive into a tensor of the sent shape and dtype; SchedulerValueError for another."""
        work: AsyncWork = self.__receive(_name(src_group_name, src_rank), "tensor", True)

        def fill() -> None:
            received = work.wait()
            if received.shape != tensor.shape or received.dtype != tensor.dtype:
                raise SchedulerValueError(
                    f"recv_tensor got a tensor of shape {tuple(received.shape)} and type "
                    f"{received.dtype} for one of {tuple(tensor.shape)} and {tensor.dtype}"
                )
            # Into its memory, as collectives do: parameters are filled, and no graph goes on here.
            tensor.detach().copy_(received.detach())

        if async_op:
            return work.then(fill)
        work.wait_alone()
        fill()
        return None

    def broadcast(
        self,
        object: Any = None,
        groups: Sequence[tuple[str, Any]] | None = None,
        src: tuple[str, Any] | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
    ) -> Any:
        """Send an object from one member to all others; every member calls this.

        Args:
            object: The object, on the source.
            groups: Members as ``(group, rank)``, ``(group, [ranks])``, or with a path of ranks
                (a tuple) in place of a rank.
            src: The source; the first member otherwise.
            async_op: Return a handle instead of waiting.
            options: Without effect, for programs that say it: a broadcast goes through the host's
                memory.

        Returns:
            The object, on every member.

        Raises:
            ValueError: No members, or the caller is not one.
            TypeError: ``groups`` is no list of pairs.
        """
        members = _members(groups)
        own = self._worker_address.get_name()
        source = members[0] if src is None else _members([src])[0]
        if own not in members or source not in members:
            outsider = own if own not in members else source
            raise SchedulerValueError(
                f"worker '{outsider}' is not among the members of the broadcast: {members}"
            )
        members = sorted(set(members))
        receivers = [member for member in members if member != source]
        stream = ("broadcast", tuple(members))
        if own == source:
            return self.__broadcast_out(object, receivers, stream, async_op)
        process = require_process()

        def finish(reply: Reply) -> Any:
            return process.decode(reply.payloads[0], *reply.value)

        def discard(reply: Reply) -> None:
            process.discard(reply.payloads[0], *reply.value)

        future = process.mailbox.receive((own, source, stream))
        work = AsyncWork(future, f"the broadcast from {source}", finish, future.cancel, discard)
        return work if async_op else work.wait_alone()

    def __broadcast_out(self, value: Any, receivers: list[str], stream: Any, async_op: bool) -> Any:
        process = require_process()
        process.settle_puts()
        own = self._worker_address.get_name()
        if not receivers:
            return finished_work(value, "a broadcast") if async_op else value
        hosts = [_resolve(process, receiver) for receiver in receivers]
        with Tracer.trace_span("broadcast", cat="communication"):
            # Shared memory is claimed for those alone who read it, and give it back.
            near = [process.endpoint.shares_memory(host) for host in hosts]
            readers = list(compress(hosts, near))
            shared = process.encode(value, readers) if readers else None
            copied = None if all(near) else process.encode(value, inline=True)
            payloads = [shared if is_near else copied for is_near in near]
            sizes = [payload.nbytes for payload in payloads if payload is not None]

            def deliver() -> list[Future[Reply] | None]:
                received, position = [], 0
                for receiver, host, payload, is_near in zip(
                    receivers, hosts, payloads, near, strict=True
                ):
                    assert payload is not None
                    place = (position, sum(near)) if is_near else ()
                    to = (receiver, own, stream)
                    received.append(_deliver(process, host, to, place, payload, payload.nbytes))
                    position += is_near
                return received

            slow = slow_network(process, own, *receivers)
            crossing: list[Future[Any]] = []
            received: list[Future[Any] | None]
            if slow is None:
                received = deliver()
            else:
                arrived = slow.cross(own, receivers, wire_bytes(value), deliver)
                received = [joined(arrived, itemgetter(place)) for place in range(len(receivers))]
                crossing = [arrived]
            earlier = [
                before
                for receiver, size, future in zip(receivers, sizes, received, strict=True)
                if future is not None and size >= LARGE_BYTES
                if (before := self.__bound((receiver, stream), size, future)) is not None
            ]
        if not (earlier or crossing):
            return finished_work(value, "a broadcast") if async_op else value
        what = f"{receivers} to receive earlier broadcasts" if earlier else "a broadcast to arrive"
        work = AsyncWork(reduce(_then, [*earlier, *crossing]), what, lambda _: value)
        return work if async_op else work.wait()

    def __send(
        self,
        value: Any,
        peer: str,
        head: tuple[str, Any],
        async_op: bool,
        options: CollectiveGroupOptions | None,
    ) -> AsyncWork | None:
        process = require_process()
        process.settle_puts()
        host = _resolve(process, peer)
        earlier: Future[Any] | None = None
        with Tracer.trace_span(f"send to {peer}", cat="communication"):
            pair = self.__pair_transfer(process, peer, options)
            own = self._worker_address.get_name()
            slow = slow_network(process, own, peer)
            payload = process.encode(value, [host], pair=pair)
            stream = (peer, own, PAIR)
            nbytes = payload.nbytes + (pair.nbytes if pair is not None else 0)

            def deliver() -> Future[Reply] | None:
                return _deliver(process, host, stream, head, payload, nbytes)

            arrived: Future[Any] | None = None
            if slow is None:
                received = deliver()
            else:
                arrived = slow.cross(own, peer, wire_bytes((value, head)), deliver)
                received = None if nbytes < LARGE_BYTES else joined(arrived)
            if received is not None:
                earlier = self.__bound(peer, nbytes, received)
            if pair is not None:
                pair.flush()
        what = f"{peer} to receive earlier messages"
        if arrived is not None:
            if earlier is not None:
                process.wait(earlier, what)
            work = AsyncWork(arrived, f"a message to reach {peer}", _nothing)
            return work if async_op else work.wait()
        if async_op:
            return AsyncWork(earlier, what, _nothing) if earlier else finished_work(None, what)
        if earlier is not None:
            process.wait(earlier, what)
        return None

    def __bound(self, to: Hashable, nbytes: int, received: Future[Reply]) -> Future[Any] | None:
        """What to wait for so that data in flight to a receiver, in one order, stay bounded."""
        window = self.__in_flight.setdefault(to, deque())
        window.append((nbytes, received))
        while window and window[0][1].done():  # received, or its receiver died, perhaps to return
            window.popleft()
        excess = sum(size for size, _ in window) - _MOST_BYTES_IN_FLIGHT
        last: Future[Any] | None = None
        for size, future in list(window)[:-1]:
            if excess <= 0:
                break
            excess -= size
            last = future
        return last

    def __pair_transfer(
        self, process: Process, peer: str, options: CollectiveGroupOptions | None
    ) -> PairTransfer | None:
        """How accelerator tensors go to a worker; None where this process has none."""
        own = self._worker_info
        on_cpu = own.accelerator_type in (AcceleratorType.NO_ACCEL, AcceleratorType.CPU_SLOT)
        if process.codec is None or on_cpu:
            return None
        from rlinf.scheduler.transport.accelerator import PairTransfer

        if peer not in self.__peer_infos:
            self.__peer_infos[peer] = process.ask_driver("registry.info", peer)
        return PairTransfer(own, self.__peer_infos[peer], options)

    def __receive(self, peer: str, kind: str, async_op: bool) -> Any:
        process = require_process()
        own = self._worker_address.get_name()

        def finish(reply: Reply) -> Any:
            sent_as, piggyback = reply.value
            if sent_as != kind:
                discard(reply)
                used, other = (
                    ("recv", "send_tensor") if kind == "object" else ("recv_tensor", "send")
                )
                raise SchedulerError(
                    f"{own} called {used} for a message that {peer} sent with {other}; use "
                    "send with recv, and send_tensor with recv_tensor"
                )
            value = process.decode(reply.payloads[0])
            return value if piggyback is None else (value, piggyback)

        def discard(reply: Reply) -> None:
            process.discard(reply.payloads[0])

        if peer not in self.__heard:
            process.ask_driver("registry.refuse_stranger", peer)
            self.__heard.add(peer)
        future = process.mailbox.receive((own, peer, PAIR))
        work = AsyncWork(future, f"a message from {peer}", finish, future.cancel, discard)
        if async_op:
            return work
        with Tracer.trace_span(f"receive from {peer}", cat="communication"):
            return work.wait_alone()


def _nothing(_: object) -> None:
    """Result of a send."""


def _deliver(  # noqa: PLR0917 - private
    process: Process, host: str, stream: Stream, head: Any, payload: Payload, nbytes: int
) -> Future[Reply] | None:
    """Bring a message to the mailbox of its receiver; of a large one, done when it is received."""
    if nbytes < LARGE_BYTES:
        process.endpoint.tell(host, "mail.deliver", stream, head, False, payloads=[payload])
        return None
    return process.endpoint.request(host, "mail.deliver", stream, head, True, payloads=[payload])


def _then(first: Future[Any], second: Future[Any]) -> Future[Any]:
    """Done when both are; fails as the one that fails."""
    return joined(first, lambda _: second)


def _resolve(process: Process, peer: str) -> str:
    """Endpoint of a worker, asked from the driver on first contact."""
    process.mailbox.check_alive(peer)
    addresses = process.mailbox.addresses
    if peer not in addresses:
        what = f"worker {peer} to start"
        addresses[peer] = process.ask_driver("registry.lookup", peer, what=what)
    return addresses[peer]


def _name(group: str, rank: Rank) -> str:
    return WorkerAddress(group, rank).get_name()


def _is_rank(value: object) -> bool:
    """Whether it is a whole number, NumPy's included, and no truth value."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _members(groups: Any) -> list[str]:
    """Worker names of a broadcast's ``groups`` argument, in the order given."""
    if groups is None or groups == []:
        raise SchedulerValueError("broadcast needs its members: groups=[('actor', [0, 1]), …]")
    if not isinstance(groups, list):
        raise SchedulerTypeError(f"groups must be a list of (group, ranks), got {groups!r}")
    names: list[str] = []
    for entry in groups:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
            raise SchedulerTypeError(
                f"each entry of groups must be (group name, rank or ranks), got {entry!r}"
            )
        group, ranks = entry
        for path in ranks if isinstance(ranks, list) else [ranks]:
            steps = path if isinstance(path, tuple) else (path,)
            if not steps or not all(map(_is_rank, steps)):
                raise SchedulerTypeError(f"{path!r} in {entry!r} is neither a rank nor a rank path")
            numbers = tuple(map(index, steps))
            names.append(_name(group, numbers if isinstance(path, tuple) else numbers[0]))
    if not names:
        raise SchedulerValueError(f"broadcast has no members: {groups!r}")
    return names
