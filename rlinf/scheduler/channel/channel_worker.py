"""A worker that hosts channels, as published programs name it."""

from __future__ import annotations

from rlinf.scheduler.process import require_process
from rlinf.scheduler.worker import Worker


class ChannelWorker(Worker):
    """A worker that does nothing but answer for the channels that its endpoint hosts."""

    def host_address(self) -> str:
        """Endpoint at which channels can be opened."""
        return require_process().endpoint.address
