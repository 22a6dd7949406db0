"""Pooled shared-memory blocks, which receivers on the sender's node map, for large CPU buffers.

A block's first page is its header: one byte per receiver, 1 while that one needs the data, and the
number of its process, where that is known. When all bytes are clear the sender reuses the block:
fresh pages cost more than the copy itself. The driver clears those of a process that has ended.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.transport.cluster_files import ClusterFiles, shared_memory_directory

HEADER_BYTES = mmap.PAGESIZE
_OWNER_BYTES = 4
MOST_RECEIVERS = HEADER_BYTES // (1 + _OWNER_BYTES) // _OWNER_BYTES * _OWNER_BYTES
_PROCESS_ID_BITS, _MOST_NODES = 22, 512  # the kernel numbers no more processes
_NO_PROCESS = _MOST_NODES << _PROCESS_ID_BITS  # from here on numbers are of calls
_calls = itertools.count()
_MOST_FREE_BYTES = 1 << 30
_MOST_ATTACHED = 256
_LOOKS = 16  # at claimed blocks for each allocation: thousands may be outstanding in a channel
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)

ByteArray = npt.NDArray[np.uint8]


def process_number(node_rank: int, pid: int) -> int:
    """The number of a process in headers, never 0: containers of one machine, which are nodes of
    their own, may have the same process ids."""
    return node_rank % _MOST_NODES << _PROCESS_ID_BITS | pid


class Block:
    """One shared-memory block of the sender's pool."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.receivers = 0
        self._path = shared_memory_directory() / name
        size = HEADER_BYTES + capacity
        descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserving the pages makes a full /dev/shm an OSError here instead of a SIGBUS later.
            os.posix_fallocate(descriptor, 0, size)
            self._mapping = mmap.mmap(descriptor, size, flags=_MAP_FLAGS)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)

    @property
    def busy(self) -> bool:
        """Whether a receiver still needs the data."""
        return self._mapping.find(b"\x01", 0, self.receivers) != -1

    def claim(self, receivers: int, owners: Sequence[int] = ()) -> None:
        """Mark the block as needed by that many receivers, of processes of these numbers; without
        them each is known once it has looked."""
        # Before the bytes: who ended before needs nothing of what comes now.
        numbers = struct.pack(f"{receivers}I", *(owners or bytes(receivers)))
        self._mapping[MOST_RECEIVERS : MOST_RECEIVERS + len(numbers)] = numbers
        count = max(receivers, self.receivers)
        self._mapping[:count] = (b"\x01" * receivers).ljust(count, b"\x00")
        self.receivers = receivers

    def data(self, nbytes: int) -> ByteArray:
        """The first bytes of the block's memory."""
        return np.frombuffer(self._mapping, np.uint8, nbytes, HEADER_BYTES)

    def unlink(self) -> None:
        """Remove the name; memory stays until the last mapping is gone."""
        self._path.unlink(missing_ok=True)


class BlockPool:
    """The blocks that this process writes."""

    def __init__(self, files: ClusterFiles) -> None:
        self._prefix = f"{files.block_prefix}{os.getpid()}-"
        self._claimed: deque[Block] = deque()  # to be looked at in turn
        self._free: dict[int, deque[tuple[int, Block]]] = {}  # by capacity, with their turn
        self._free_bytes = 0
        self._turns = itertools.count()
        self._count = 0
        self._lock = threading.Lock()
        self._warned = False

    @property
    def blocks(self) -> list[Block]:
        """All that this process holds memory for."""
        with self._lock:
            return [*self._claimed, *(block for free in self._free.values() for _, block in free)]

    def allocate(self, nbytes: int, receivers: int = 1, owners: Sequence[int] = ()) -> Block | None:
        """A block of at least ``nbytes``, claimed; None where shared memory is full."""
        with self._lock:
            self._look(_LOOKS)
            block = self._take(nbytes) or self._create(nbytes)
            if block is not None:
                block.claim(receivers, owners)
                self._claimed.append(block)
            return block

    def _look(self, most: int) -> None:
        """See which of the claimed blocks receivers have given back, not all at once."""
        for _ in range(min(most, len(self._claimed))):
            block = self._claimed.popleft()
            if block.busy:
                self._claimed.append(block)
            else:
                self._free.setdefault(block.capacity, deque()).append((next(self._turns), block))
                self._free_bytes += block.capacity

    def _take(self, nbytes: int) -> Block | None:
        """The smallest free block that fits and is not much too large."""
        fitting = [capacity for capacity in self._free if nbytes <= capacity <= 4 * nbytes]
        return self._remove(min(fitting)) if fitting else None

    def _remove(self, capacity: int) -> Block:
        """The one of that capacity that is free for longest."""
        free = self._free[capacity]
        _, block = free.popleft()
        if not free:
            del self._free[capacity]
        self._free_bytes -= capacity
        return block

    def _create(self, nbytes: int) -> Block | None:
        """A new block; where shared memory is full a free one, if all are looked at."""
        self._trim()
        self._count += 1
        try:
            return Block(f"{self._prefix}{self._count}", _round_up(nbytes))
        except OSError as error:
            self._look(len(self._claimed))
            if block := self._take(nbytes):
                return block
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"no shared memory left in {shared_memory_directory()} for {nbytes} bytes "
                    f"({error.strerror}); large tensors now travel through sockets, which is "
                    "slower. Give the machine or container more shared memory.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None

    def _trim(self) -> None:
        """Give back free blocks, those that are free for longest first, beyond a bound."""
        while self._free_bytes > _MOST_FREE_BYTES:
            longest = min(self._free, key=lambda capacity: self._free[capacity][0][0])
            self._remove(longest).unlink()


class AttachedBlocks:
    """The blocks of other processes that this process, of a number, has mapped."""

    def __init__(self, own_number: int) -> None:
        self._own_number = own_number
        self._mappings: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, name: str, nbytes: int, receiver: int) -> ByteArray:
        """Memory of a block, writable; the block is given back when the last view is gone."""
        mapping = self._attach(name)
        _OWNER.pack_into(mapping, _owner_at(receiver), self._own_number)
        view = np.frombuffer(mapping, np.uint8, nbytes, HEADER_BYTES)
        weakref.finalize(view, _release_here, os.getpid(), mapping, receiver).atexit = False
        return view

    def copy(self, name: str, nbytes: int) -> ByteArray:
        """A private copy of a block's memory; the block stays claimed."""
        return np.frombuffer(self._attach(name), np.uint8, nbytes, HEADER_BYTES).copy()

    def release(self, name: str, receiver: int) -> None:
        """Give a block back without looking at it."""
        _release(self._attach(name), receiver)

    def _attach(self, name: str) -> mmap.mmap:
        with self._lock:
            mapping = self._mappings.get(name)
            if mapping is None:
                self._drop_removed()
                mapping = self._mappings[name] = _map(name)
                if len(self._mappings) > _MOST_ATTACHED:
                    self._mappings.popitem(last=False)  # unmapped once its views are gone
            else:
                self._mappings.move_to_end(name)
            return mapping

    def _drop_removed(self) -> None:
        """Keep no memory that its sender has given back to the machine."""
        directory = shared_memory_directory()
        for name in [name for name in self._mappings if not (directory / name).exists()]:
            del self._mappings[name]


def _map(name: str) -> mmap.mmap:
    path = shared_memory_directory() / name
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise SchedulerError(
            f"shared-memory block {path} is gone: the cluster of its sender was shut down"
        ) from None
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=_MAP_FLAGS)
    finally:
        os.close(descriptor)


_OWNER = struct.Struct("I")


def _owner_at(receiver: int) -> int:
    """Where in a header the number of a receiver's process is."""
    return MOST_RECEIVERS + _OWNER_BYTES * receiver


def hand_over(name: str, number: int) -> None:
    """Note the process, by its number, that a block of one receiver is for from now on."""
    with suppress(FileNotFoundError), _header(name) as descriptor:
        os.pwrite(descriptor, _OWNER.pack(number), _owner_at(0))


def take_back(name: str, number: int) -> None:
    """Give a block of one receiver back, unless it is for another number by now."""
    with suppress(FileNotFoundError), _header(name) as descriptor:
        if os.pread(descriptor, _OWNER.size, _owner_at(0)) == _OWNER.pack(number):
            os.pwrite(descriptor, _OWNER.pack(0), _owner_at(0))
            os.pwrite(descriptor, b"\x00", 0)


@contextmanager
def _header(name: str) -> Iterator[int]:
    """A block's file; a few bytes of it are not worth a mapping."""
    descriptor = os.open(shared_memory_directory() / name, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def call_number() -> int:
    """A number that no process has and no earlier call of this one had."""
    return _NO_PROCESS | next(_calls) % _NO_PROCESS


def _release_here(owner: int, mapping: mmap.mmap, receiver: int) -> None:
    """Give a block back, but not by the copy of its view that goes in a child that was forked:
    what the two map is the same, and the process that received it may still use it."""
    if os.getpid() == owner:
        _release(mapping, receiver)


def _release(mapping: mmap.mmap, receiver: int) -> None:
    _OWNER.pack_into(mapping, _owner_at(receiver), 0)  # first: the sender may claim it at once
    mapping[receiver] = 0


def _round_up(nbytes: int) -> int:
    """Round up to a quarter of a power of two, so that sizes repeat and little is wasted."""
    step = max(HEADER_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


def remove_free_blocks(files: ClusterFiles, *pids: int, node_rank: int = 0) -> None:
    """Give back what processes of a node that ended needed of any block of the cluster, and remove
    the blocks that they wrote, except those whose data someone still needs.

    Not by two at a time: between a look at a byte and its clearing the block may be claimed anew.
    """
    ended = {process_number(node_rank, pid) for pid in pids}
    for path in shared_memory_directory().glob(f"{files.block_prefix}[0-9]*-*"):
        writer = int(path.name.removeprefix(files.block_prefix).partition("-")[0])
        with suppress(FileNotFoundError, ValueError):  # it is gone, or has no pages yet
            if not _needed(path, ended) and writer in pids:
                path.unlink()


def _needed(path: Path, ended: Collection[int]) -> bool:
    """Whether a process that has not ended needs a block; those that have need it no more."""
    needed = False
    with path.open("r+b") as file, mmap.mmap(file.fileno(), HEADER_BYTES) as header:
        receiver = -1
        while (receiver := header.find(b"\x01", receiver + 1, MOST_RECEIVERS)) >= 0:
            (owner,) = _OWNER.unpack_from(header, _owner_at(receiver))
            if owner in ended:
                _release(header, receiver)
            else:
                needed = True
    return needed


class EndedProcesses:
    """The processes of one node that have ended, and what of shared memory they leave.

    All are looked at whenever one more has ended: what they had sent may have been in use before,
    and what they were sent on its way.
    """

    def __init__(self, files: ClusterFiles, node_rank: int) -> None:
        self._files = files
        self._node_rank = node_rank
        self._pids: set[int] = set()
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def add(self, pid: int) -> None:
        """Note that a process has ended, and free what nobody needs any more."""
        self._pids.add(pid)
        with self._lock:
            if pid not in self._seen:  # else another one, that ended with it, has looked for it
                self._seen = self._pids.copy()
                remove_free_blocks(self._files, *self._seen, node_rank=self._node_rank)

    def discard(self, pid: int) -> None:
        """A process has begun that has the number of one that ended."""
        self._pids.discard(pid)
        self._seen.discard(pid)
