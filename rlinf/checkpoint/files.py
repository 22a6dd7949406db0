"""Writes that survive a crash: a file or a directory is there completely, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error means that nothing is broken and there is no room."""
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    if error is None or not type(error).__module__.startswith("safetensors"):
        return False
    told = re.search(r"\(os error (\d+)\)", str(error))  # all that it says of the system's error
    return told is not None and int(told[1]) in _DISK_FULL


def write_durable(path: Path, data: bytes) -> None:
    """Write ``data`` to a new file and return after it has reached the disk.

    Raises:
        OSError: With the name of the file.
    """
    try:
        with open(path, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(path)  # which writing does not give
        raise


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: a reader, or a crash, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_durable(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong counts
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Write a directory that is not there yet: yields where, and gives it its name at the end."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Return after the names inside the directory have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_link(link: Path, target: str) -> None:
    """Let the link point to ``target``, a name relative to it, in one step: it never dangles.

    On a file system without symbolic links nothing happens: nothing reads the link back.
    """
    temporary = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        try:
            temporary.symlink_to(target)
            os.replace(temporary, link)
        finally:
            temporary.unlink(missing_ok=True)
