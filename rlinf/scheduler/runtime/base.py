"""What the two runtimes, threads of one process and Ray actors, have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.node import NodeInfo
from rlinf.scheduler.process import Process
from rlinf.scheduler.runtime.execution import Outcome
from rlinf.scheduler.runtime.launch import Arguments, Launch
from rlinf.scheduler.transport.payload import Payload

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.services.registry import RegistryService


class WorkerHandle(ABC):
    """A launched worker, seen from outside.

    ``actor`` is what ``worker_info_list[i].worker`` gives: ``actor.method.remote(…)`` calls it.
    """

    actor: Any

    @abstractmethod
    def call(self, method: str, arguments: Payload) -> Future[Outcome]:
        """Start a method call; the future fails if the worker's process ends."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker."""


@dataclass(eq=False, repr=False)
class Runtime(ABC):
    """Starts workers and carries their messages."""

    process: Process  # this process's part in the cluster
    nodes: list[NodeInfo]  # of the cluster in order of rank
    token: str  # name and secret of the cluster
    namespace: str  # of the cluster
    network_ips: dict[int, str]  # address of each node where there is more than one

    @abstractmethod
    def start(
        self, launch: Launch, worker_class: type, arguments: Arguments, max_concurrency: int | None
    ) -> WorkerHandle:
        """Start one worker without waiting for it."""

    @abstractmethod
    def find(self, worker_name: str, incarnation: str) -> WorkerHandle:
        """A running worker by name and incarnation of its group; SchedulerValueError without."""

    def channel_hosts(self, cluster: Cluster, nodes: Sequence[int]) -> dict[int, str | None]:
        """Workers that host channels on these nodes; None where the driver does."""
        return dict.fromkeys(nodes)

    def watch_deaths(self, registry: RegistryService) -> None:
        """Tell the registry when a worker's process ends."""

    def flush_traces(self, registry: RegistryService) -> None:
        """Have every process hand over its trace events."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every worker and free everything."""
