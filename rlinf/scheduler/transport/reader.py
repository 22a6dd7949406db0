"""The thread that reads every connection of a process, and the one that waits in its place."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rlinf.scheduler.transport.endpoint import wait_for
from rlinf.scheduler.transport.links import IncomingLink, OutgoingLink

_REST_SECONDS = 0.0005


class Reader:
    """The thread that reads every connection of this process."""

    def __init__(self, listeners: list[socket.socket], secret: bytes, receive: Any) -> None:
        self._secret = secret
        self._receive = receive
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._links: dict[int, IncomingLink] = {}
        self._full: dict[int, OutgoingLink] = {}
        self._new_full: list[OutgoingLink] = []
        self._closed = False
        self._turn = threading.Lock()  # held by the thread that reads
        self._guest = threading.Lock()  # held by the one other thread that wants to
        self._open = threading.Event()  # the thread of this class may take its turn
        self._open.set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        for descriptor in (*self._listeners, self._wake):
            self._poll.register(descriptor, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="rlinf-endpoint", daemon=True)
        self._thread.start()

    def watch_backlog(self, link: OutgoingLink) -> None:
        """Write out the rest of a message as soon as the socket has room."""
        self._new_full.append(link)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop reading and close every connection."""
        self._closed = True
        self._open.set()
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        for link in self._links.values():
            link.close()
        for listener in self._listeners.values():
            listener.close()
        self._poll.close()
        os.close(self._wake)

    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait for an answer by reading oneself, which saves a hand-over between threads.

        Where another thread does that already, its result is enough.
        """
        if not self._guest.acquire(blocking=False):
            return wait_for(future, timeout)
        limit = time.monotonic() + timeout
        self._open.clear()
        waiter = threading.current_thread()

        def wake(_: Future[Any]) -> None:
            # Another thread of this process did what is waited for: no message will come of it.
            if threading.current_thread() is not waiter and not self._closed:
                os.eventfd_write(self._wake, 1)

        future.add_done_callback(wake)
        try:
            if not self._turn.acquire(blocking=False):
                os.eventfd_write(self._wake, 1)
                self._turn.acquire()
            try:
                while not future.done() and (left := limit - time.monotonic()) > 0:
                    self._read_once(left)
            finally:
                self._turn.release()
        finally:
            self._open.set()
            self._guest.release()

    def _run(self) -> None:
        while not self._closed:
            with self._turn:
                self._read_once(-1)
            while not self._closed:
                displaced = not self._open.is_set()
                self._open.wait()
                if not displaced:
                    break
                # Who waited will often wait again at once; reading in between would take the
                # interpreter from it twice for nothing.
                time.sleep(_REST_SECONDS)

    def _read_once(self, timeout: float) -> None:
        for descriptor, _ in self._poll.poll(timeout):
            if link := self._links.get(descriptor):
                self._read(descriptor, link)
            elif descriptor in self._full:
                self._write(descriptor)
            elif descriptor == self._wake:
                self._take_full()
            else:
                self._accept(self._listeners[descriptor])

    def _read(self, descriptor: int, link: IncomingLink) -> None:
        messages, still_open = link.read()
        for frames in messages:
            try:
                self._receive(frames)
            except Exception:
                # One message that cannot be read must not silence the process for all others.
                logging.getLogger("rlinf").exception("a message to this process cannot be read")
        if not still_open:
            self._poll.unregister(descriptor)
            del self._links[descriptor]
            link.close()

    def _write(self, descriptor: int) -> None:
        try:
            if not self._full[descriptor].flush():
                return
        except OSError:
            pass  # the peer is gone; who waits for it is told by the registry
        del self._full[descriptor]
        with suppress(OSError):  # the kernel forgets a descriptor when it is closed
            self._poll.unregister(descriptor)

    def _take_full(self) -> None:
        os.eventfd_read(self._wake)
        links, self._new_full = self._new_full, []
        for link in links:
            descriptor = link.fileno()
            if descriptor >= 0 and self._full.get(descriptor) is not link:
                self._full[descriptor] = link
                with suppress(FileExistsError):
                    self._poll.register(descriptor, select.EPOLLOUT)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # it hung up before it was heard
        link = IncomingLink(connection, self._secret)
        self._links[connection.fileno()] = link
        self._poll.register(connection.fileno(), select.EPOLLIN)
