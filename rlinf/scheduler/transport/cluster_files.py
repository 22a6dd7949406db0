"""Files of one cluster on one machine: sockets and shared-memory blocks, and their removal.

Its processes hold a lock: who gets that alone knows that they are gone. (A process id would not do:
containers may share ``/dev/shm`` and not their process ids.)
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import select
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "rlinf-"
SHARED_MEMORY = Path("/dev/shm")
_REMOVE_SECONDS, _MOST_SECONDS_LEFT = 0.2, 60.0
log = logging.getLogger(__name__)
LONGEST_SOCKET = 107
"""Characters of the path of a Unix socket."""
_LONGEST_SOCKET_DIRECTORY = 70


def shared_memory_directory() -> Path:
    """Where memory-backed files live: ``/dev/shm``, else the temporary directory."""
    usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and SHARED_MEMORY.is_dir()
    return SHARED_MEMORY if usable else Path(tempfile.gettempdir())


def socket_root(longest: int = _LONGEST_SOCKET_DIRECTORY) -> Path:
    """Where directories of Unix sockets can be, whose paths must be short: the temporary directory,
    or ``/tmp`` where that has more characters."""
    root = tempfile.gettempdir()
    return Path(root) if len(root) <= longest else Path("/tmp")


class ClusterFiles:
    """The files of one cluster on this machine.

    Args:
        token: ``name.secret``: the name is part of file names, the secret is what a process has to
            show before another one listens to it.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.name = token.partition(".")[0]
        self.block_prefix = f"{_PREFIX}{self.name}-"
        self.socket_directory = socket_root() / f"{_PREFIX}{self.name}"
        self._lock_path = shared_memory_directory() / f"{_PREFIX}{self.name}.lock"
        self._lock: int | None = None

    @classmethod
    def create(cls) -> ClusterFiles:
        """Those of a new cluster, locked while this process, its driver, lives."""
        if SHARED_MEMORY.is_dir() and (other := shared_memory_directory()) != SHARED_MEMORY:
            log.warning(
                "%s cannot be written: what processes share lies in %s, which is slower on a disk",
                SHARED_MEMORY, other,
            )  # fmt: skip
        remove_stale_files()
        files = cls(f"{secrets.token_hex(4)}.{secrets.token_hex(16)}")
        fcntl.flock(files._open_lock(), fcntl.LOCK_EX)
        files.socket_directory.mkdir(mode=0o700, parents=True)
        _own.add(files)
        return files

    def hold(self) -> None:
        """Keep them on a machine without the driver, while this process lives."""
        remove_stale_files()
        with suppress(BlockingIOError):  # nodes of one machine: its driver holds them
            fcntl.flock(self._open_lock(), fcntl.LOCK_SH | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove every block and socket of the cluster."""
        for block in shared_memory_directory().glob(f"{self.block_prefix}*"):
            block.unlink(missing_ok=True)
        shutil.rmtree(self.socket_directory, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)

    def remove_after(self, pid: int) -> None:
        """Remove them when their driver, this process of the machine, has ended and left them."""
        threading.Thread(target=self._remove_after, args=(pid,), daemon=True).start()

    def _remove_after(self, pid: int) -> None:
        if not _wait_for_end(pid):
            return
        # Until this process is ended, too: it, or another one, may be about to write a block.
        limit = time.monotonic() + _MOST_SECONDS_LEFT
        while time.monotonic() < limit:
            if self._abandoned():
                self.remove()
            time.sleep(_REMOVE_SECONDS)

    def _abandoned(self) -> bool:
        try:
            descriptor = os.open(self._lock_path, os.O_RDWR)
        except OSError:
            return not self._lock_path.exists()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Remove the files, of which this process is the driver, and give up the lock."""
        if self._lock is not None:
            self.remove()
            _own.discard(self)
            os.close(self._lock)
            self._lock = None

    def _open_lock(self) -> int:
        self._lock = os.open(self._lock_path, os.O_CREAT | os.O_RDWR, 0o600)
        return self._lock


def _wait_for_end(pid: int) -> bool:
    """Wait for the end of a process; False where the kernel cannot say."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)
    return True


_own: set[ClusterFiles] = set()
"""Of the clusters that this process drives."""


def remove_own_files() -> None:
    """Remove the files of this process's clusters, whose other processes have been killed, before
    it ends without shutting them down."""
    for files in list(_own):
        files.remove()


def remove_stale_files() -> None:
    """Remove the files of every cluster that no process of this machine holds any more."""
    for path in shared_memory_directory().glob(f"{_PREFIX}*.lock"):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            continue  # removed meanwhile, or another user's
        with suppress(OSError):  # it lives
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ClusterFiles(path.name.removeprefix(_PREFIX).removesuffix(".lock")).remove()
        os.close(descriptor)
