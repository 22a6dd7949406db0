"""The worker groups of a run on a cluster: started together, ended together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

from rlinf.flow.executor import Executor
from rlinf.flow.graph import Flow
from rlinf.flow.stage_worker import StageWorker
from rlinf.runners.placed_config import PlacedConfig
from rlinf.scheduler import Cluster, ComponentPlacement
from rlinf.scheduler.worker_group import WorkerGroup


class WorkerSystem(ABC):
    """A context manager that starts the groups of a run and ends them.

    Args:
        config: The run's configuration.
    """

    _cluster: Cluster

    def __init__(self, config: PlacedConfig) -> None:
        self._plan = config.plan
        self._placed = config
        self._groups: dict[str, WorkerGroup] = {}
        self._executors: list[Executor] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _start(self) -> None:
        """Launch the groups and let them build what they need."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """State of every worker, for a checkpoint."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""

    @abstractmethod
    def _closing(self) -> Iterable[str]:
        """Groups whose workers hold what must be given back."""

    def _launch(self, workers: Mapping[str, tuple[type[StageWorker], Any]]) -> None:
        """Join the cluster and launch a group for each component.

        Args:
            workers: Worker class and its setup, by component.
        """
        self._cluster = Cluster(cluster_cfg=self._placed.cluster)
        placement = ComponentPlacement(
            {"cluster": {"component_placement": self._placed.placement()}}, self._cluster
        )
        for name, (worker, setup) in workers.items():
            self._groups[name] = worker.create_group(setup).launch(
                self._cluster, placement_strategy=placement.get_strategy(name), name=name
            )

    def _new_executor(self, flow: Flow, sources: int) -> Executor:
        """An executor of a flow whose items are numbered by so many sources."""
        executor = Executor(
            flow,
            self._plan,
            self._groups,
            self._cluster,
            sources=sources,
            timeline=self._placed.runner.timeline,
        )
        self._executors.append(executor)
        return executor

    def close(self) -> None:
        """End what workers hold, the worker groups and the cluster."""
        for executor in self._executors:
            executor.close()
        if Cluster.has_initialized():
            for name in self._closing():
                if name in self._groups:
                    self._groups[name].close().wait()
            self._cluster.shutdown()
