"""The one run: step by step, with metrics, plans, checkpoints and an end, whatever the task."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.checkpoint.contents import Parts
from rlinf.checkpoint.store import CheckpointStore
from rlinf.config.dump import config_hash, to_data
from rlinf.errors import CheckpointError
from rlinf.flow.executor import RunningStep, StepReport
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import SwitchFailure
from rlinf.flow.planning_traits import warm_up_steps
from rlinf.flow.stage_worker import WorkerPlace
from rlinf.monitor.curve import write_learning_curve
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.monitor.progress import Progress
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.timeline import TimelineFile
from rlinf.runners.groups import Groups
from rlinf.runners.task import Evaluated, Purpose, Task

log = logging.getLogger(__name__)


@dataclass
class RunState:
    """What a run must remember to continue, besides its task's state and that of its workers."""

    step: int = 0
    training_seconds: float = 0.0
    score: float = float("nan")
    """What the last evaluation showed."""
    score_step: int = -1
    best_score: float = float("-inf")

    @property
    def evaluated_now(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        return self.score_step == self.step


@dataclass
class WorstCase:
    """What a run for its memory found.

    Args:
        reports: Of its steps.
        places: Of its workers.
    """

    reports: list[StepReport] = field(default_factory=list)
    places: list[WorkerPlace] = field(default_factory=list)


class Run:
    """Trains step by step, commits checkpoints, and can be continued from any of them.

    The rollout of step s begins when s − k training steps have been done and their weights have
    arrived, where k is how far the task lets it run ahead: with k = 0 each rollout waits for the
    training phase before it, with more it runs beside it. Which weights a rollout has depends on s
    and k alone.

    Args:
        task: Class of the task.
        config: The run's configuration.
        directory: Where everything is written.
        stop: Set to end after the current step, with a checkpoint.
    """

    def __init__(
        self,
        task: type[Task[Any]],
        config: PlacedConfig,
        directory: RunDirectory,
        stop: threading.Event,
    ) -> None:
        self.task = task(config, directory.path)
        self.directory = directory
        self.state = RunState()
        self.groups: Groups
        self.last_evaluation: Evaluated | None = None
        self._config = config
        self._flow = task.flow(config)
        self._stop = stop
        self._under_way: deque[RunningStep] = deque()
        self._weights_of = -1  # the step whose weights the rollout workers have, or will have
        self._counts_from = 0  # the first step whose time counts
        self._worst: WorstCase | None = None

    def run(self, *, resume: bool = False) -> RunState:
        """Train, evaluate, and leave curve and weights behind.

        Ends early, with a checkpoint, when ``stop`` is set. A failure of a worker is raised after
        the other workers were ended; what was committed before stays.

        Args:
            resume: Go on from the newest good checkpoint, if there is one.
        """
        with ExitStack() as stack:
            self._open(stack)
            if not (resume and self._restore()):
                self.task.begin(self)
            self._warm_up()
            observe = self._observer()
            self._progress = stack.enter_context(
                Progress(self.task.steps, done_steps=self.state.step, figures=self.task.figures)
            )
            while not self._finished():
                observe(*self._step())
            self._save(blocking=True)
            self._progress.stop()
            if not self._stop.is_set():
                self.task.conclude(self)
        return self.state

    def _finished(self) -> bool:
        return self._stop.is_set() or self.task.finished or self.state.step >= self.task.steps

    # -- a step ---------------------------------------------------------------------------------

    def _step(self) -> tuple[StepReport, float]:
        """One training step: train, write down, evaluate, commit; returns its report and time."""
        begin = time.perf_counter()
        self._start_steps(self.task.steps)
        report = self._under_way.popleft().wait()
        if self._worst is not None:
            self._worst.reports.append(report)
            self._worst.places = self.groups.places()
        seconds = time.perf_counter() - begin
        metrics = self.task.metrics(report, step=self.state.step, seconds=seconds)
        self.state.step += 1
        self.state.training_seconds += seconds
        metrics["time/step"] = seconds
        metrics["time/sync_weights"] = report.begin_seconds
        interval = self.task.evaluation_interval
        if interval > 0 and self.state.step % interval == 0:
            metrics.update(self.evaluate("periodic"))
        self._metrics_log.log(self.state.step, metrics)
        self._progress.update(self.state.step, metrics)
        self._timeline.write(report.events)
        # Asked first: it remembers the best.
        if self._found_best() or self._config.checkpoint.due(self.state.step):
            self._save(blocking=False)
        return report, seconds

    def _start_steps(self, end: int) -> None:
        """Let all rollouts before ``end`` begin that may; the first takes the newest weights."""
        done = self.state.step
        for step in range(done + len(self._under_way), min(done + self.task.ahead + 1, end)):
            self.groups.watch_memory(self._watches_memory(step))
            fresh = self._weights_of == done and self.groups.keeps_weights
            self._under_way.append(
                self.groups.start_step(
                    step,
                    synchronise=not fresh,
                    draw=lambda: self.task.draw(worst=self._worst is not None),
                    ended=self.task.rolled_out,
                )
            )
            self._weights_of = done

    def _watches_memory(self, step: int) -> bool:
        """Whether the memory of a step is watched: its time must not count."""
        if self._worst is not None:  # without accelerators processes are watched from outside
            return self._config.on_accelerators
        return step < self._counts_from

    def _found_best(self) -> bool:
        """Whether this step's evaluation is the best so far, so that its weights are kept."""
        state = self.state
        if not state.evaluated_now or not state.score > state.best_score:
            return False
        state.best_score = state.score
        return self._config.checkpoint.keep_best > 0

    # -- what tasks do with a run -----------------------------------------------------------------

    def evaluate(self, purpose: Purpose) -> dict[str, float]:
        """Evaluate with the newest weights; returns what is to be logged, nothing without a set."""
        begin = time.perf_counter()
        self._synchronise()
        found = self.task.evaluate(self, purpose)
        if found is None:
            return {}
        self.last_evaluation = found
        if purpose == "periodic":
            self.state.score, self.state.score_step = found.score, self.state.step
        return {**found.metrics, "time/eval": time.perf_counter() - begin}

    def _synchronise(self) -> None:
        """Bring the newest weights to the rollout workers; the next rollout would get the same."""
        if self._weights_of != self.state.step or not self.groups.keeps_weights:
            self.groups.sync_weights()
            self._weights_of = self.state.step

    def restore_best(self) -> int:
        """Give the workers what they held after the best evaluation that is kept; its step."""
        best = self._store.load("best")
        self.groups.load_state(best.tree["workers"], best.path)
        self._weights_of = -1
        return best.step

    def log(self, metrics: dict[str, float]) -> None:
        """Write numbers down beside those of the last step, where there are any."""
        if metrics:
            self._metrics_log.log(self.state.step, metrics)

    def show_curve(self) -> None:
        """Draw the learning curve, and say where it is."""
        print(f"learning curve: {write_learning_curve(self.directory.path)}", flush=True)

    def save(self) -> None:
        """Commit a checkpoint now."""
        self._save(blocking=True)

    # -- workers and files ----------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        """Open everything that the run writes, then start its workers."""
        config, directory = self._config, self.directory
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
        self.groups = Groups(self.task)
        self.groups.__enter__()
        stack.push(self._leave_groups)

    def _leave_groups(self, *exception: Any) -> None:
        """End the workers that there are then; those of the beginning may be gone."""
        self.groups.__exit__(*exception)

    # -- another placement ----------------------------------------------------------------------

    @property
    def _plannable(self) -> bool:
        """Whether the task says what planning must know."""
        return type(self._config).planning is not PlacedConfig.planning

    def _observer(self) -> Callable[[StepReport, float], None]:
        """What sees each step and its time: who seeks a faster placement, or else a profile."""
        if not self._plannable:
            return lambda report, seconds: None
        from rlinf.planner.auto import step_observer

        config = self._config
        observer = step_observer(
            config,
            self._flow,
            self.directory.path,
            step=self.state.step,
            switch=self._switch,
            warm_up=self._warm_up,
        )

        def after_step(report: StepReport, seconds: float) -> None:
            if config.auto_plan is None or not self._finished():  # else there is no step to place
                observer.after_step(self.state.step, report, seconds)

        return after_step

    def _warm_up(self) -> None:
        """Let the next steps be the first ones of a measurement: their memory counts, not time."""
        self._counts_from = self.state.step
        if self._plannable:
            self._counts_from += warm_up_steps(self._config)

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
        if self.groups.writes_parts and self._store.last_committed_step != self.state.step:
            # What workers write themselves is nowhere else.
            reason = CheckpointError("the run's state did not fit on the disk")
            raise SwitchFailure(reason, time.perf_counter() - begin)
        self.groups.close()
        try:
            self._go_on(config, tree)
        except Exception as error:
            log.warning("a placement did not start", exc_info=True)
            self._go_on(before, tree)
            raise SwitchFailure(error, time.perf_counter() - begin) from error
        return time.perf_counter() - begin

    def _go_on(self, config: PlacedConfig, tree: dict[str, Any]) -> None:
        """Start the workers of a config, with everything that a checkpoint says of workers."""
        self._config = self.task.config = config
        self.groups = Groups(self.task)
        self.groups.__enter__()
        try:
            self._load_workers(tree, self._store.path(self.state.step))
        except BaseException:
            self.groups.close(failed=True)
            raise
        self._weights_of = -1
        self._warm_up()

    # -- checkpoints ----------------------------------------------------------------------------

    def _save(self, *, blocking: bool) -> dict[str, Any]:
        """Commit everything that the run needs to continue; returns it.

        What workers write into the checkpoint themselves is in its directory alone.
        """
        begin = time.perf_counter()
        tree: dict[str, Any] = {
            "run": asdict(self.state),
            "task": self.task.state_dict(),
            "under_way": self.groups.save_steps(self._under_way),
            "workers": self.groups.state(),
            "metrics": self._metrics_log.cursor(),
        }
        parts = None
        if self.groups.writes_parts:
            parts = self._save_parts()
            if parts is None:
                return tree
        self._store.save(
            self.state.step,
            tree,
            parts=parts,
            meta=self.task.progress(),
            metric=self.state.score if self.state.evaluated_now else None,
            blocking=blocking,
        )
        log.debug("checkpoint blocked the run for %.1f ms", 1e3 * (time.perf_counter() - begin))
        return tree

    def _save_parts(self) -> Parts | None:
        """Let workers write their parts of a checkpoint; None where there was no room for them.

        Raises:
            CheckpointError: They could not write, and the run is not to go on.
        """
        step = self.state.step
        directory = self._store.begin(step)
        if directory is None:
            return None
        try:
            return Parts(directory, self.groups.save_parts(directory))
        except BaseException as error:
            self._store.give_up(directory, step, error)
            if not isinstance(error, OSError):
                raise
            return None

    def _restore(self) -> bool:
        """Continue from the newest good checkpoint; False where there is none yet."""
        if not self._store.steps():
            self._metrics_log.truncate({"bytes": 0, "lines": 0})
            return False
        checkpoint = self._store.load()
        self._store.discard_after(checkpoint.step)
        self.state = RunState(**checkpoint.tree["run"])
        self._load_workers(checkpoint.tree, checkpoint.path)
        self.task.load_state_dict(checkpoint.tree["task"])
        self._metrics_log.truncate(checkpoint.tree["metrics"])
        log.info("continuing after step %d", checkpoint.step)
        return True

    def _load_workers(self, tree: dict[str, Any], checkpoint: Path) -> None:
        self.groups.load_state(tree["workers"], checkpoint)
        self._under_way = deque(self.groups.restore_steps(tree["under_way"]))

    # -- without a run ---------------------------------------------------------------------------

    def rehearse(self, steps: int) -> Iterator[tuple[StepReport, dict[str, float]]]:
        """Train some steps of which nothing is kept; what they reported, and their metrics.

        As many as are asked for, also where the run has fewer. The reports of the first say how
        much memory was held; those of the others do not, as to watch it takes time.
        """
        self._warm_up()
        with Groups(self.task) as self.groups:
            for _ in range(steps):
                begin = time.perf_counter()
                self._start_steps(max(steps, self.task.steps))
                report = self._under_way.popleft().wait()
                seconds = time.perf_counter() - begin
                metrics = self.task.metrics(report, step=self.state.step, seconds=seconds)
                self.state.step += 1
                yield report, metrics

    def run_worst_case(self) -> WorstCase:
        """Run as configured, with the largest items that there are; for the memory it takes."""
        self._worst = WorstCase()
        self.run()
        return self._worst
