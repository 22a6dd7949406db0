"""Messages from worker to worker, kept at the receiver until it asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from rlinf.scheduler.errors import WorkerDiedError
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, try_fail, try_resolve
from rlinf.scheduler.transport.payload import Payload

Stream = tuple[str, str, Hashable]
"""Receiver, sender, and which of their streams."""

PAIR = "pair"
"""The stream of messages to one receiver."""

_Message = tuple[Any, Sequence[Payload], Future[Reply] | None]


class MailboxService:
    """Mailboxes of the workers that live in this process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._messages: dict[Stream, deque[_Message]] = {}
        self._waiting: dict[Stream, deque[Future[Reply]]] = {}
        self._dead: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        self.discard: Callable[..., object] = lambda payload, receiver=0, receivers=1: None
        self.on_death: Callable[[str, WorkerDiedError], object] = lambda worker, error: None
        endpoint.register("mail.deliver", self._deliver)
        endpoint.register("mail.dead", self.mark_dead)
        endpoint.register("mail.forget", self._forget)
        endpoint.register("mail.left", self._leave)

    def receive(self, stream: Stream) -> Future[Reply]:
        """The next message of a stream, now or when it comes."""
        future: Future[Reply] = Future()
        with self._endpoint.lock:
            if queue := self._messages.get(stream):
                head, payloads, acknowledge = queue.popleft()
                future.set_result(Reply(head, payloads))
                if acknowledge is not None:
                    try_resolve(acknowledge, Reply())
            elif stream[1] in self._dead:
                future.set_exception(_died(stream[1], self._dead[stream[1]]))
            else:
                self._waiting.setdefault(stream, deque()).append(future)
        return future

    def check_alive(self, worker: str) -> None:
        """Raise if a worker is known to be dead."""
        if worker in self._dead:
            raise _died(worker, self._dead[worker])

    def mark_dead(self, worker: str, cause: str, address: str | None = None) -> None:
        """Fail everyone here who waits for a worker that died, or for its endpoint, and drop what
        it was sent and has not received."""
        self.on_death(worker, _died(worker, cause))
        if address is not None:
            self._endpoint.forget(address, _died(worker, cause))
        self._dead[worker] = cause
        self.addresses.pop(worker, None)
        for stream, waiting in self._waiting.items():
            if stream[1] == worker:
                while waiting:
                    try_fail(waiting.popleft(), _died(worker, cause))
        for stream in [stream for stream in self._messages if stream[0] == worker]:
            self._drop(stream, _died(worker, cause))

    def _forget(self, worker: str) -> None:
        """A worker of this name starts afresh."""
        self._dead.pop(worker, None)
        self.addresses.pop(worker, None)
        for stream in [stream for stream in self._waiting if worker in stream[:2]]:
            del self._waiting[stream]
        for stream in [stream for stream in self._messages if worker in stream[:2]]:
            self._drop(stream, _died(worker, "another one of its name was started"))

    def _drop(self, stream: Stream, error: WorkerDiedError) -> None:
        """Forget the messages of a stream that nobody will receive."""
        for head, payloads, acknowledge in self._messages.pop(stream):
            if acknowledge is not None:
                try_fail(acknowledge, error)
            place = () if stream[2] == PAIR else head  # among those who read a broadcast
            for payload in payloads:
                self.discard(payload, *place)

    def _leave(self, worker: str) -> None:
        """A child has ended, and waits for nothing any more: what it sent can be received, and who
        sends it something waits for the next one of its name."""
        self.addresses.pop(worker, None)
        self.on_death(worker, _died(worker, "its process ended"))

    def _deliver(
        self, stream: Stream, head: Any, acknowledged: bool, *, payloads: Sequence[Payload] = ()
    ) -> Future[Reply] | None:
        """Keep a message; with ``acknowledged`` the answer comes when it is received."""
        waiting = self._waiting.get(stream)
        while waiting:
            if try_resolve(waiting.popleft(), Reply(head, payloads)):
                return None
        acknowledge: Future[Reply] | None = Future() if acknowledged else None
        self._messages.setdefault(stream, deque()).append((head, payloads, acknowledge))
        if stream[0] in self._dead:  # it was on its way
            self._drop(stream, _died(stream[0], self._dead[stream[0]]))
        return acknowledge


def _died(worker: str, cause: str) -> WorkerDiedError:
    return WorkerDiedError(f"worker '{worker}' died: {cause}")
