"""Directories that follow a program to its other nodes and back, where no file system is shared.

The first worker of a node asks the process that holds a directory for its files, checks each by
size and SHA-256, and keeps them in the cluster's private directory there, for all of the node.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.process import Process, current_process, require_process
from rlinf.scheduler.transport.endpoint import Reply
from rlinf.scheduler.transport.payload import Payload
from rlinf.scheduler.transport.sockets import SocketEndpoint

_CHUNK_BYTES = 8 << 20


class SharedDirectory(type(Path())):  # type: ignore[misc]
    """A directory of this machine; as an argument of a worker elsewhere, the path of a copy."""

    __slots__ = ("origin",)

    def __reduce__(self) -> Any:
        process = current_process()
        if process is None or process.codec is None:
            return Path, (str(self),)
        # What a third process passes on is still asked of the first.
        origin = getattr(self, "origin", None) or _service(process).offer(str(self))
        return _arrive, (str(self), origin)


def _arrive(path: str, origin: str) -> Path:
    """The directory, or its copy on this node, in the process that the path was sent to."""
    process = current_process()
    if process is None:
        return Path(path)  # a child that a worker of the same machine started
    if origin.partition("|")[0] != str(process.node_rank):
        return _service(process).copy_of(path, origin)
    here = SharedDirectory(path)
    here.origin = origin
    return here


@dataclass(frozen=True)
class Destination:
    """Where the driver wants a directory that a worker writes.

    Args:
        path: On the driver's machine.
        mark: Name of a file beside it. Another machine may have a directory of the same name, but
            has this file only where the two share it.
    """

    path: Path
    mark: str

    def place(self) -> Path:
        """Where this process writes: at the path itself, where its machine has the driver's files,
        and otherwise where :class:`WrittenFiles` are brought from."""
        process = require_process()
        if process.codec is None or (self.path.parent / self.mark).is_file():
            return self.path
        return _service(process).private / f"{self.path.name}.{secrets.token_hex(8)}"


@contextmanager
def destination(path: Path) -> Iterator[Destination]:
    """A place beside which a mark lies while workers write."""
    mark = f".{path.name}.{secrets.token_hex(8)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / mark).touch()
    try:
        yield Destination(path, mark)
    finally:
        (path.parent / mark).unlink(missing_ok=True)


@dataclass(frozen=True)
class WrittenFiles:
    """A directory that a worker wrote at its place of a :class:`Destination`."""

    path: Path
    origin: str

    @classmethod
    def at(cls, place: Path) -> WrittenFiles:
        """What this process wrote at a place; others may read it from now on."""
        process = require_process()
        if process.codec is None:
            return cls(place, process.endpoint.address)
        return cls(place, _service(process).offer(str(place)))

    def bring(self, target: Path) -> None:
        """Put it where it is wanted, unless it is there; SchedulerError if it changed meanwhile."""
        if self.path != target:
            copy = _service(require_process()).copy_of(str(self.path), self.origin)
            shutil.move(copy, target)


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    digest: str


class _FileService:
    """What a process offers of its files, and the copies that it has of others'."""

    def __init__(self, process: Process) -> None:
        endpoint = process.endpoint
        if not isinstance(endpoint, SocketEndpoint):
            raise SchedulerError("files travel between processes of the ray runtime only")
        self._process = process
        self._endpoint = endpoint
        self._offered: set[str] = set()
        self._copies: dict[tuple[str, str], Path] = {}
        self.private = endpoint.directory / "files"
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="rlinf-files")
        for name in ("list", "read"):
            endpoint.register(f"files.{name}", getattr(self, f"_{name}"))

    def offer(self, path: str) -> str:
        """Let processes on other nodes read a directory; returns whom they ask."""
        self._offered.add(path)
        return self._endpoint.address

    def copy_of(self, path: str, origin: str) -> Path:
        """The copy on this node of another's directory, if that is offered and does not change."""
        if (path, origin) not in self._copies:
            self.private.mkdir(mode=0o700, exist_ok=True)
            copy = self.private / hashlib.sha256(f"{origin} {path}".encode()).hexdigest()[:16]
            with (self.private / "lock").open("wb") as lock:  # one process of the node at a time
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not copy.is_dir():
                    self._fetch(path, origin, copy)
            self._copies[path, origin] = copy / Path(path).name
        return self._copies[path, origin]

    def _list(self, path: str) -> Future[Reply]:
        self._check(path)
        return self._later(lambda: Reply(list(_files(Path(path)))))

    def _read(self, path: str, name: str, offset: int) -> Future[Reply]:
        self._check(path, name)

        def read() -> Reply:
            with (Path(path) / name).open("rb") as file:
                file.seek(offset)
                return Reply(payloads=[Payload(reference=file.read(_CHUNK_BYTES))])

        return self._later(read)

    def _check(self, path: str, name: str = "") -> None:
        if path not in self._offered or ".." in Path(name).parts or Path(name).is_absolute():
            raise SchedulerError(f"{path} is not offered to other nodes")

    def _later(self, work: Callable[[], Reply]) -> Future[Reply]:
        """Read on a thread of its own: a handler must not wait for a disk."""

        def run() -> Reply:
            try:
                return work()
            except OSError as error:
                raise SchedulerError(f"a file for another node: {error}") from error

        return self._reading.submit(run)

    def _fetch(self, path: str, origin: str, copy: Path) -> None:
        found = self._endpoint.request(origin, "files.list", path)
        files: list[_File] = self._process.wait(found, f"the files of {path}").value
        # Several threads of a process, and processes of other hosts with this number, may be here.
        unfinished = copy.with_name(f"{copy.name}.{secrets.token_hex(8)}")
        try:
            for file in files:
                target = unfinished / Path(path).name / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fetch_file(path, origin, file, target)
            try:
                unfinished.replace(copy)
            except OSError:
                if not copy.exists():  # else another one was first
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _fetch_file(self, path: str, origin: str, file: _File, target: Path) -> None:
        process = self._process
        digest, done = hashlib.sha256(), 0
        with target.open("wb") as copied:
            while done < file.size:
                asked = self._endpoint.request(origin, "files.read", path, file.name, done)
                reply: Reply = process.wait(asked, f"{path}/{file.name}")
                data: bytes = process.decode(reply.payloads[0])
                if not data:
                    break
                copied.write(data)
                digest.update(data)
                done += len(data)
        if (done, digest.hexdigest()) != (file.size, file.digest):
            raise SchedulerError(
                f"{path}/{file.name} changed while it was copied to node {process.node_rank}: "
                f"{done} of {file.size} bytes came, with another SHA-256"
            )


_services: WeakKeyDictionary[Process, _FileService] = WeakKeyDictionary()
_lock = threading.Lock()


def _service(process: Process) -> _FileService:
    with _lock:
        if process not in _services:
            _services[process] = _FileService(process)
        return _services[process]


def _files(directory: Path) -> Iterator[_File]:
    """Every file below a directory, links followed, with size and digest."""
    for parent, _, names in os.walk(directory, followlinks=True):
        for name in sorted(names):
            path = Path(parent) / name
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield _File(str(path.relative_to(directory)), path.stat().st_size, digest)
