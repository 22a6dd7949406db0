"""What every training run does: step by step, with metrics, plans, checkpoints and an end."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf.flow.executor import RunningStep, StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.stage_worker import WorkerPlace
from rlinf.monitor.curve import write_learning_curve
from rlinf.monitor.progress import Progress
from rlinf.runners.resumable_run import ConfigT, ResumableRun, StateT, SystemT

if TYPE_CHECKING:
    from rlinf.planner.auto import AutoPlanner
    from rlinf.planner.recording import FirstSteps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorstCase:
    """What a run for its memory found.

    Args:
        reports: Of its steps.
        places: Of its workers.
    """

    reports: list[StepReport]
    places: list[WorkerPlace]


class TrainingRunner(ResumableRun[ConfigT, StateT, SystemT]):
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

    # -- what a subclass says -------------------------------------------------------------------

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
            self._warm_up()
            observer = self._step_observer()
            self._progress = stack.enter_context(
                Progress(self._training_steps, done_steps=self._state.step, figures=self.figures)
            )
            while not self._finished():
                report, seconds = self._step()
                if self._config.auto_plan is None or not self._finished():
                    # After the last step there is none to place.
                    observer.after_step(self._state.step, report, seconds)
            self._save(blocking=True)
            self._progress.stop()
            if not self._stop.is_set():
                self._conclude()
        return self._state

    def _finished(self) -> bool:
        return self._stop.is_set() or self._solved() or self._state.step >= self._training_steps

    def _step(self) -> tuple[StepReport, float]:
        """One training step: train, write down, evaluate, commit; returns its report and time."""
        begin = time.perf_counter()
        self._start_steps(self._training_steps)
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

    def _step_observer(self) -> AutoPlanner | FirstSteps:
        """What changes the placement while training, where the recipe asks for it, or measures."""
        from rlinf.planner.auto import step_observer  # neither a step nor its executor needs it

        return step_observer(
            self._config,
            self._training_flow,
            self._directory.path,
            step=self._state.step,
            switch=self._switch,
            warm_up=self._warm_up,
        )

    def _start_steps(self, end: int) -> None:
        """Let all rollouts before ``end`` begin that may; the first takes the newest weights."""
        done = self._state.step
        for step in range(done + len(self._under_way), min(done + self._max_staleness + 1, end)):
            self._system.watch_memory(self._watches_memory(step))
            fresh = self._weights_of == done and self._system.keeps_weights
            self._under_way.append(self._start_step(step, synchronise=not fresh))
            self._weights_of = done

    def _watches_memory(self, step: int) -> bool:
        """Whether the memory of a step is watched: its time must not count."""
        if self._at_its_worst:  # without accelerators processes are watched from outside
            return self._config.on_accelerators
        return step < self._counts_from

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

    def rehearse(self, steps: int) -> Iterator[tuple[StepReport, dict[str, float]]]:
        """Train some steps of which nothing is kept; what they reported, and their metrics.

        As many as are asked for, also where the run has fewer. The reports of the first say how
        much memory was held; those of the others do not, as to watch it takes time.
        """
        self._warm_up()
        with self._new_system() as self._system:
            for _ in range(steps):
                self._start_steps(max(steps, self._training_steps))
                report = self._under_way.popleft().wait()
                metrics = self._metrics(report)
                self._state.step += 1
                yield report, metrics

    def run_worst_case(self) -> WorstCase:
        """Run as configured, with the longest prompts that there are; for the memory it takes."""
        self._at_its_worst = True
        self._worst = WorstCase([], [])
        self.run(resume=False)
        return self._worst
