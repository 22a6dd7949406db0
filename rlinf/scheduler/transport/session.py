"""Files of one cluster on one machine: sockets and shared-memory blocks, and their removal.

A cluster has a name. On its machine the driver holds a lock on ``rlinf-<name>.lock`` for as long
as it lives, on another one every worker does. So whoever can take that lock alone knows that they
are gone and may remove what they left. (A process id would not do: containers may share
``/dev/shm`` and not their process ids.)
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "rlinf-"
_LONGEST_SOCKET_DIRECTORY = 70  # the path of a Unix socket ends at about 107 characters


def shared_memory_directory() -> Path:
    """Where memory-backed files live: ``/dev/shm``, else the temporary directory."""
    directory = Path("/dev/shm")
    return directory if directory.is_dir() else Path(tempfile.gettempdir())


def socket_root() -> Path:
    """Where directories of Unix sockets can be: their paths must be short."""
    root = tempfile.gettempdir()
    return Path(root) if len(root) <= _LONGEST_SOCKET_DIRECTORY else Path("/tmp")


@dataclass(frozen=True)
class Session:
    """Names of the files that belong to one cluster.

    Args:
        token: ``name.secret``: the name is part of file names, the secret is what a process has to
            show before another node listens to it.
    """

    token: str

    @property
    def name(self) -> str:
        """The part of the token that is no secret."""
        return self.token.partition(".")[0]

    @property
    def block_prefix(self) -> str:
        """Every shared-memory block of the cluster starts with this."""
        return f"{_PREFIX}{self.name}-"

    @property
    def socket_directory(self) -> Path:
        """Private directory of the cluster's Unix sockets."""
        return socket_root() / f"{_PREFIX}{self.name}"

    @property
    def lock_path(self) -> Path:
        """File that the driver keeps locked while it lives."""
        return shared_memory_directory() / f"{_PREFIX}{self.name}.lock"

    def remove_files(self) -> None:
        """Remove every block and socket of the cluster."""
        for block in shared_memory_directory().glob(f"{self.block_prefix}*"):
            block.unlink(missing_ok=True)
        shutil.rmtree(self.socket_directory, ignore_errors=True)
        self.lock_path.unlink(missing_ok=True)


class OwnedSession:
    """The driver's hold on a session; removes what dead drivers left when it starts."""

    def __init__(self) -> None:
        remove_stale_sessions()
        self.session = Session(f"{secrets.token_hex(4)}.{secrets.token_hex(16)}")
        self._lock: int | None = os.open(self.session.lock_path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.session.socket_directory.mkdir(mode=0o700, parents=True)

    def close(self) -> None:
        """Remove the session's files and give up the lock."""
        if self._lock is None:
            return
        self.session.remove_files()
        os.close(self._lock)
        self._lock = None


def hold_session(session: Session) -> None:
    """Keep a session's files on a machine without its driver, while this process lives."""
    remove_stale_sessions()
    held = os.open(session.lock_path, os.O_CREAT | os.O_RDWR, 0o600)
    with suppress(BlockingIOError):  # nodes of one machine: its driver holds them
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_stale_sessions() -> None:
    """Remove the files of every session that no process of this machine holds any more."""
    for path in shared_memory_directory().glob(f"{_PREFIX}*.lock"):
        name = path.name.removeprefix(_PREFIX).removesuffix(".lock")
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            continue  # removed meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # it lives
        else:
            Session(name).remove_files()
        finally:
            os.close(descriptor)
