"""Which worker took which port on which node."""

from __future__ import annotations

from rlinf.scheduler.transport.endpoint import Endpoint


class PortService:
    """Keeps two workers of a node from taking the same free port."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._owners: dict[tuple[int, int], str] = {}
        endpoint.register("port.take", self.take)
        endpoint.register("port.free", self.free)

    def take(self, node_rank: int, port: int, worker: str) -> bool:
        """Claim a port; False if another worker has it."""
        return self._owners.setdefault((node_rank, port), worker) == worker

    def free(self, node_rank: int, port: int) -> None:
        """Give a port back."""
        self._owners.pop((node_rank, port), None)

    def free_worker(self, worker: str) -> None:
        """Give every port of a worker back."""
        for place in [place for place, owner in self._owners.items() if owner == worker]:
            del self._owners[place]
