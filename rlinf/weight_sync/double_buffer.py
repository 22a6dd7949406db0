"""A block of shared memory with two buffers, a sequence lock, and pins of its readers.

The writer fills the buffer that was not published last. Its state is an odd number while it is
written and twice the number of the update when it is complete, so a reader that finds the same even
number before and after a copy has a whole update. A reader may also pin a buffer: the writer waits
before it fills it. Either way a writer that dies leaves the last published update readable.

Stores of 8 aligned bytes are atomic and a lock between two accesses keeps their order, on x86 and
on ARM.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf.processes.byte_layout import ByteLayout
from rlinf.processes.shared_block import memory_path, open_memory
from rlinf.weight_sync.errors import NoSharedMemoryError, TornReadError, WeightSyncError

_HEADER_BYTES = 4096
_PINS = 2048
MOST_READERS = (_HEADER_BYTES - _PINS) // 2
_PUBLISHED, _STATES, _VERSIONS = 0, 1, 3
_UNPINNED_ATTEMPTS = 2
_PAUSE_SECONDS = 2e-4
_LIVENESS_SECONDS = 1.0

_order = threading.Lock()


def _fence() -> None:
    """Keep earlier memory accesses before later ones."""
    for _ in range(2):
        with _order:
            pass


class _Block:
    """The parts of a mapped block."""

    def __init__(self, descriptor: int, layout: ByteLayout, *, writable: bool) -> None:
        self.layout = layout
        populate = getattr(mmap, "MAP_POPULATE", 0)
        # Pins are written through a mapping of the header alone, so that a reader's mapping of the
        # weights can be read-only.
        header = mmap.mmap(descriptor, _HEADER_BYTES)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | populate
        body = mmap.mmap(descriptor, _block_bytes(layout), flags=flags, prot=protection)
        self.numbers = np.frombuffer(header, np.int64, _PINS // 8)
        self.pins = np.frombuffer(header, np.uint8, 2 * MOST_READERS, _PINS).reshape(2, -1)
        whole = np.frombuffer(body, np.uint8)
        first = _pages(_HEADER_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors
            self.buffers = [
                torch.from_numpy(whole[begin : begin + layout.nbytes])
                for begin in (first, first + _pages(layout.nbytes))
            ]

    @property
    def published(self) -> int:
        """Number of the last complete update, 0 before the first."""
        return int(self.numbers[_PUBLISHED])


class BlockWriter:
    """Creates a block and publishes updates in it.

    Args:
        layout: Where tensors lie in a buffer.
        path: File to create; None: memory without a name, which others open by this process.
        first: Number of the last update before this block, so that numbers go on rising.

    Raises:
        NoSharedMemoryError: There is not enough shared memory.
    """

    def __init__(self, layout: ByteLayout, path: Path | None, first: int = 0) -> None:
        self.layout, size = layout, _block_bytes(layout)
        if path is None:
            self._descriptor = open_memory("rlinf-weights")
            self.path = memory_path(self._descriptor)
        else:
            self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            self.path = path
            weakref.finalize(self, path.unlink, missing_ok=True)  # also where nobody closes it
        self._named = path is not None
        try:
            # Reserving the pages makes a full /dev/shm an OSError here instead of a SIGBUS later.
            os.posix_fallocate(self._descriptor, 0, size)
            self._block = _Block(self._descriptor, layout, writable=True)
        except OSError as error:
            self.close()
            raise NoSharedMemoryError(
                f"no shared memory for {size} bytes of weights ({error.strerror}); give the "
                "machine or container more, or go on with weight_sync.type=bucket"
            ) from error
        self._block.numbers[_PUBLISHED] = first

    @property
    def published(self) -> int:
        """Number of the last complete update."""
        return self._block.published

    @contextmanager
    def writing(
        self, version: int, *, seconds: float, alive: Callable[[int], bool] = lambda _: True
    ) -> Iterator[dict[str, Tensor]]:
        """The tensors of the next update, published when the block is left without an exception.

        Args:
            version: Number of the weights.
            seconds: How long to wait for readers that hold the buffer; then a WeightSyncError.
            alive: Whether a reader, given by its number, still lives.
        """
        block = self._block
        update = block.published + 1
        buffer = update % 2
        block.numbers[_STATES + buffer] = 2 * update - 1
        _fence()
        self._wait_for_readers(buffer, seconds, alive)
        yield block.layout.views(block.buffers[buffer])
        block.numbers[_VERSIONS + buffer] = version
        _fence()
        block.numbers[_STATES + buffer] = 2 * update
        _fence()
        block.numbers[_PUBLISHED] = update

    def _wait_for_readers(self, buffer: int, seconds: float, alive: Callable[[int], bool]) -> None:
        begin = asked = time.monotonic()
        # A copy: numpy refuses to search an array that readers change meanwhile.
        while (holders := np.flatnonzero(self._block.pins[buffer].copy())).size:
            time.sleep(_PAUSE_SECONDS)
            now = time.monotonic()
            if now - asked > _LIVENESS_SECONDS:
                asked = now
                for holder in holders:
                    if not alive(int(holder)):
                        self._block.pins[buffer, holder] = 0
            if now - begin > seconds:
                raise WeightSyncError(
                    f"readers {holders.tolist()} held the weights for {seconds:g} s; release an "
                    "update once it is loaded, or set reads to copy"
                )

    def close(self) -> None:
        """Remove the name; memory stays until the last mapping is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._named:
                self.path.unlink(missing_ok=True)


class BlockReader:
    """Reads the updates of the block at a writer's path.

    Args:
        path: The writer's path.
        number: Of this reader, below MOST_READERS; no other reader of the block has it.
        layout: The writer's.

    Raises:
        WeightSyncError: The block is gone.
    """

    def __init__(self, path: Path, number: int, layout: ByteLayout) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            raise WeightSyncError(f"the weights in {path} are gone with their sender") from None
        try:
            self._block = _Block(descriptor, layout, writable=False)
        finally:
            os.close(descriptor)
        self._number = number
        self._own: Tensor | None = None
        self._pinned: int | None = None

    @property
    def published(self) -> int:
        """Number of the last complete update."""
        return self._block.published

    def copy(self) -> tuple[dict[str, Tensor], int, int]:
        """Tensors, version and number of the newest update, in memory that the next copy reuses.

        The first attempts take no pin, so that the writer never waits; where it is so quick that
        it writes two updates during one copy, the buffer is pinned.
        """
        block = self._block
        if self._own is None:
            self._own = torch.empty(block.layout.nbytes, dtype=torch.uint8)
        for _ in range(_UNPINNED_ATTEMPTS):
            update, buffer = self._newest()
            if block.numbers[_STATES + buffer] != 2 * update:
                continue
            _fence()
            self._own.copy_(block.buffers[buffer])
            version = int(block.numbers[_VERSIONS + buffer])
            _fence()
            if block.numbers[_STATES + buffer] == 2 * update:
                return block.layout.views(self._own), version, update
        update, buffer = self._pin()
        try:
            self._own.copy_(block.buffers[buffer])
            version = int(block.numbers[_VERSIONS + buffer])
        finally:
            self.release()
        return block.layout.views(self._own), version, update

    def view(self) -> tuple[dict[str, Tensor], int, int]:
        """Like :meth:`copy`, but of the block itself, until :meth:`release`.

        The memory is read-only: writing to the tensors ends the process.
        """
        update, buffer = self._pin()
        version = int(self._block.numbers[_VERSIONS + buffer])
        return self._block.layout.views(self._block.buffers[buffer]), version, update

    def release(self) -> None:
        """Let the writer have the buffer again; a TornReadError where it did not wait for that."""
        if self._pinned is None:
            return
        update, self._pinned = self._pinned, None
        buffer = update % 2
        _fence()
        whole = self._block.pins[buffer, self._number] == 1
        self._block.pins[buffer, self._number] = 0
        if not whole:
            raise TornReadError(f"update {update} was overwritten: its reader was taken for dead")

    def _pin(self) -> tuple[int, int]:
        self.release()
        while True:
            update, buffer = self._newest()
            self._block.pins[buffer, self._number] = 1
            _fence()
            if self._block.numbers[_STATES + buffer] == 2 * update:
                self._pinned = update
                return update, buffer
            self._block.pins[buffer, self._number] = 0
            time.sleep(_PAUSE_SECONDS)

    def _newest(self) -> tuple[int, int]:
        update = self._block.published
        if not self._block.numbers[_STATES + update % 2]:
            raise WeightSyncError("no weights were published yet")
        return update, update % 2


def _block_bytes(layout: ByteLayout) -> int:
    return _pages(_HEADER_BYTES) + 2 * _pages(layout.nbytes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
