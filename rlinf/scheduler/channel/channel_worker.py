"""The process that hosts channels on a node other than the driver's."""

from __future__ import annotations

from rlinf.scheduler.process import require_process
from rlinf.scheduler.worker import Worker


class ChannelWorker(Worker):
    """A worker that does nothing but answer for the channels that its endpoint hosts.

    Channels of the driver's node live in the driver and need no such process.
    """

    def host_address(self) -> str:
        """Endpoint at which channels can be opened."""
        return require_process().endpoint.address
