"""Noticing that a worker's process ended, promptly and without messages.

On the driver's node the kernel tells (a process file descriptor becomes readable). Elsewhere a
small call stays open at every worker: it fails when Ray finds the process gone.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING

from rlinf.scheduler.process import Process
from rlinf.scheduler.transport.blocks import remove_free_blocks
from rlinf.scheduler.transport.session import Session

if TYPE_CHECKING:
    from rlinf.scheduler.runtime.ray_calls import RayWorker
    from rlinf.scheduler.services.registry import RegistryService

_POLL_SECONDS = 2.0


class DeathWatch:
    """Tells the registry when a worker's process ends.

    Args:
        process: The driver's part in the cluster.
        session: Files of the cluster.
        registry: Who is to be told.
        find: Handle of a worker by name.
    """

    def __init__(
        self,
        process: Process,
        session: Session,
        registry: RegistryService,
        find: Callable[[str], RayWorker],
    ) -> None:
        self._process = process
        self._session = session
        self._registry = registry
        self._find = find
        self._names: dict[int, tuple[str, int]] = {}
        self._remote: set[str] = set()
        self._poll = select.poll()
        self._wake_out, self._wake_in = os.pipe()
        self._poll.register(self._wake_out, select.POLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rlinf-deaths", daemon=True)
        self._thread.start()

    def add(self, name: str, address: str) -> None:
        """Watch a worker whose endpoint is known now."""
        node, path, _ = address.split("|")
        if int(node) != self._process.node_rank:
            self._remote.add(name)
            return
        pid = int(PurePath(path).name.partition(".")[0])
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            threading.Thread(target=self._report, args=(name, pid), daemon=True).start()
            return
        self._names[descriptor] = (name, pid)
        self._poll.register(descriptor, select.POLLIN)
        os.write(self._wake_in, b"+")

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        os.write(self._wake_in, b"x")
        self._thread.join(timeout=5)
        for descriptor in (*self._names, self._wake_in, self._wake_out):
            os.close(descriptor)

    def _run(self) -> None:
        while not self._closed:
            for descriptor, _ in self._poll.poll(_POLL_SECONDS * 1000):
                if descriptor == self._wake_out:
                    os.read(self._wake_out, 4096)
                    continue
                self._poll.unregister(descriptor)
                name, pid = self._names.pop(descriptor)
                os.close(descriptor)
                self._report(name, pid)
            for name in [] if self._closed else list(self._remote):
                self._check_remote(name)

    def _check_remote(self, name: str) -> None:
        cause = self._find(name).cause_of_death() if self._registry.alive(name) else ""
        if cause is not None:
            self._remote.discard(name)
            if cause:
                self._announce(name, cause)

    def _report(self, name: str, pid: int) -> None:
        if not self._closed and self._registry.alive(name):
            cause = self._find(name).cause_of_death() or f"its process {pid} ended"
            self._announce(name, cause)
        remove_free_blocks(self._session, pid)

    def _announce(self, name: str, cause: str) -> None:
        with self._process.endpoint.lock:
            self._registry.died(name, cause)
