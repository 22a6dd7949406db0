"""What the allocator of this process does with memory that was freed."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_LARGEST_BLOCK = 32 * 2**20  # the most that glibc takes
_MOST_KEPT = 2**30
_OF_THE_USER = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """Use freed memory again, up to 1 GiB, rather than ask the kernel for fresh pages.

    glibc maps each block of more than 128 KiB to at most 32 MiB anew until it has seen the like
    freed, and gives back what lies free at the end of its heap. A network that computes on the CPU
    allocates and frees such blocks in every layer, and waits for thousands of pages to be filled
    with zeros in every pass. Nothing happens under another C library, or where the environment says
    what the allocator does (``MALLOC_…_``, ``GLIBC_TUNABLES``, ``LD_PRELOAD``).
    """
    if any(name.startswith(_OF_THE_USER) for name in os.environ):
        return
    if (set_option := _of_libc("mallopt")) is not None:
        set_option(_MMAP_THRESHOLD, _LARGEST_BLOCK)
        set_option(_TRIM_THRESHOLD, _MOST_KEPT)


def return_freed_memory() -> None:
    """Give freed memory back to the kernel, so that what the process holds is what it uses."""
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
