"""Where processes meet that exchange tensors: torch's key-value store behind one address.

Torch's own server listens on every address of its machine and asks nobody who he is. So the socket
is opened here, on loopback for a run on one machine; and keys are read as plain data, not pickles.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.errors import SchedulerUsageError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOPBACK = "127.0.0.1"

_own_ip = LOOPBACK
_listeners: dict[str, socket.socket] = {}  # of places that this process opened, not served yet


def listen_at(ip: str | None) -> None:
    """Say under which address other nodes reach this one; None: there are no others."""
    global _own_ip  # noqa: PLW0603 - the process has one
    _own_ip = ip or LOOPBACK


def open_place() -> str:
    """Listen for processes of the run that are to meet; returns the place ``host:port``."""
    ip = _own_ip
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    listener = socket.create_server((ip, 0), family=family)
    place = f"{ip}:{listener.getsockname()[1]}"
    _listeners[place] = listener
    return place


def meet(place: str, seconds: float) -> Store:
    """The store of a place, which the process serves that opened it.

    A wait takes so long at most; RuntimeError where nobody answers.
    """
    import torch.distributed

    host, _, port = place.rpartition(":")
    listener = _listeners.pop(place, None)
    more: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener else {}
    library: Any = torch.distributed
    store: Store = library.TCPStore(
        host,
        int(port),
        is_master=listener is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        **more,
    )
    return store


def loopback_interface() -> str:
    """Name of the network interface that nothing outside of this machine reaches."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def require_interfaces(names: str) -> None:
    """Refuse network interfaces, with commas between them, that this machine does not have."""
    known = [name for _, name in socket.if_nameindex()]
    missing = [name for name in names.split(",") if name not in known]
    if missing:
        raise SchedulerUsageError(
            f"RLINF_COMM_NET_DEVICES names {', '.join(map(repr, missing))}, which this machine "
            f"does not have; it has {', '.join(known)}"
        )
