"""The endpoint between processes: ZeroMQ over Unix sockets, or TCP to other nodes.

Each process binds one receiving socket, read by one thread. Any thread sends, on one socket per
peer that is guarded by a lock, so a message costs no hand-over to another thread on the way out.
Messages between two processes keep their order.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

from rlinf.scheduler.errors import SchedulerError, WorkerDiedError
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, as_reply, try_fail
from rlinf.scheduler.transport.payload import Codec, Payload, dumps
from rlinf.scheduler.transport.session import Session

_REQUEST, _TELL, _REPLY, _ERROR, _STOP = range(5)
_zmq: Any = zmq  # its constants are made at run time, where a type checker does not see them
_serial = itertools.count()

_Peer = tuple[Any, threading.Lock]  # a ZeroMQ socket and its guard


class SocketEndpoint(Endpoint):
    """Mailbox of a process that talks to other processes.

    Its address has three parts, ``node|ipc path|tcp address``; the last is empty in a cluster of
    one node.

    Args:
        session: Whose socket directory to use.
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
        self._context = _zmq.Context()
        self._inbox = self._context.socket(_zmq.PULL)
        self._inbox.set_hwm(0)
        session.socket_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = f"ipc://{session.socket_directory}/{os.getpid()}.{next(_serial)}"
        self._inbox.bind(path)
        network = ""
        if node_ip is not None:
            network = f"tcp://{node_ip}:{self._inbox.bind_to_random_port('tcp://*')}"
        self.address = f"{self._node}|{path}|{network}"
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.Lock()
        self._pending: dict[int, tuple[str, Future[Reply]]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="rlinf-endpoint", daemon=True)
        self._thread.start()

    def forget(self, address: str, error: Exception) -> None:
        """Fail every open request to a peer that is gone and drop the connection."""
        with self._peers_lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            with peer[1]:
                peer[0].close(linger=0)
        for number, (target, future) in list(self._pending.items()):
            if target == address and self._pending.pop(number, None) is not None:
                try_fail(future, error)

    def close(self) -> None:
        """Stop answering and close every socket; open requests fail."""
        if self._closed:
            return
        self._closed = True
        self._send(self.address, _STOP, 0, None, ())
        self._thread.join(timeout=5)
        with self._peers_lock:
            for socket, lock in self._peers.values():
                with lock:
                    socket.close(linger=200)
            self._peers.clear()
        self._inbox.close(linger=0)
        self._context.term()
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
        if address.partition("|")[0] != self._node:
            payloads = [self._codec.without_blocks(payload) for payload in payloads]
        encoded = [
            payload if payload.frames is not None else self._codec.encode(payload.reference)
            for payload in payloads
        ]
        layout = [(len(p.frames or ()), p.uses_blocks, p.nbytes) for p in encoded]
        frames: list[Any] = [dumps((form, number, self.address, content, layout))]
        for payload in encoded:
            frames.extend(payload.frames or ())
        socket, lock = self._peer(address)
        with lock:
            if socket.closed:
                raise WorkerDiedError(f"the process at {address} is gone")
            socket.send_multipart(frames)

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is not None:
            return peer
        with self._peers_lock:
            peer = self._peers.get(address)
            if peer is None:
                socket = self._context.socket(_zmq.PUSH)
                socket.set_hwm(0)
                node, path, network = address.split("|")
                socket.connect(path if node == self._node else network)
                peer = self._peers[address] = (socket, threading.Lock())
            return peer

    def _serve(self) -> None:
        while True:
            head, *frames = self._inbox.recv_multipart()
            form, number, source, content, layout = pickle.loads(head)
            if form == _STOP:
                return
            payloads = []
            for count, uses_blocks, nbytes in layout:
                payloads.append(Payload(frames[:count], uses_blocks=uses_blocks, nbytes=nbytes))
                del frames[:count]
            if form in (_REPLY, _ERROR):
                self._finish(number, form, content, payloads)
            else:
                self._answer(form, number, source, content, payloads)

    def _finish(self, number: int, form: int, content: Any, payloads: list[Payload]) -> None:
        entry = self._pending.pop(number, None)
        if entry is None or not entry[1].set_running_or_notify_cancel():
            return
        future = entry[1]
        if form == _ERROR:
            future.set_exception(content)
        else:
            future.set_result(Reply(content, payloads))

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
        if form == _REQUEST:
            self._when_done(result, partial(self._reply, source, number))

    def _reply(self, source: str, number: int, result: Future[Any]) -> None:
        if self._closed or result.cancelled():
            return
        error = result.exception()
        if error is not None:
            self._reply_error(source, number, error)
            return
        reply = as_reply(result.result())
        try:
            self._send(source, _REPLY, number, reply.value, reply.payloads)
        except Exception as failure:  # noqa: BLE001 - the requester must hear of it
            self._reply_error(source, number, failure)

    def _reply_error(self, source: str, number: int, error: BaseException) -> None:
        try:
            self._send(source, _ERROR, number, error, ())
        except WorkerDiedError:
            return
        except Exception:  # noqa: BLE001 - an exception that cannot be pickled, as text
            self._send(source, _ERROR, number, SchedulerError(repr(error)), ())
