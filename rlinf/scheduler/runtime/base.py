"""What the two runtimes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.node import NodeInfo
from rlinf.scheduler.process import Process
from rlinf.scheduler.runtime.execution import Outcome
from rlinf.scheduler.runtime.launch import Launch
from rlinf.scheduler.transport.payload import Payload

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.services.registry import RegistryService


class PendingCall(ABC):
    """A method call of one worker that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the outcome is there."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """The outcome, waiting for it if need be.

        Raises:
            WorkerDiedError: The worker's process ended.
        """

    @abstractmethod
    async def outcome_async(self) -> Outcome:
        """The outcome, waiting for it on the event loop."""


class WorkerHandle(ABC):
    """A launched worker, seen from outside."""

    actor: Any
    """What ``worker_info_list[i].worker`` gives: ``actor.method.remote(...)`` calls a method."""

    @abstractmethod
    def call(self, method: str, arguments: Payload) -> PendingCall:
        """Start a method call."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker."""


class Runtime(ABC):
    """Starts workers and carries their messages."""

    process: Process
    """The driver's part in the cluster."""

    nodes: list[NodeInfo]
    """Nodes of the cluster in order of rank."""

    token: str
    """Session of the cluster."""

    namespace: str
    """Name space of the cluster."""

    network_ips: dict[int, str]
    """Address of each node where there is more than one."""

    @abstractmethod
    def start(
        self,
        launch: Launch,
        worker_class: type,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        max_concurrency: int | None,
    ) -> WorkerHandle:
        """Start one worker without waiting for it."""

    @abstractmethod
    def find(self, worker_name: str, incarnation: str) -> WorkerHandle:
        """A running worker by name and incarnation of its group.

        Raises:
            SchedulerValueError: There is none.
        """

    @abstractmethod
    def wait_any(self, calls: Sequence[PendingCall], timeout: float) -> int | None:
        """Wait until one of several calls is done: its position, None when the time is over."""

    def channel_hosts(self, cluster: Cluster, nodes: Sequence[int]) -> Any:
        """Endpoints that host channels on these nodes, by node; may be a future of that."""
        return dict.fromkeys(nodes, self.process.driver)

    def watch_deaths(self, registry: RegistryService) -> None:
        """Tell the registry when a worker's process ends."""

    def flush_traces(self, registry: RegistryService) -> None:
        """Have every process hand over its trace events."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every worker and free everything."""
