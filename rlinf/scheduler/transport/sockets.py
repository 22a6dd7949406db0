"""The endpoint between processes: requests and answers over one-way connections."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rlinf.scheduler.errors import SchedulerError, WorkerDiedError
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, as_reply, claim, try_fail
from rlinf.scheduler.transport.links import (
    OutgoingLink,
    listen_at,
    listen_on_network,
)
from rlinf.scheduler.transport.payload import Codec, Payload, dumps
from rlinf.scheduler.transport.reader import Reader
from rlinf.scheduler.transport.session import Session

_REQUEST, _TELL, _REPLY, _ERROR = range(4)
_SMALL_FRAME = 4096
_serial = itertools.count()
_logger = logging.getLogger("rlinf")


class SocketEndpoint(Endpoint):
    """Mailbox of a process that talks to other processes.

    Its address has three parts, ``node|socket path|ip:port``; the last is empty in a cluster of
    one node. Messages between two processes keep their order.

    Args:
        session: Whose socket directory and secret to use.
        codec: Re-encodes payloads in shared memory for peers on other nodes.
        node_rank: Node of this process.
        node_ip: Where other nodes reach it; None opens no network port.
    """

    def __init__(
        self, session: Session, codec: Codec, node_rank: int, node_ip: str | None = None
    ) -> None:
        super().__init__()
        self._codec = codec
        self._node = str(node_rank)
        self._secret = hashlib.sha256(session.token.encode()).digest()
        self.directory = session.socket_directory
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = f"{self.directory}/{os.getpid()}.{next(_serial)}"
        listeners = [listen_at(path)]
        network = ""
        if node_ip is not None:
            listeners.append(listen_on_network(node_ip))
            network = f"{node_ip}:{listeners[1].getsockname()[1]}"
        self.address = f"{self._node}|{path}|{network}"
        self._links: dict[str, OutgoingLink] = {}
        self._links_lock = threading.Lock()
        self._pending: dict[int, tuple[str, Future[Reply]]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._reader = Reader(listeners, self._secret, self._receive)

    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait for an answer on the calling thread, which reads meanwhile."""
        self._reader.wait(future, timeout)

    def forget(self, address: str, error: Exception) -> None:
        """Fail every open request to a peer that is gone and drop the connection."""
        with self._links_lock:
            link = self._links.pop(address, None)
        if link is not None:
            link.close()
        for number, (target, future) in list(self._pending.items()):
            if target == address and self._pending.pop(number, None) is not None:
                try_fail(future, error)

    def close(self) -> None:
        """Stop answering and close every socket; open requests fail."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        with self._links_lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
        while self._pending:
            _, (_, future) = self._pending.popitem()
            try_fail(future, SchedulerError("the cluster was shut down"))

    def _request(
        self, address: str, kind: str, arguments: tuple[Any, ...], payloads: Sequence[Payload]
    ) -> Future[Reply]:
        number = next(self._numbers)
        future: Future[Reply] = Future()
        self._pending[number] = (address, future)
        try:
            self._send(address, _REQUEST, number, (kind, arguments), payloads)
        except BaseException:
            self._pending.pop(number, None)
            raise
        return future

    def _tell(
        self, address: str, kind: str, arguments: tuple[Any, ...], payloads: Sequence[Payload]
    ) -> None:
        self._send(address, _TELL, 0, (kind, arguments), payloads)

    def _send(
        self, address: str, form: int, number: int, content: Any, payloads: Sequence[Payload]
    ) -> None:
        far = address.partition("|")[0] != self._node
        if far:
            payloads = [self._codec.without_blocks(payload) for payload in payloads]
        # Small frames travel inside the head, which saves a buffer per frame.
        inside: list[tuple[list[Any], bool, int]] = []
        behind: list[Any] = []
        for payload in payloads:
            encoded = payload
            if payload.frames is None:
                encoded = self._codec.encode(payload.reference, inline=far)
            frames: list[Any] = []
            for frame in encoded.frames or ():
                small = len(frame) <= _SMALL_FRAME
                frames.append(bytes(frame) if small else None)
                if not small:
                    behind.append(frame)
            inside.append((frames, encoded.uses_blocks, encoded.nbytes))
        head = _dump_head((form, number, self.address, content, inside))
        try:
            self._link(address).send([head, *behind])
        except OSError as error:
            raise WorkerDiedError(f"the process at {address} is gone ({error})") from None

    def _link(self, address: str) -> OutgoingLink:
        link = self._links.get(address)
        if link is None:
            with self._links_lock:
                link = self._links.get(address)
                if link is None:
                    if self._closed:
                        raise SchedulerError("the cluster was shut down")
                    node, path, network = address.split("|")
                    near = path if node == self._node else ""
                    link = OutgoingLink(near, network, self._secret, self._reader.watch_backlog)
                    self._links[address] = link
        return link

    def _receive(self, frames: list[bytes]) -> None:
        form, number, source, content, inside = pickle.loads(frames[0])
        behind = iter(frames[1:])
        payloads = [
            Payload(
                [next(behind) if frame is None else frame for frame in parts],
                uses_blocks=uses_blocks,
                nbytes=nbytes,
            )
            for parts, uses_blocks, nbytes in inside
        ]
        if form in (_REPLY, _ERROR):
            self._finish(number, form, content, payloads)
        else:
            self._answer(form, number, source, content, payloads)

    def _finish(self, number: int, form: int, content: Any, payloads: list[Payload]) -> None:
        entry = self._pending.pop(number, None)
        if entry is None or not claim(entry[1]):
            return
        if form == _ERROR:
            entry[1].set_exception(content)
        else:
            entry[1].set_result(Reply(content, payloads))

    def _answer(
        self, form: int, number: int, source: str, content: Any, payloads: list[Payload]
    ) -> None:
        kind, arguments = content
        try:
            result = self._dispatch(kind, arguments, payloads)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the answer
            if form == _REQUEST:
                self._reply_error(source, number, error)
            return
        if form != _REQUEST:
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._reply_later, source, number))
        else:
            self._reply(source, number, as_reply(result))

    def _reply_later(self, source: str, number: int, result: Future[Any]) -> None:
        if self._closed or result.cancelled():
            return
        error = result.exception()
        if error is not None:
            self._reply_error(source, number, error)
        else:
            self._reply(source, number, as_reply(result.result()))

    def _reply(self, source: str, number: int, reply: Reply) -> None:
        try:
            self._send(source, _REPLY, number, reply.value, reply.payloads)
        except WorkerDiedError:
            return  # nobody is there to hear the answer
        except Exception as failure:  # noqa: BLE001 - the requester must hear of it
            self._reply_error(source, number, failure)

    def _reply_error(self, source: str, number: int, error: BaseException) -> None:
        try:
            self._send(source, _ERROR, number, error, ())
        except WorkerDiedError:
            return
        except Exception:  # noqa: BLE001 - an exception that cannot be pickled, as text
            self._send(source, _ERROR, number, SchedulerError(repr(error)), ())


def _dump_head(head: Any) -> bytes:
    data = pickle.dumps(head, 5)
    # What a program defines itself must travel by value; that is rare in heads, as keys only.
    return dumps(head) if b"__main__" in data else data
