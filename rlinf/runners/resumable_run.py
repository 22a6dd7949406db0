"""What a training run consists of: workers, steps under way, files; how it is kept and goes on."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from rlinf.checkpoint.store import CheckpointStore
from rlinf.checkpoint.writing import Parts
from rlinf.config.dump import config_hash, to_data
from rlinf.errors import CheckpointError
from rlinf.flow.executor import RunningStep
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import SwitchFailure
from rlinf.flow.planning_traits import warm_up_steps
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.timeline import TimelineFile
from rlinf.runners.worker_system import WorkerSystem

log = logging.getLogger(__name__)


@dataclass
class RunState:
    """What a runner itself must remember to continue."""

    step: int = 0
    training_seconds: float = 0.0
    success: float = float("nan")
    success_step: int = -1
    best_success: float = -1.0

    @property
    def evaluated_now(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        return self.success_step == self.step

    def note_success(self, success: float) -> None:
        """Remember what an evaluation after the last step showed."""
        self.success, self.success_step = success, self.step


ConfigT = TypeVar("ConfigT", bound=PlacedConfig)
StateT = TypeVar("StateT", bound=RunState)
SystemT = TypeVar("SystemT", bound=WorkerSystem)


class ResumableRun(ABC, Generic[ConfigT, StateT, SystemT]):
    """A run that can be kept at any step, and continued from it, also under another placement.

    Args:
        config: The run's configuration.
        directory: Where everything is written.
        stop: Set to end after the current step, with a checkpoint.
    """

    def __init__(self, config: ConfigT, directory: RunDirectory, stop: threading.Event) -> None:
        self._config = config
        self._directory = directory
        self._stop = stop
        self._state = self._new_state()
        self._under_way: deque[RunningStep] = deque()
        self._weights_of = -1  # the step whose weights the rollout workers have, or will have
        self._counts_from = 0  # the first step whose time counts
        self._at_its_worst = False

    # -- what a subclass says -------------------------------------------------------------------

    @abstractmethod
    def _new_state(self, **values: Any) -> StateT:
        """The state at the beginning, or that of a checkpoint."""

    @abstractmethod
    def _new_system(self) -> SystemT:
        """The worker groups, not started."""

    def _progress_of_run(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says beside its step."""
        return {}

    # -- workers and files ----------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        """Open everything that the run writes, then start its workers."""
        config, directory = self._config, self._directory
        self._store = stack.enter_context(
            CheckpointStore(
                directory.checkpoints, config.checkpoint, config_hash=config_hash(config)
            )
        )
        self._metrics_log = stack.enter_context(
            MetricsLog(directory.path, config.logger, run_config=to_data(config))
        )
        self._timeline = stack.enter_context(
            TimelineFile(directory.timeline, enabled=config.runner.timeline)
        )
        self._system = self._new_system()
        self._system.__enter__()
        stack.push(self._leave_system)

    def _leave_system(self, *exception: Any) -> None:
        """End the worker groups that there are then; those of the beginning may be gone."""
        self._system.__exit__(*exception)

    # -- another placement ----------------------------------------------------------------------

    def _switch(self, config: PlacedConfig) -> float:
        """Go on under another placement, as if nothing had happened; returns the seconds it took.

        Args:
            config: The same run, placed otherwise.

        Raises:
            SwitchFailure: Its workers did not start, or did not take the state; the run goes on
                under the placement that it had.
        """
        begin = time.perf_counter()
        tree, before = self._save(blocking=True), self._config
        if self._system.writes_parts and self._store.last_committed_step != self._state.step:
            # What workers write themselves is nowhere else.
            reason = CheckpointError("the run's state did not fit on the disk")
            raise SwitchFailure(reason, time.perf_counter() - begin)
        self._system.close()
        try:
            self._go_on(cast("ConfigT", config), tree)
        except Exception as error:
            log.warning("a placement did not start", exc_info=True)
            self._go_on(before, tree)
            raise SwitchFailure(error, time.perf_counter() - begin) from error
        return time.perf_counter() - begin

    def _go_on(self, config: ConfigT, tree: dict[str, Any]) -> None:
        """Start the workers of a config, with everything that a checkpoint says of workers."""
        self._config = config
        self._system = self._new_system()
        self._system.__enter__()
        try:
            self._load_system(tree, self._store.path(self._state.step))
        except BaseException:
            self._system.close(failed=True)
            raise
        self._weights_of = -1
        self._warm_up()

    def _warm_up(self) -> None:
        """Let the next steps be the first ones of a measurement: their memory counts, not time."""
        self._counts_from = self._state.step + warm_up_steps(self._config)

    def _load_system(self, tree: dict[str, Any], checkpoint: Path) -> None:
        self._system.load_state(tree["system"], checkpoint)
        self._under_way = deque(self._system.restore_steps(tree["under_way"]))

    # -- checkpoints ----------------------------------------------------------------------------

    def _save(self, *, blocking: bool) -> dict[str, Any]:
        """Commit everything that the run needs to continue; returns it.

        What workers write into the checkpoint themselves is in its directory alone.
        """
        begin = time.perf_counter()
        tree: dict[str, Any] = {
            "runner": asdict(self._state),
            "under_way": self._system.save_steps(self._under_way),
            "system": self._system.state(),
            "metrics": self._metrics_log.cursor(),
            **self._own_state(),
        }
        parts = None
        if self._system.writes_parts:
            parts = self._save_parts()
            if parts is None:
                return tree
        self._store.save(
            self._state.step,
            tree,
            parts=parts,
            meta=self._progress_of_run(),
            metric=self._state.success if self._state.evaluated_now else None,
            blocking=blocking,
        )
        log.debug("checkpoint blocked the run for %.1f ms", 1e3 * (time.perf_counter() - begin))
        return tree

    def _save_parts(self) -> Parts | None:
        """Let workers write their parts of a checkpoint; None where there was no room for them.

        Raises:
            CheckpointError: They could not write, and the run is not to go on.
        """
        step = self._state.step
        directory = self._store.begin(step)
        if directory is None:
            return None
        try:
            return Parts(directory, self._system.save_parts(directory))
        except BaseException as error:
            self._store.give_up(directory, step, error)
            if not isinstance(error, OSError):
                raise
            return None

    def _own_state(self) -> dict[str, Any]:
        """Further state of the runner, beside that of its workers."""
        return {}

    def _load_own_state(self, tree: dict[str, Any]) -> None:
        """Continue from :meth:`_own_state`, which is part of ``tree``."""
        del tree

    def _restore(self) -> bool:
        """Continue from the newest good checkpoint; False where there is none yet."""
        if not self._store.steps():
            self._metrics_log.truncate({"bytes": 0, "lines": 0})
            return False
        checkpoint = self._store.load()
        self._store.discard_after(checkpoint.step)
        self._state = self._new_state(**checkpoint.tree["runner"])
        self._load_system(checkpoint.tree, checkpoint.path)
        self._load_own_state(checkpoint.tree)
        self._metrics_log.truncate(checkpoint.tree["metrics"])
        log.info("continuing after step %d", checkpoint.step)
        return True
