"""The services that only the driver has."""

from __future__ import annotations

from typing import Any

from rlinf.scheduler.process import Process
from rlinf.scheduler.services.diagnosis import DiagnosisService
from rlinf.scheduler.services.leases import LeaseService
from rlinf.scheduler.services.registry import RegistryService
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.endpoint import Endpoint


class DriverServices:
    """Registry, leases, ports, diagnosis and, with a file for it, the timeline of a cluster."""

    def __init__(self, process: Process, trace_file: str | None) -> None:
        endpoint = process.endpoint
        self.leases = LeaseService(endpoint)
        self.ports = PortService(endpoint)
        self.registry = RegistryService(endpoint, self._worker_died)
        self.diagnosis = DiagnosisService(endpoint, self.registry.endpoints)
        self._launches: dict[str, Any] = {}
        endpoint.register("cluster.remember", self._remember)
        endpoint.register("cluster.launch_of", self._launches.__getitem__)
        self._tracer = None if trace_file is None else Tracer(trace_file)
        if self._tracer is not None:
            endpoint.register("trace.record", self._tracer.record_all)
            Tracer.enable(self._tracer.record_all)

    def _worker_died(self, worker: str) -> None:
        self.leases.release_holder(worker)
        self.ports.free_worker(worker)

    def _remember(self, launches: list[Any]) -> None:
        self._launches.update({launch.name: launch for launch in launches})

    def close(self) -> None:
        """Write the timeline out."""
        if self._tracer is not None:
            Tracer.disable()
            self._tracer.finalize()


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
