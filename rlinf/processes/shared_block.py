"""Named arrays in memory that a process shares with its children.

The memory has no name in the file system: nothing is left behind by ``kill -9``. Imports the
standard library and numpy alone.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Mapping, Tuple  # noqa: UP035 - the env side runs under 3.8 as well

import numpy as np

from rlinf.errors import RLinfError

ALIGNMENT = 64
"""Bytes to which every array is aligned: a cache line, and as torch aligns its own memory, so that
kernels compute the same bits."""

Fields = Mapping[str, Tuple[Tuple[int, ...], np.dtype]]  # noqa: UP006
"""Shape and type of every array, by name, in the order in which they lie in memory."""


class MemoryShortageError(RLinfError):
    """The machine has less shared memory than was asked for [bytes]."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} bytes of shared memory are wanted, {available} are available")
        self.wanted, self.available = wanted, available


def open_memory(name: str) -> int:
    """A descriptor of memory without a size; ``name`` is what tools show."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
    os.unlink(path)
    return descriptor


def memory_path(descriptor: int) -> Path:
    """File by which other processes of this user open the memory, as long as this one lives."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def reserve(descriptor: int, size: int) -> None:
    """Give memory its size, or raise a MemoryShortageError."""
    available = _available_bytes(descriptor)
    if available is not None and size > available:
        raise MemoryShortageError(size, available)
    try:
        # Reserving the pages makes too little memory an error here instead of a SIGBUS later.
        os.posix_fallocate(descriptor, 0, max(size, 1))
    except OSError as error:
        raise MemoryShortageError(size, available or 0) from error


def _available_bytes(descriptor: int) -> int | None:
    if not hasattr(os, "memfd_create"):
        state = os.fstatvfs(descriptor)
        return state.f_bavail * state.f_frsize
    try:
        with open("/proc/meminfo") as lines:
            found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
            return int(next(found)) * 1024
    except (OSError, StopIteration):
        return None


def block_size(fields: Fields) -> int:
    """Bytes that the arrays take."""
    return sum(_padded(shape, dtype) for shape, dtype in fields.values())


def _padded(shape: tuple[int, ...], dtype: np.dtype) -> int:
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return -(-size // ALIGNMENT) * ALIGNMENT


class SharedBlock:
    """The arrays of a block, by name, over one mapping.

    Where that is not ``writable``, to write to an array ends the process.
    """

    def __init__(self, descriptor: int, fields: Fields, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        size = max(block_size(fields), 1)
        self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, (shape, dtype) in fields.items():
            self.arrays[name] = np.ndarray(shape, dtype, self._memory, offset)
            offset += _padded(shape, dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays named ``prefix/key``, by key."""
        named = ((name.partition("/"), array) for name, array in self.arrays.items())
        return {key: array for (group, _, key), array in named if group == prefix and key}
