"""What every training run does around its steps: open, restore, commit, conclude."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, cast

from rlinf.checkpoint.store import CheckpointStore
from rlinf.config.dump import config_hash, to_data
from rlinf.flow.executor import RunningStep, StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.measure import WARM_UP_STEPS
from rlinf.flow.stage_worker import WorkerPlace
from rlinf.monitor.curve import write_learning_curve
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.monitor.progress import Progress
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.timeline import TimelineFile
from rlinf.runners.auto_plan import AutoPlanner
from rlinf.runners.placed_config import PlacedConfig
from rlinf.runners.recording import FirstSteps
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


@dataclass(frozen=True)
class WorstCase:
    """What a run for its memory found.

    Args:
        reports: Of its steps.
        places: Of its workers.
    """

    reports: list[StepReport]
    places: list[WorkerPlace]


ConfigT = TypeVar("ConfigT", bound=PlacedConfig)
StateT = TypeVar("StateT", bound=RunState)
SystemT = TypeVar("SystemT", bound=WorkerSystem)


class TrainingRunner(ABC, Generic[ConfigT, StateT, SystemT]):
    """Trains step by step, commits checkpoints, and can be continued from any of them.

    A subclass says what a step is; metrics, progress, timeline, checkpoints and the end are the
    same for all.

    The rollout of step s begins when s − k training steps have been done and their weights have
    arrived, where k is the largest staleness: with k = 0 each rollout waits for the training phase
    before it, with more it runs beside it. Which weights a rollout has depends on s and k alone.

    Args:
        config: The run's configuration.
        directory: Where everything is written.
        stop: Set to end after the current step, with a checkpoint.
    """

    figures: tuple[tuple[str, str, str], ...]
    """What the progress display shows, besides step, times and ETA: label, metric, format."""

    def __init__(self, config: ConfigT, directory: RunDirectory, stop: threading.Event) -> None:
        self._config = config
        self._directory = directory
        self._stop = stop
        self._state = self._new_state()
        self._under_way: deque[RunningStep] = deque()
        self._weights_of = -1  # the step whose weights the rollout workers have, or will have
        self._at_its_worst = False

    # -- what a subclass says -------------------------------------------------------------------

    @abstractmethod
    def _new_state(self, **values: Any) -> StateT:
        """The state at the beginning, or that of a checkpoint."""

    @abstractmethod
    def _new_system(self) -> SystemT:
        """The worker groups, not started."""

    @property
    @abstractmethod
    def _training_steps(self) -> int:
        """Steps of the whole run."""

    @property
    @abstractmethod
    def _max_staleness(self) -> int:
        """Training phases that may lie between the weights of a rollout and its training."""

    @abstractmethod
    def _start_step(self, step: int, *, synchronise: bool) -> RunningStep:
        """Let the rollout of a step begin, under the newest weights or those of the one before."""

    @abstractmethod
    def _metrics(self, report: StepReport) -> dict[str, float]:
        """Metrics of one step, from what the workers returned."""

    @abstractmethod
    def _evaluate_now(self) -> dict[str, float] | None:
        """Evaluate, where it is due after this step; returns what is to be logged."""

    @abstractmethod
    def _conclude(self) -> None:
        """Last evaluation, and what is left behind."""

    def _begin(self) -> None:
        """What comes before the first step of a run that is not resumed."""

    def _solved(self) -> bool:
        """Whether training may end before all its steps."""
        return False

    def _progress_of_run(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says beside its step."""
        return {}

    # -- the run --------------------------------------------------------------------------------

    def run(self, *, resume: bool) -> StateT:
        """Train, evaluate, and leave curve and weights behind.

        Ends early, with a checkpoint, when ``stop`` is set. A failure of a worker is raised after
        the other workers were ended; what was committed before stays.
        """
        with ExitStack() as stack:
            self._open(stack)
            restored = resume and self._restore()
            if not restored:
                self._begin()
            planner = self._new_planner()
            first = FirstSteps(self._config, self._training_flow, self._directory.path)
            self._progress = stack.enter_context(
                Progress(self._training_steps, done_steps=self._state.step, figures=self.figures)
            )
            while not self._finished():
                report, seconds = self._step()
                if planner is not None:
                    planner.after_step(self._state.step, report, seconds)
                else:
                    first.observe(report, seconds)
            self._save(blocking=True)
            self._progress.stop()
            if not self._stop.is_set():
                self._conclude()
        return self._state

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
        # Without accelerators processes are watched from outside.
        self._system.watch_memory(self._at_its_worst and config.on_accelerators)

    def _leave_system(self, *exception: Any) -> None:
        """End the worker groups that there are then; those of the beginning may be gone."""
        self._system.__exit__(*exception)

    def _finished(self) -> bool:
        return self._stop.is_set() or self._solved() or self._state.step >= self._training_steps

    def _step(self) -> tuple[StepReport, float]:
        """One training step: train, write down, evaluate, commit; returns its report and time."""
        begin = time.perf_counter()
        self._start_steps()
        report = self._under_way.popleft().wait()
        if self._at_its_worst:
            self._worst.reports.append(report)
            self._worst.places[:] = self._system.places()
        metrics = self._metrics(report)
        seconds = time.perf_counter() - begin
        self._state.step += 1
        self._state.training_seconds += seconds
        metrics["time/step"] = seconds
        metrics["time/sync_weights"] = report.begin_seconds
        metrics.update(self._rates(seconds))
        metrics.update(self._evaluate_now() or {})
        self._metrics_log.log(self._state.step, metrics)
        self._progress.update(self._state.step, metrics)
        self._timeline.write(report.events)
        # Asked first: it remembers the best.
        if self._found_best() or self._config.checkpoint.due(self._state.step):
            self._save(blocking=False)
        return report, seconds

    @property
    @abstractmethod
    def _training_flow(self) -> Flow:
        """What happens in a step."""

    def _new_planner(self) -> AutoPlanner | None:
        """What changes the placement while training, where the recipe asks for it."""
        policy = self._config.runner.plan
        if policy is None:
            return None
        planner = AutoPlanner(
            policy,
            self._config,
            self._training_flow,
            directory=self._directory.path,
            switch=self._switch,
        )
        planner.begin(self._state.step)
        return planner

    def _switch(self, config: PlacedConfig) -> float:
        """Go on under another placement, as if nothing had happened; returns the seconds it took.

        Args:
            config: The same run, placed otherwise.
        """
        begin = time.perf_counter()
        steps, state = self._system.save_steps(self._under_way), self._system.state()
        self._system.close()
        self._config = cast("ConfigT", config)
        self._system = self._new_system()
        self._system.__enter__()
        self._system.load_state(state)
        self._under_way = deque(self._system.restore_steps(steps))
        self._weights_of = -1
        return time.perf_counter() - begin

    def _start_steps(self) -> None:
        """Let all rollouts begin that may; the first of them takes the newest weights."""
        done = self._state.step
        last = min(done + self._max_staleness, self._training_steps - 1)
        for step in range(done + len(self._under_way), last + 1):
            fresh = self._weights_of == done and self._system.keeps_weights
            self._under_way.append(self._start_step(step, synchronise=not fresh))
            self._weights_of = done

    def _synchronise(self) -> None:
        """Bring the newest weights to the rollout workers; the next rollout would get the same."""
        if self._weights_of != self._state.step or not self._system.keeps_weights:
            self._system.sync_weights()
            self._weights_of = self._state.step

    def _rates(self, seconds: float) -> dict[str, float]:
        """Metrics per second of a step that took so long."""
        del seconds
        return {}

    def _due(self, interval: int) -> bool:
        return interval > 0 and self._state.step % interval == 0

    def _found_best(self) -> bool:
        """Whether this step's evaluation is the best so far, so that its weights are kept."""
        state = self._state
        if not state.evaluated_now or state.success <= state.best_success:
            return False
        state.best_success = state.success
        return self._config.checkpoint.keep_best > 0

    def _show_curve(self) -> None:
        print(f"learning curve: {write_learning_curve(self._directory.path)}", flush=True)

    # -- without a run ---------------------------------------------------------------------------

    def rehearse(self, steps: int) -> Iterator[StepReport]:
        """Train some steps of which nothing is kept.

        The reports of the first say how much memory was held; those of the others do not, as to
        watch it takes time.
        """
        with self._new_system() as self._system:
            self._system.watch_memory(True)
            for number in range(steps):
                if number == WARM_UP_STEPS:
                    self._system.watch_memory(False)
                self._start_steps()
                report = self._under_way.popleft().wait()
                self._metrics(report)
                self._state.step += 1
                yield report

    def run_worst_case(self) -> WorstCase:
        """Run as configured, with the longest prompts that there are; for the memory it takes."""
        self._at_its_worst = True
        self._worst = WorstCase([], [])
        self.run(resume=False)
        return self._worst

    # -- checkpoints ----------------------------------------------------------------------------

    def _save(self, *, blocking: bool) -> None:
        begin = time.perf_counter()
        tree = {
            "runner": asdict(self._state),
            "under_way": self._system.save_steps(self._under_way),
            "system": self._system.state(),
            "metrics": self._metrics_log.cursor(),
            **self._own_state(),
        }
        self._store.save(
            self._state.step,
            tree,
            meta=self._progress_of_run(),
            metric=self._state.success if self._state.evaluated_now else None,
            blocking=blocking,
        )
        log.debug("checkpoint blocked the run for %.1f ms", 1e3 * (time.perf_counter() - begin))

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
        self._system.load_state(checkpoint.tree["system"])
        self._under_way.extend(self._system.restore_steps(checkpoint.tree["under_way"]))
        self._load_own_state(checkpoint.tree)
        self._metrics_log.truncate(checkpoint.tree["metrics"])
        log.info("continuing after step %d", checkpoint.step)
        return True
