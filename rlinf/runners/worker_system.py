"""The worker groups of a run on a cluster: started together, ended together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from rlinf.checkpoint.manifest import FileRecord
from rlinf.checkpoint.records import from_tree, to_tree
from rlinf.flow.executor import Executor, Hooks, RunningStep, SavedStep
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.running_step import Arguments, Reports
from rlinf.flow.stage_worker import StageCost, StageReport, StageWorker, WorkerPlace
from rlinf.flow.stream import Item
from rlinf.runners.weight_handover import WeightHandover
from rlinf.scheduler import Cluster, ComponentPlacement
from rlinf.scheduler.worker_group import WorkerGroup

_PATIENCE_SECONDS = 5.0
"""For workers to close after a failure."""


class WorkerSystem(ABC):
    """A context manager that starts the groups of a run and ends them.

    Args:
        config: The run's configuration.
    """

    records: ClassVar[tuple[type, ...]] = ()
    """Classes of what a step hands from its rollout to its training, and of what it reports."""

    _cluster: Cluster
    _training: Executor
    _weights: WeightHandover

    def __init__(self, config: PlacedConfig) -> None:
        self._plan = config.plan
        self._placed = config
        self._groups: dict[str, WorkerGroup] = {}
        self._executors: list[Executor] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close(failed=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)

    @abstractmethod
    def _start(self) -> None:
        """Launch the groups and let them build what they need."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """State of every worker, for a checkpoint."""

    @abstractmethod
    def load_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Continue from :meth:`state`.

        Args:
            state: What it gave.
            checkpoint: Directory of the checkpoint, where workers may have written parts.
        """

    @property
    def writes_parts(self) -> bool:
        """Whether workers write some of their state into a checkpoint themselves."""
        return False

    def save_parts(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Let workers write what :meth:`state` leaves to them.

        Args:
            checkpoint: Directory of the checkpoint, which is not committed yet.

        Returns:
            The files that they wrote, by their names in it.

        Raises:
            OSError: One could not write.
        """
        del checkpoint
        return {}

    @abstractmethod
    def _closing(self) -> Iterable[str]:
        """Groups whose workers hold what must be given back."""

    def _arguments(self, step: int) -> Arguments:
        """Arguments of the stages of a training step that its number says."""
        del step
        return {}

    # -- training steps -------------------------------------------------------------------------

    def start_step(
        self,
        step: int,
        *,
        synchronise: bool,
        draw: Callable[[], Arguments] = dict,
        ended: Callable[[Reports], None] = lambda reports: None,
    ) -> RunningStep:
        """Let the rollout of a training step begin; the rest begins when the step is waited for.

        Args:
            step: Number of the step.
            synchronise: Whether the rollout workers get the newest weights first.
            draw: Called when the rollout of the step before has ended; further arguments.
            ended: Called with the reports of the rollout when it has ended.
        """
        receive = self._weights.begin() if synchronise else None

        def begin() -> Arguments:
            if receive is not None:
                receive()
            return draw()

        try:
            return self._training.start(step, self._arguments(step), Hooks(begin, ended))
        except BaseException:
            if receive is not None:
                with suppress(Exception):  # what made the start fail is what is to be told
                    receive()
            raise

    @property
    def keeps_weights(self) -> bool:
        """Whether rollout workers have the same weights until they get others."""
        return self._plan.components["rollout"].residency == "resident"

    def sync_weights(self) -> int:
        """Bring the newest weights to every rollout worker, once all of them are at rest.

        Returns:
            Their version.
        """
        for executor in self._executors:
            executor.settle()
        return self._weights.begin()()

    def save_steps(self, steps: Iterable[RunningStep]) -> list[Any]:
        """What steps under way have generated ahead, for a checkpoint; waits for the rollouts."""
        return [to_tree(self._training.save(step)) for step in steps]

    def restore_steps(self, saved: Sequence[Any]) -> list[RunningStep]:
        """Steps under way as :meth:`save_steps` gave them."""
        records = (SavedStep, StageReport, StageCost, Item, *self.records)
        steps: list[SavedStep] = [from_tree(tree, records) for tree in saved]
        return [self._training.restore(step, self._arguments(step.step)) for step in steps]

    def watch_memory(self, on: bool) -> None:
        """Let the reports of training steps that start from now on say what memory stages held."""
        self._training.watch_memory(on)

    def places(self) -> list[WorkerPlace]:
        """Where every worker is."""
        handles = [group.place() for group in self._groups.values()]
        return [place for handle in handles for place in handle.wait()]

    # -- groups and executors -------------------------------------------------------------------

    def _launch(self, workers: Mapping[str, tuple[type[StageWorker], Any]]) -> None:
        """Join the cluster and launch a group for each component.

        Args:
            workers: Worker class and its setup, by component.
        """
        self._cluster = Cluster(cluster_cfg=self._placed.cluster)
        self._placed.check_nodes([len(ranks) for ranks in self._cluster.accelerator_ranks])
        placement = ComponentPlacement(
            {"cluster": {"component_placement": self._placed.placement()}}, self._cluster
        )
        for name, (worker, setup) in workers.items():
            self._groups[name] = worker.create_group(setup).launch(
                self._cluster, placement_strategy=placement.get_strategy(name), name=name
            )

    def _new_executor(
        self, flow: Flow, sources: int, depth: int = 1, handing_over: Collection[str] = ()
    ) -> Executor:
        """An executor of a flow.

        Args:
            flow: The flow.
            sources: How many sub-batches its items are numbered by.
            depth: Most steps under way.
            handing_over: Components whose workers lease their devices themselves.
        """
        executor = Executor(
            flow,
            self._plan,
            self._groups,
            self._cluster,
            sources=sources,
            depth=depth,
            timeline=self._placed.runner.timeline,
            handing_over=handing_over,
        )
        self._executors.append(executor)
        return executor

    def close(self, *, failed: bool = False) -> None:
        """End what workers hold, the worker groups and the cluster.

        Args:
            failed: Workers may be dead, or wait for one that is: they get a few seconds, and what
                goes wrong is not told, as the first failure is.
        """
        for executor in self._executors:
            executor.close()
        if not Cluster.has_initialized():
            return
        groups = [self._groups[name] for name in self._closing() if name in self._groups]
        try:
            handles = [group.close() for group in groups]
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while failed and time.monotonic() < deadline and not all(h.done() for h in handles):
                time.sleep(0.02)
            for handle in handles if not failed else ():
                handle.wait()
        finally:
            self._cluster.shutdown()
