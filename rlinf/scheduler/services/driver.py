"""The services that only the driver has."""

from __future__ import annotations

from typing import Any

from rlinf.scheduler.process import Process
from rlinf.scheduler.services.diagnosis import DiagnosisService
from rlinf.scheduler.services.leases import LeaseService
from rlinf.scheduler.services.ports import PortService
from rlinf.scheduler.services.registry import RegistryService
from rlinf.scheduler.tracer import Tracer


class DriverServices:
    """Registry, leases, ports, diagnosis and trace of a cluster.

    Args:
        process: The driver's part in the cluster.
        trace_file: Where to write the timeline; None records none.
    """

    def __init__(self, process: Process, trace_file: str | None) -> None:
        endpoint = process.endpoint
        self.leases = LeaseService(endpoint)
        self.ports = PortService(endpoint)
        self.registry = RegistryService(endpoint, self._worker_died)
        self.diagnosis = DiagnosisService(endpoint, self.registry.endpoints)
        self._launches: dict[str, Any] = {}
        self._tracer = None if trace_file is None else Tracer(trace_file)
        endpoint.register("cluster.remember", self._remember)
        endpoint.register("cluster.launch_of", self._launches.__getitem__)
        endpoint.register("trace.record", self._record)
        if self._tracer is not None:
            Tracer.enable(self._record)

    def _worker_died(self, worker: str) -> None:
        self.leases.release_holder(worker)
        self.ports.free_worker(worker)

    def _remember(self, launches: list[Any]) -> None:
        self._launches.update({launch.name: launch for launch in launches})

    def _record(self, events: list[dict[str, Any]]) -> None:
        if self._tracer is not None:
            self._tracer.record_all(events)

    def close(self) -> None:
        """Write the timeline out."""
        if self._tracer is not None:
            Tracer.disable()
            self._tracer.finalize()
