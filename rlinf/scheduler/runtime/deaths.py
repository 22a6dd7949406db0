"""Noticing that a worker's process ended, promptly and without messages.

On the driver's node the kernel tells (a process file descriptor becomes readable). Elsewhere a
small call stays open at every worker: it fails when Ray finds the process gone.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from rlinf.scheduler.process import Process
from rlinf.scheduler.transport.blocks import remove_free_blocks
from rlinf.scheduler.transport.session import Session

if TYPE_CHECKING:
    from rlinf.scheduler.runtime.ray_calls import RayWorker
    from rlinf.scheduler.services.registry import RegistryService

_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class _Watched:
    name: str
    incarnation: str
    address: str

    @property
    def node_rank(self) -> int:
        return int(self.address.partition("|")[0])

    @property
    def pid(self) -> int:
        return int(PurePath(self.address.split("|")[1]).name.partition(".")[0])


class DeathWatch:
    """Tells the registry when a worker's process ends.

    Args:
        process: The driver's part in the cluster.
        session: Files of the cluster.
        registry: Who is to be told.
        find: Handle of a worker by name and incarnation.
    """

    def __init__(
        self,
        process: Process,
        session: Session,
        registry: RegistryService,
        find: Callable[[str, str], RayWorker],
    ) -> None:
        self._process = process
        self._session = session
        self._registry = registry
        self._find = find
        self._local: dict[int, _Watched] = {}
        self._remote: list[_Watched] = []
        self._poll = select.poll()
        self._wake_out, self._wake_in = os.pipe()
        self._poll.register(self._wake_out, select.POLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rlinf-deaths", daemon=True)
        self._thread.start()

    def add(self, name: str, address: str) -> None:
        """Watch a worker whose endpoint is known now."""
        group = self._registry.group(name.partition(":")[0])
        if group is None or name not in group.worker_names:
            return  # the child process of a worker; its parent knows when it ends
        watched = _Watched(name, group.incarnation, address)
        if watched.node_rank != self._process.node_rank:
            self._remote.append(watched)
            return
        try:
            descriptor = os.pidfd_open(watched.pid)
        except OSError:
            threading.Thread(target=self._report, args=(watched,), daemon=True).start()
            return
        self._local[descriptor] = watched
        self._poll.register(descriptor, select.POLLIN)
        os.write(self._wake_in, b"+")

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        os.write(self._wake_in, b"x")
        self._thread.join(timeout=5)
        for descriptor in (*self._local, self._wake_in, self._wake_out):
            os.close(descriptor)

    def _run(self) -> None:
        while not self._closed:
            for descriptor, _ in self._poll.poll(_POLL_SECONDS * 1000):
                if descriptor == self._wake_out:
                    os.read(self._wake_out, 4096)
                    continue
                self._poll.unregister(descriptor)
                os.close(descriptor)
                self._report(self._local.pop(descriptor))
            for watched in [] if self._closed else list(self._remote):
                self._check_remote(watched)

    def _check_remote(self, watched: _Watched) -> None:
        if not self._registry.runs_at(watched.name, watched.address):
            self._remote.remove(watched)
            return
        cause = self._find(watched.name, watched.incarnation).cause_of_death()
        if cause is not None:
            self._remote.remove(watched)
            self._announce(watched, cause)

    def _report(self, watched: _Watched) -> None:
        if not self._closed and self._registry.runs_at(watched.name, watched.address):
            cause = self._find(watched.name, watched.incarnation).cause_of_death()
            self._announce(watched, cause or f"its process {watched.pid} ended")
        remove_free_blocks(self._session, watched.pid)

    def _announce(self, watched: _Watched, cause: str) -> None:
        with self._process.endpoint.lock:
            if self._registry.runs_at(watched.name, watched.address):
                self._registry.died(watched.name, cause)
