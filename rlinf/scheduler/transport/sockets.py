"""The endpoint between processes: requests and answers over one-way connections."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from pathlib import PurePath
from typing import Any

from rlinf.scheduler.errors import SchedulerError, WorkerDiedError
from rlinf.scheduler.transport.cluster_files import ClusterFiles
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, as_reply, claim, try_fail
from rlinf.scheduler.transport.links import OutgoingLink, Reader
from rlinf.scheduler.transport.payload import Codec, Payload, dumps

_REQUEST, _TELL, _REPLY, _ERROR = range(4)
_SMALL_FRAME = 4096
_MOST_UNHEARD = 128
_SECONDS_TO_LEARN = 10.0  # within which the registry says how the worker of a peer ended
_serial = itertools.count()


@cache
def process_at(address: str) -> tuple[int, int]:
    """Rank of the node, and id, of the process whose endpoint has an address."""
    node, path, _ = address.split("|")
    return int(node), int(PurePath(path).name.partition(".")[0])


class SocketEndpoint(Endpoint):
    """Mailbox of a process that talks to other processes.

    Its address has three parts, ``node|socket path|ip:port``; the last is empty in a cluster of
    one node. Messages between two processes keep their order.

    Args:
        files: Whose socket directory and secret to use.
        codec: Re-encodes payloads in shared memory for peers on other nodes.
        node_rank: Node of this process.
        node_ip: Where other nodes reach it; None opens no network port.
    """

    def __init__(
        self, files: ClusterFiles, codec: Codec, node_rank: int, node_ip: str | None = None
    ) -> None:
        super().__init__()
        self._codec = codec
        self._node = str(node_rank)
        self._secret = hashlib.sha256(files.token.encode()).digest()
        self.directory = files.socket_directory
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = f"{self.directory}/{os.getpid()}.{next(_serial)}"
        listeners = [socket.socket(socket.AF_UNIX)]
        listeners[0].bind(path)
        listeners[0].listen(_MOST_UNHEARD)
        network = ""
        if node_ip is not None:
            listeners.append(socket.create_server((node_ip, 0), backlog=_MOST_UNHEARD))
            network = f"{node_ip}:{listeners[1].getsockname()[1]}"
        for listener in listeners:
            listener.setblocking(False)
        self.address = f"{self._node}|{path}|{network}"
        self._links: dict[str, OutgoingLink] = {}
        self._links_lock = threading.Lock()
        self._pending: dict[int, tuple[str, Future[Reply]]] = {}
        self._ended: dict[str, Exception] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._reader = Reader(listeners, self._secret, self._receive)

    def shares_memory(self, address: str) -> bool:
        """Whether a peer is on the same node as this process."""
        return address.partition("|")[0] == self._node

    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait for an answer on the calling thread, which reads meanwhile."""
        self._reader.wait(future, timeout)

    def forget(self, address: str, error: Exception) -> None:
        """Fail every open request to a peer that is gone and drop the connection."""
        self._ended[address] = error  # first: a request that comes in between sees it
        with self._links_lock:
            link = self._links.pop(address, None)
        if link is not None:
            link.close()
        for number, (target, _) in list(self._pending.items()):
            if target == address:
                self._fail(number, error)

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

    def _request(self, address: str, content: Any, payloads: Sequence[Payload]) -> Future[Reply]:
        number = next(self._numbers)
        future: Future[Reply] = Future()
        self._pending[number] = (address, future)
        try:
            self._send(address, _REQUEST, number, content, payloads)
        except WorkerDiedError as error:
            # A socket knows no worker: what its end is told as comes from the registry.
            if address in self._ended:
                self._fail(number, self._ended[address])
            else:
                late = threading.Timer(_SECONDS_TO_LEARN, self._fail, (number, error))
                late.daemon = True
                late.start()
        except BaseException:
            self._pending.pop(number, None)
            raise
        return future

    def _fail(self, number: int, error: Exception) -> None:
        _, future = self._pending.pop(number, ("", None))
        if future is not None:
            try_fail(future, error)

    def _tell(self, address: str, content: Any, payloads: Sequence[Payload]) -> None:
        try:
            self._send(address, _TELL, 0, content, payloads)
        except WorkerDiedError:
            # As it fails too, it learns how the worker ended.
            failed = self._request(address, content, payloads)
            self.wait(failed, 2 * _SECONDS_TO_LEARN)
            failed.result(0)

    def _send(
        self, address: str, form: int, number: int, content: Any, payloads: Sequence[Payload]
    ) -> None:
        if told := self._ended.get(address):
            # Also where its process, taken for dead too early, still takes messages.
            raise WorkerDiedError(str(told))
        far = not self.shares_memory(address)
        # Small frames travel inside the head, which saves a buffer per frame.
        inside: list[tuple[list[Any], tuple[str, ...], int]] = []
        behind: list[Any] = []
        for payload in payloads:
            encoded = self._codec.without_blocks(payload) if far else payload
            if payload.frames is None:
                encoded = self._codec.encode(payload.reference, inline=far)
            frames = encoded.frames or ()
            small = [bytes(frame) if len(frame) <= _SMALL_FRAME else None for frame in frames]
            behind += [frame for frame in frames if len(frame) > _SMALL_FRAME]
            inside.append((small, encoded.blocks, encoded.nbytes))
        message = (form, number, self.address, content, inside)
        try:
            self._link(address).send([_head(message), *behind])
        except OSError as error:
            raise WorkerDiedError(f"the process at {address} is gone ({error})") from None

    def _link(self, address: str) -> OutgoingLink:
        if link := self._links.get(address):
            return link
        with self._links_lock:
            if address not in self._links:
                if self._closed:
                    raise SchedulerError("the cluster was shut down")
                node, path, network = address.split("|")
                near = path if node == self._node else ""
                self._links[address] = OutgoingLink(
                    near, network, self._secret, self._reader.watch_backlog
                )
            return self._links[address]

    def _receive(self, frames: list[bytes]) -> None:
        form, number, source, content, inside = pickle.loads(frames[0])
        behind = iter(frames[1:])
        payloads = [
            Payload(
                [next(behind) if frame is None else frame for frame in parts],
                blocks=blocks,
                nbytes=nbytes,
            )
            for parts, blocks, nbytes in inside
        ]
        if form == _REQUEST:
            kind, arguments = content
            answer = self._answer(kind, arguments, payloads)
            answer.add_done_callback(partial(self._reply, source, number))
        elif form == _TELL:
            kind, arguments = content
            with suppress(Exception):  # nobody hears of what a handler raises
                self._dispatch(kind, arguments, payloads)
        else:
            _, future = self._pending.pop(number, ("", None))
            if future is None or not claim(future):
                return
            if form == _ERROR:
                future.set_exception(content)
            else:
                future.set_result(Reply(content, payloads))

    def _reply(self, source: str, number: int, answer: Future[Reply]) -> None:
        if self._closed or answer.cancelled():
            return
        error = answer.exception()
        try:
            if error is None:
                reply = as_reply(answer.result())
                self._send(source, _REPLY, number, reply.value, reply.payloads)
                return
        except WorkerDiedError:
            return  # nobody is there to hear the answer
        except Exception as failure:  # noqa: BLE001 - the requester must hear of it
            error = failure
        with suppress(WorkerDiedError):
            try:
                self._send(source, _ERROR, number, error, ())
            except WorkerDiedError:
                return
            except Exception:  # noqa: BLE001 - an exception that cannot be pickled, as text
                self._send(source, _ERROR, number, SchedulerError(repr(error)), ())


def _head(message: tuple[Any, ...]) -> bytes:
    """A message in bytes; what a program defines itself, such as a channel's key, by value."""
    try:
        head = pickle.dumps(message, 5)
    except (pickle.PicklingError, AttributeError):  # in a worker, whose ``__main__`` is Ray's
        return dumps(message)
    return dumps(message) if b"__main__" in head else head
