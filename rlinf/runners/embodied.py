"""The embodied runner: a policy is trained in simulators, one rollout and one update at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import numpy as np

from rlinf.checkpoint.export import export_weights
from rlinf.checkpoint.store import CheckpointStore
from rlinf.config.dump import config_hash, to_data
from rlinf.data.evaluation import EvaluationResult
from rlinf.flow.executor import StepReport
from rlinf.monitor.curve import write_learning_curve
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.monitor.progress import Progress
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.timeline import TimelineFile
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_system import EmbodiedSystem
from rlinf.runners.evaluate import (
    EvaluationPurpose,
    evaluate_policy,
    evaluation_spec,
    film_policy,
)
from rlinf.workers.env import RolloutReport

log = logging.getLogger(__name__)

POLICY_FILE = "policy.safetensors"


def train(config: EmbodiedConfig, directory: RunDirectory, stop: threading.Event) -> RunState:
    """Run a recipe from its beginning; see :class:`EmbodiedRunner`."""
    return EmbodiedRunner(config, directory, stop).run(resume=False)


def resume(config: EmbodiedConfig, directory: RunDirectory, stop: threading.Event) -> RunState:
    """Continue a run from its newest good checkpoint; see :class:`EmbodiedRunner`."""
    return EmbodiedRunner(config, directory, stop).run(resume=True)


@dataclass
class RunState:
    """What the runner itself must remember to continue."""

    step: int = 0
    env_steps: int = 0
    episodes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    training_seconds: float = 0.0
    solved: bool = False
    success: float = float("nan")
    success_step: int = -1
    best_success: float = -1.0


class EmbodiedRunner:
    """Trains until the environment steps are used up or the wanted success rate is reached.

    Args:
        config: The run's configuration.
        directory: Where everything is written.
        stop: Set to end after the current step, with a checkpoint.
    """

    def __init__(
        self, config: EmbodiedConfig, directory: RunDirectory, stop: threading.Event
    ) -> None:
        self._config = config
        self._directory = directory
        self._stop = stop
        self._state = RunState()

    def run(self, *, resume: bool) -> RunState:
        """Train, evaluate on held-out episodes, and leave curve, video and policy behind.

        Ends early, with a checkpoint, when ``stop`` is set. A failure of a worker is raised after
        the other workers were ended; what was committed before stays.
        """
        with ExitStack() as stack:
            self._open(stack)
            if resume:
                self._restore()
            self._progress = stack.enter_context(
                Progress(self._config.training_steps, done_steps=self._state.step)
            )
            while not self._finished():
                self._step()
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
        self._system = stack.enter_context(EmbodiedSystem(config))

    def _finished(self) -> bool:
        state = self._state
        return self._stop.is_set() or state.solved or state.step >= self._config.training_steps

    def _step(self) -> None:
        """One training step: synchronise, collect, train, write down, evaluate, commit."""
        begin = time.perf_counter()
        self._system.sync_weights()
        synchronised = time.perf_counter()
        report = self._system.train_step(self._state.step)
        seconds = time.perf_counter() - begin
        self._state.step += 1
        self._state.training_seconds += seconds
        metrics = self._metrics(report)
        metrics["time/sync_weights"] = synchronised - begin
        metrics["time/step"] = seconds
        metrics["env/steps_per_second"] = self._config.env_steps_per_rollout / seconds
        if self._due(self._config.evaluation.interval):
            metrics.update(self._evaluate_during_training())
        self._metrics_log.log(self._state.step, metrics)
        self._progress.update(self._state.step, metrics)
        self._timeline.write(report.events)
        # Asked first: it remembers the best.
        if self._found_best() or self._config.checkpoint.due(self._state.step):
            self._save(blocking=False)

    def _evaluated_now(self) -> bool:
        return self._state.success_step == self._state.step

    def _found_best(self) -> bool:
        """Whether this step's evaluation is the best so far, so that its weights are kept."""
        state = self._state
        if not self._evaluated_now() or state.success <= state.best_success:
            return False
        state.best_success = state.success
        return self._config.checkpoint.keep_best > 0

    def _due(self, interval: int) -> bool:
        return interval > 0 and self._state.step % interval == 0

    def _metrics(self, report: StepReport) -> dict[str, float]:
        """Metrics of one step, from what env and actor workers returned."""
        rollouts: list[RolloutReport] = report.results("env")
        metrics: dict[str, float] = dict(report.results("actor")[0])
        episodes = [e for r in rollouts for e in r.episodes if e.valid]
        faults = sum((r.faults for r in rollouts), Counter())
        self._state.env_steps += sum(r.env_steps for r in rollouts)
        self._state.episodes += len(episodes)
        for reason, count in faults.items():
            self._state.faults[reason] = self._state.faults.get(reason, 0) + count
            metrics[f"env/faults/{reason}"] = float(count)
        if episodes:
            metrics["env/success_once"] = float(np.mean([e.success_once for e in episodes]))
            metrics["env/success_at_end"] = float(np.mean([e.success_at_end for e in episodes]))
            metrics["env/return"] = float(np.mean([e.episode_return for e in episodes]))
            metrics["env/episode_len"] = float(np.mean([e.episode_len for e in episodes]))
            metrics["env/reward"] = float(np.mean([e.reward for e in episodes]))
        metrics["env/steps"] = float(self._state.env_steps)
        metrics["env/episodes"] = float(self._state.episodes)
        for component in ("env", "rollout", "actor"):
            metrics[f"time/{component}"] = report.seconds(component)
        return metrics

    # -- evaluation -----------------------------------------------------------------------------

    def _evaluate_during_training(self) -> dict[str, float]:
        begin = time.perf_counter()
        result = self._evaluate("periodic")
        self._state.success, self._state.success_step = result.success_rate, self._state.step
        target = self._config.evaluation.stop_at_success
        self._state.solved = target is not None and result.success_rate >= target
        low, high = result.interval
        return {
            "eval/success": result.success_rate,
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/return": result.mean_return,
            "time/eval": time.perf_counter() - begin,
        }

    def _evaluate(self, purpose: EvaluationPurpose) -> EvaluationResult:
        """Play the episodes of one purpose with the newest weights and write the result down."""
        self._system.sync_weights()
        spec = evaluation_spec(self._config, purpose)
        spec.save(self._directory.evaluations / f"{purpose}_spec.json")
        checkpoint = f"{self._directory.name} step {self._state.step}"
        result = evaluate_policy(self._system, spec, checkpoint)
        result.save(self._directory.evaluations / f"{purpose}_step_{self._state.step:08d}.json")
        return result

    def _conclude(self) -> None:
        """Final evaluation on held-out episodes, learning curve, policy weights and video."""
        result = self._evaluate("held_out")
        weights = self._system.state()["actor"]["trainer"]["policy"]
        export_weights(self._directory.path / POLICY_FILE, weights)
        curve = write_learning_curve(self._directory.path)
        seconds = self._state.training_seconds
        print(f"training: {self._state.env_steps} env steps in {seconds:.1f} s")
        print(f"held-out episodes: {result}")
        print(f"learning curve: {curve}", flush=True)
        video = film_policy(self._system, self._directory.videos / "trained_policy.mp4")
        if video is not None:
            print(f"video of the trained policy: {video}", flush=True)

    # -- checkpoints ----------------------------------------------------------------------------

    def _save(self, *, blocking: bool) -> None:
        begin = time.perf_counter()
        tree = {
            "runner": asdict(self._state),
            "system": self._system.state(),
            "metrics": self._metrics_log.cursor(),
        }
        self._store.save(
            self._state.step,
            tree,
            meta={"env_steps": self._state.env_steps},
            metric=self._state.success if self._evaluated_now() else None,
            blocking=blocking,
        )
        log.debug("checkpoint blocked the run for %.1f ms", 1e3 * (time.perf_counter() - begin))

    def _restore(self) -> None:
        """Continue from the newest good checkpoint, or start over where there is none yet."""
        if not self._store.steps():
            self._metrics_log.truncate({"bytes": 0, "lines": 0})
            return
        checkpoint = self._store.load()
        self._store.discard_after(checkpoint.step)
        self._state = RunState(**checkpoint.tree["runner"])
        self._system.load_state(checkpoint.tree["system"])
        self._metrics_log.truncate(checkpoint.tree["metrics"])
        log.info("continuing after step %d", checkpoint.step)
