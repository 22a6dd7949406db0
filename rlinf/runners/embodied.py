"""The embodied runner: a policy is trained in simulators, one rollout and one update at a time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.checkpoint.export import export_weights
from rlinf.data.evaluation import EvaluationResult
from rlinf.flow.executor import RunningStep, StepReport
from rlinf.flow.graph import Flow
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_system import EmbodiedSystem, training_flow
from rlinf.runners.evaluate import (
    EvaluationPurpose,
    evaluate_policy,
    evaluation_spec,
    film_policy,
)
from rlinf.runners.resumable_run import RunState
from rlinf.runners.training_runner import TrainingRunner
from rlinf.trainers.modules import POLICY
from rlinf.trainers.trainer import saved_weights
from rlinf.workers.env import RolloutReport

FIGURES = (
    ("env-steps", "env/steps", ",.0f"),
    ("env-steps/s", "env/steps_per_second", ",.0f"),
    ("success", "env/success_once", ".3f"),
    ("eval success", "eval/success", ".3f"),
    ("return", "env/return", ".2f"),
    ("KL", "actor/approx_kl", ".4f"),
    ("explained variance", "critic/explained_variance", ".3f"),
)

POLICY_FILE = "policy.safetensors"


def train(config: EmbodiedConfig, directory: RunDirectory, stop: threading.Event) -> EmbodiedState:
    """Run a recipe from its beginning; see :class:`EmbodiedRunner`."""
    return EmbodiedRunner(config, directory, stop).run(resume=False)


def resume(config: EmbodiedConfig, directory: RunDirectory, stop: threading.Event) -> EmbodiedState:
    """Continue a run from its newest good checkpoint; see :class:`EmbodiedRunner`."""
    return EmbodiedRunner(config, directory, stop).run(resume=True)


@dataclass
class EmbodiedState(RunState):
    """Progress of an embodied run."""

    env_steps: int = 0
    episodes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    solved: bool = False


class EmbodiedRunner(TrainingRunner[EmbodiedConfig, EmbodiedState, EmbodiedSystem]):
    """Trains until the environment steps are used up or the wanted success rate is reached."""

    figures = FIGURES

    def _new_state(self, **values: Any) -> EmbodiedState:
        return EmbodiedState(**values)

    def _new_system(self) -> EmbodiedSystem:
        return EmbodiedSystem(self._config)

    @property
    def _training_steps(self) -> int:
        return self._config.training_steps

    def _solved(self) -> bool:
        return self._state.solved

    def _progress_of_run(self) -> dict[str, Any]:
        return {"env_steps": self._state.env_steps}

    @property
    def _max_staleness(self) -> int:
        return self._config.rollout.max_staleness

    def _start_step(self, step: int, *, synchronise: bool) -> RunningStep:
        """Synchronise and collect; training follows when the step is waited for."""
        return self._system.start_step(step, synchronise=synchronise)

    @property
    def _training_flow(self) -> Flow:
        return training_flow(self._config)

    def _rates(self, seconds: float) -> dict[str, float]:
        return {"env/steps_per_second": self._config.env_steps_per_rollout / seconds}

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

    def _evaluate_now(self) -> dict[str, float] | None:
        if not self._due(self._config.evaluation.interval):
            return None
        begin = time.perf_counter()
        result = self._evaluate("periodic")
        self._state.note_success(result.success_rate)
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
        self._synchronise()
        spec = evaluation_spec(self._config, purpose)
        spec.save(self._directory.evaluations / f"{purpose}_spec.json")
        checkpoint = f"{self._directory.name} step {self._state.step}"
        result = evaluate_policy(self._system, spec, checkpoint)
        result.save(self._directory.evaluations / f"{purpose}_step_{self._state.step:08d}.json")
        return result

    def _conclude(self) -> None:
        """Final evaluation on held-out episodes, learning curve, policy weights and video."""
        result = self._evaluate("held_out")
        weights = saved_weights(self._system.state()["actor"]["trainer"], POLICY)
        export_weights(self._directory.path / POLICY_FILE, weights)
        seconds = self._state.training_seconds
        print(f"training: {self._state.env_steps} env steps in {seconds:.1f} s")
        print(f"held-out episodes: {result}")
        self._show_curve()
        video = film_policy(self._system, self._directory.videos / "trained_policy.mp4")
        if video is not None:
            print(f"video of the trained policy: {video}", flush=True)
