"""The one run: step by step, with metrics, plans, checkpoints and an end, whatever the task."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.checkpoint.contents import Checkpoint, Parts
from rlinf.checkpoint.store import CheckpointStore
from rlinf.config.dump import config_hash, to_data
from rlinf.errors import CheckpointError, ConfigError, UserError
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
from rlinf.trainers.config import LearningRateScheduleConfig

log = logging.getLogger(__name__)


@dataclass
class RunState:
    """What a run must remember to continue, besides its task's state and that of its workers."""

    step: int = 0
    training_seconds: float = 0.0
    score: float = float("nan")  # of the last evaluation
    score_step: int = -1
    best_score: float = float("-inf")

    @property
    def evaluated_now(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        return self.score_step == self.step


@dataclass
class WorstCase:
    """What a run for its memory found: reports of its steps, and where its workers were."""

    reports: list[StepReport] = field(default_factory=list)
    places: list[WorkerPlace] = field(default_factory=list)


class Run:
    """Trains step by step, commits checkpoints, and can be continued from any of them.

    The rollout of step s begins when s − k training steps have been done and their weights have
    arrived, where k is how far the task lets it run ahead: with k = 0 each rollout waits for the
    training phase before it, with more it runs beside it. Which weights a rollout has depends on s
    and k alone.
    """

    def __init__(
        self,
        task: type[Task[Any]],
        config: PlacedConfig,
        directory: RunDirectory,
        stop: threading.Event,  # set to end after the current step, with a checkpoint
    ) -> None:
        self.task, self.directory, self.state = task(config, directory.path), directory, RunState()
        self.task.read_training_data()
        self.groups: Groups
        self.starting = False
        """Whether it waits for its workers to start; then a KeyboardInterrupt ends it at once."""
        self.last_evaluation: Evaluated | None = None
        self._config, self._flow, self._stop = config, task.flow(config), stop
        self._under_way: deque[RunningStep] = deque()
        self._weights_of = -1  # the step whose weights the rollout workers have, or will have
        self.weights_step: int | None = None
        """The step whose weights the workers hold in the end, where it is not the last one."""
        self._counts_from = 0  # the first step whose time counts
        self._saved_at = time.monotonic()
        self._worst: WorstCase | None = None

    def run(self, *, resume: bool = False) -> RunState:
        """Train, evaluate, and leave curve and weights behind.

        Ends early, with a checkpoint, when ``stop`` is set. A failure of a worker is raised after
        the other workers were ended; what was committed before stays. With ``resume`` it goes on
        from the newest good checkpoint, if there is one; a run that came to its end, and whose
        configuration has not changed, starts nothing. Where ``stop`` is set before its workers are
        there, nothing is lost: it ends by a KeyboardInterrupt.
        """
        for name in ("steps", "ahead", "sources"):
            if not isinstance(value := getattr(self.task, name), int):
                raise self._broken(f"its {name} is {value!r}, no whole number")
        with ExitStack() as stack:
            self._open(stack)
            former = self._restore() if resume else None
            if former is not None:
                if self.task.finished or self.state.step >= self.task.steps:
                    self._say_finished()
                    if self.directory.end == self._end:
                        return self.state
                self._discard_after(former)
            self._start(stack)
            if former is not None:
                with former.read_as_written():
                    self._load_workers(former.tree, former.path)
            self.starting = False
            if former is None:
                self._tell_of_warm_ups()
                self.task.begin(self)
                self._state_of_task()  # of a wrong form it would be found after steps to commit
            self.directory.begun = bool(self._store.steps())
            self._warm_up()
            observe = self._observer()
            self._progress = stack.enter_context(
                Progress(self.task.steps, done_steps=self.state.step, figures=self.task.figures)
            )
            while not self._finished():
                observe(*self._step())
            self._evaluate_end()
            self.save()
            self._progress.stop()
            if not self.interrupted:
                self.task.conclude(self)
            self._store.require(self.state.step)
            if self.interrupted:  # there may be something left to make up for
                self._metrics_log.ending = "interrupted"
            else:
                self.directory.note_end(self._end)
        return self.state

    def _tell_of_warm_ups(self) -> None:
        """Warn of learning rates that rise until the run is over."""
        steps = self.task.steps
        for name in self._config.components if self._worst is None else ():
            schedule = getattr(getattr(self._config, name, None), "lr_sched", None)
            if isinstance(schedule, LearningRateScheduleConfig) and schedule.warmup_steps >= steps:
                log.warning(
                    "%s.lr_sched.warmup_steps = %d is not less than the %d steps of the run, so "
                    "that the learning rate is never whole; nearest: %d",
                    name,
                    schedule.warmup_steps,
                    steps,
                    steps - 1,
                )

    @property
    def _end(self) -> dict[str, Any]:
        return {"step": self.state.step, "config": self._hash}

    def _say_finished(self) -> None:
        """That a run which is resumed has no step left, and what would let it go on."""
        step, steps = self.state.step, self.task.steps
        of = f"of {steps} steps" if step <= steps else f"steps, more than these {steps},"
        keys = [name for name in type(self._config.runner).model_fields if "total" in name]
        why = "the recipe's rule to end early had been met"
        if step >= steps:
            why = f"to go on, resume with a larger {' or '.join(f'runner.{key}' for key in keys)}"
        print(f"nothing is left to train: {step} {of} were done; {why}", flush=True)

    @property
    def interrupted(self) -> bool:
        """Whether the run was asked to end."""
        return self._stop.is_set()

    def _finished(self) -> bool:
        return self.interrupted or self.task.finished or self.state.step >= self.task.steps

    # -- a step ---------------------------------------------------------------------------------

    def _step(self) -> tuple[StepReport, float]:
        """One training step: train, write down, evaluate, commit; returns its report and time."""
        report, metrics, seconds = self._train(self.task.steps)
        if self._worst is not None:
            self._worst.reports.append(report)
            self._worst.places = self.groups.places()
        self.state.training_seconds += seconds
        metrics["time/step"] = seconds
        metrics["time/sync_weights"] = report.begin_seconds
        if self._evaluates_now():
            metrics.update(self.evaluate("periodic"))
        self._metrics_log.log(self.state.step, metrics)
        self.directory.begun = True
        self._progress.update(self.state.step, metrics)
        self._timeline.write(report.events)
        minutes = (time.monotonic() - self._saved_at) / 60
        # Asked first: it remembers the best.
        if self._found_best() or self._config.checkpoint.due(self.state.step, minutes):
            self.save(blocking=False)
        return report, seconds

    def _evaluate_end(self) -> None:
        """Evaluate the last step where its task wants it, before it is committed: what is logged
        behind that, and its score, would be lost to a run that goes on."""
        if self.task.evaluates_end and not (self.interrupted or self.state.evaluated_now):
            self.log(self.evaluate("periodic"))
            self._found_best()  # it is committed in any case

    def _evaluates_now(self) -> bool:
        interval, step = self.task.evaluation_interval, self.state.step
        return bool(interval) and step >= self.task.evaluation_start and step % interval == 0

    def _train(self, end: int) -> tuple[StepReport, dict[str, float], float]:
        """The next step, of which there are ``end``: its report, its metrics and its time."""
        begin = time.perf_counter()
        self._start_steps(end)
        report = self._under_way.popleft().wait()
        seconds = time.perf_counter() - begin
        self.directory.require()  # before anything is written that would make it anew
        metrics: Any = self.task.metrics(report, step=self.state.step, seconds=seconds)
        if not isinstance(metrics, dict):
            kind = type(metrics).__name__
            raise self._broken(f"its metrics() returns {kind}, and no dict of numbers by name")
        self.state.step += 1
        return report, metrics, seconds

    def _broken(self, why: str) -> ConfigError:
        return ConfigError(f"task `{self._config.task}` is broken: {why}")

    def _start_steps(self, end: int) -> None:
        """Let all rollouts before ``end`` begin that may; the first takes the newest weights."""
        done, worst = self.state.step, self._worst is not None
        for step in range(done + len(self._under_way), min(done + self.task.ahead + 1, end)):
            # Not where time counts; without accelerators processes are watched from outside.
            watched = self._config.on_accelerators if worst else step < self._counts_from
            self.groups.watch_memory(watched)
            begun = self.groups.start_step(
                step,
                synchronise=not self._has_weights,
                draw=lambda: self.task.draw(worst=worst),
                ended=self.task.rolled_out,
            )
            self._under_way.append(begun)
            self._weights_of = done

    @property
    def _has_weights(self) -> bool:
        """Whether those who act have, or will have, the newest weights."""
        return self._weights_of == self.state.step and self.groups.keeps_weights

    def _found_best(self) -> bool:
        """Whether this step's evaluation is the best so far, so that its weights are kept."""
        state = self.state
        if not (state.evaluated_now and state.score > state.best_score):
            return False
        state.best_score = state.score
        return self._config.checkpoint.keep_best > 0

    def evaluate(self, purpose: Purpose) -> dict[str, float]:
        """Evaluate with the newest weights; returns what is to be logged, nothing without a set."""
        begin = time.perf_counter()
        if not self._has_weights:  # the next rollout would get the same
            self.groups.sync_weights()
            self._weights_of = self.state.step
        found = self.task.evaluate(self, purpose)
        if found is None:
            return {}
        self.last_evaluation = found
        if purpose == "periodic":
            self.state.score, self.state.score_step = found.score, self.state.step
        return {**found.metrics, "time/eval": time.perf_counter() - begin}

    def restore_best(self) -> tuple[int, float] | None:
        """Give the workers what they held after the best evaluation whose weights there are.

        Those are kept in checkpoints, unless there was no room for one; and the workers have those
        of the last step. Returns the step and what its evaluation found; None where the last
        weights are all there is, and were not evaluated.
        """
        state = self.state
        last = state.score if state.evaluated_now else -math.inf
        try:
            best = self._store.load("best")
        except CheckpointError as error:
            log.warning("%s", error)
            best = None
        if best is None or best.metric is None or best.metric <= last:
            found = (state.step, last) if state.evaluated_now else None
        else:
            self.groups.load_state(best.tree["workers"], best.path)
            self._weights_of, self.weights_step = -1, best.step
            found = best.step, best.metric
        if found is None or found[1] < state.best_score:
            log.warning("the weights of the best evaluation are not among those that were kept")
        return found

    def log(self, metrics: dict[str, float]) -> None:
        """Write numbers down beside those of the last step, where there are any."""
        if metrics:
            self._metrics_log.log(self.state.step, metrics)

    def show_curve(self) -> None:
        """Draw the learning curve, and say where it is."""
        try:
            print(f"learning curve: {write_learning_curve(self.directory.path)}", flush=True)
        except (OSError, UserError) as error:  # the run itself is done
            log.warning("no learning curve: %s", error)

    def _open(self, stack: ExitStack) -> None:
        """Open everything that the run writes."""
        config, directory, enter = self._config, self.directory, stack.enter_context
        store, self._hash = config.checkpoint, config_hash(config)
        self._store = enter(CheckpointStore(directory.checkpoints, store, config_hash=self._hash))
        log = MetricsLog(directory.path, config.logger, run_config=to_data(config))
        self._metrics_log = enter(log)
        self._timeline = enter(TimelineFile(directory.timeline, enabled=config.runner.timeline))

    def _start(self, stack: ExitStack) -> None:
        """Start the workers."""
        self._end_if_asked()
        self.groups = Groups(
            self.task, launched=self._wait_for_workers, traces=self.directory.traces
        )
        self.groups.__enter__()
        # Those that there are then: the ones of the beginning may be gone.
        stack.push(lambda *exception: self.groups.__exit__(*exception))  # noqa: PLW0108

    def _wait_for_workers(self) -> None:
        """Not before they are launched: what raises while Ray starts its processes may be lost."""
        self.starting = True
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    # -- another placement ----------------------------------------------------------------------

    def _observer(self) -> Callable[[StepReport, float], None]:
        """What sees each step and its time: who seeks a faster placement, or else a profile."""
        config, path = self._config, self.directory.path
        if not config.can_be_planned:
            return lambda report, seconds: None
        from rlinf.planner.auto import step_observer

        observer = step_observer(
            config, self._flow, path, step=self.state.step, switch=self._switch,
            warm_up=self._warm_up,
        )  # fmt: skip

        def after_step(report: StepReport, seconds: float) -> None:
            if config.auto_plan is None or not self._finished():  # else there is no step to place
                observer.after_step(self.state.step, report, seconds)

        return after_step

    def _warm_up(self) -> None:
        """Let the next steps be the first ones of a measurement: their memory counts, not time."""
        warm_up = warm_up_steps(self._config) if self._config.can_be_planned else 0
        self._counts_from = self.state.step + warm_up

    def _switch(self, config: PlacedConfig) -> float:
        """Go on under another placement, as if nothing had happened; returns the seconds it took.

        Raises:
            SwitchFailure: Its workers did not start, or did not take the state; the run goes on
                under the placement that it had.
        """
        begin = time.perf_counter()
        tree, before = self.save(), self._config
        # What workers write themselves is nowhere else.
        if self.groups.writes_parts and self._store.last_committed_step != self.state.step:
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
        self.groups = Groups(self.task, traces=self.directory.traces)
        self.groups.__enter__()
        try:
            self._load_workers(tree, self._store.path(self.state.step))
        except BaseException as error:
            self.groups.close(because=error)
            raise
        self._weights_of = -1
        self._warm_up()

    # -- checkpoints ----------------------------------------------------------------------------

    def save(self, *, blocking: bool = True) -> dict[str, Any]:
        """Commit everything that the run needs to continue; returns it.

        What workers write into the checkpoint themselves is in its directory alone.
        """
        self._saved_at = time.monotonic()  # also where there is no room: not tried at each step
        # Waits for rollouts under way, which draw and count until they end.
        under_way = self.groups.save_steps(self._under_way)
        tree: dict[str, Any] = {
            "run": asdict(self.state),
            "task": self._state_of_task(),
            "under_way": under_way,
            "workers": self.groups.state(),
            "metrics": self._metrics_log.cursor(),
        }
        written = self.groups.writes_parts
        parts = self._save_parts() if written else None
        if written and parts is None:
            return tree
        metric = self.state.score if self.state.evaluated_now else None
        self._store.save(
            self.state.step, tree, parts=parts, meta=self.task.progress(), metric=metric,
            blocking=blocking,
        )  # fmt: skip
        return tree

    def _state_of_task(self) -> dict[str, Any]:
        found: Any = self.task.state_dict()
        if not isinstance(found, dict):
            kind = type(found).__name__
            raise self._broken(f"its state_dict() returns {kind}, and no dict to continue from")
        return found

    def _save_parts(self) -> Parts | None:
        """Let workers write their parts of a checkpoint; None where there was no room for them."""
        step = self.state.step
        if (directory := self._store.begin(step)) is None:
            return None
        try:
            return Parts(directory, self.groups.save_parts(directory))
        except BaseException as error:
            self._store.give_up(directory, step, error)
            if not isinstance(error, OSError):
                raise
            return None

    def _restore(self) -> Checkpoint | None:
        """Continue from the newest good checkpoint, but for the workers, which are not there yet;
        None where there is none."""
        if not self._store.steps():
            if self.directory.end is not None:
                raise CheckpointError(
                    f"the run {self.directory.path} has ended and its checkpoints are gone: "
                    "nothing is left to go on from, and to begin again would replace what it "
                    "reached; for that start a new run"
                )
            print("no checkpoint had been committed: the run begins again", flush=True)
            self._metrics_log.truncate({"bytes": 0, "lines": 0})
            self.directory.discard_after(0)
            return None
        checkpoint = self._store.load()
        with checkpoint.read_as_written():
            self.state = RunState(**checkpoint.tree["run"])
            self.task.load_state_dict(checkpoint.tree["task"])
        return checkpoint

    def _discard_after(self, checkpoint: Checkpoint) -> None:
        """Forget what came after a checkpoint, which is done again."""
        self._store.discard_after(checkpoint.step)
        with checkpoint.read_as_written():
            self._metrics_log.truncate(checkpoint.tree["metrics"])
        self.directory.discard_after(checkpoint.step)
        log.info("continuing after step %d", checkpoint.step)

    def _load_workers(self, tree: dict[str, Any], checkpoint: Path) -> None:
        self.groups.load_state(tree["workers"], checkpoint)
        self._under_way = deque(self.groups.restore_steps(tree["under_way"]))

    def rehearse(self, steps: int) -> Generator[tuple[StepReport, dict[str, float]], None, None]:
        """Train so many steps, of which nothing is kept; what they reported, and their metrics.

        The reports of the first say how much memory was held; to watch it takes time.
        """
        self._warm_up()
        with Groups(self.task) as self.groups:
            for _ in range(steps):
                report, metrics, _ = self._train(max(steps, self.task.steps))
                yield report, metrics

    def run_worst_case(self) -> WorstCase:
        """Run as configured, with the largest items that there are; for the memory it takes."""
        self._worst = WorstCase()
        self.run()
        return self._worst
