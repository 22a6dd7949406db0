"""The reasoning runner: a language model learns from rewards, one batch of prompts at a time."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from rlinf.data.prompts.loader import PromptLoader
from rlinf.errors import in_section
from rlinf.flow.executor import RunningStep, StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.running_step import Arguments, Reports
from rlinf.models.language import load_tokenizer
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.reasoning_evaluation import Evaluator
from rlinf.runners.reasoning_model import check_lengths, initial_model, prompt_sets
from rlinf.runners.reasoning_system import ReasoningSystem, training_flow
from rlinf.runners.rescaling import write_choices
from rlinf.runners.resumable_run import RunState
from rlinf.runners.training_runner import TrainingRunner
from rlinf.workers.generation import GenerationReport
from rlinf.workers.reward import RewardReport

INITIAL_MODEL, FINAL_MODEL, FAILURES = "initial_model", "model", "failures"

FIGURES = (
    ("prompts", "rollout/prompts", ",.0f"),
    ("sequences/s", "rollout/sequences_per_second", ",.1f"),
    ("tokens/s", "rollout/tokens_per_second", ",.0f"),
    ("reward", "rollout/rewards", ".3f"),
    ("pass@1", "eval/success", ".3f"),
    ("length", "rollout/response_length", ".1f"),
    ("KL", "actor/approx_kl", ".5f"),
    ("explained variance", "critic/explained_variance", ".3f"),
)


def train(config: ReasoningConfig, directory: RunDirectory, stop: threading.Event) -> RunState:
    """Run a recipe from its beginning; see :class:`ReasoningRunner`."""
    return ReasoningRunner(config, directory, stop).run(resume=False)


def resume(config: ReasoningConfig, directory: RunDirectory, stop: threading.Event) -> RunState:
    """Continue a run from its newest good checkpoint; see :class:`ReasoningRunner`."""
    return ReasoningRunner(config, directory, stop).run(resume=True)


@dataclass
class ReasoningState(RunState):
    """Progress of a reasoning run."""

    prompts: int = 0
    sequences: int = 0
    tokens: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    pass_before: float = float("nan")


class ReasoningRunner(TrainingRunner[ReasoningConfig, ReasoningState, ReasoningSystem]):
    """Trains for a number of steps; evaluates on prompts that training never sees."""

    figures = FIGURES

    def __init__(
        self, config: ReasoningConfig, directory: RunDirectory, stop: threading.Event
    ) -> None:
        super().__init__(config, directory, stop)
        self._model = initial_model(config, directory.path / INITIAL_MODEL)
        with in_section("model"):
            self._tokenizer = load_tokenizer(self._model)
        sets = prompt_sets(config, self._tokenizer)
        self._loader = PromptLoader(
            sets.train, shuffle=config.data.shuffle, seed=config.data.seed + config.seed
        )
        check_lengths(config, self._model, sets)
        self._longest = max(sets.train, key=lambda prompt: len(prompt.tokens))
        self._evaluator = Evaluator(config, sets.validation, directory.evaluations, self._tokenizer)

    def _new_state(self, **values: Any) -> ReasoningState:
        return ReasoningState(**values)

    def _new_system(self) -> ReasoningSystem:
        return ReasoningSystem(self._config, self._model, self._directory.path / FAILURES)

    @property
    def _training_steps(self) -> int:
        return self._config.training_steps

    def _progress_of_run(self) -> dict[str, Any]:
        return {"prompts": self._state.prompts, "tokens": self._state.tokens}

    def _begin(self) -> None:
        """See what the model can do before it is trained."""
        evaluated = self._evaluate()
        self._state.pass_before = self._state.success
        if evaluated:
            self._metrics_log.log(0, evaluated)
            print(f"before training: {self._evaluator.last}", flush=True)
        self._save(blocking=True)

    # -- a step ---------------------------------------------------------------------------------

    @property
    def _max_staleness(self) -> int:
        return self._config.rollout.max_staleness

    def _start_step(self, step: int, *, synchronise: bool) -> RunningStep:
        """Synchronise, generate and score; training follows when the step is waited for."""
        return self._system.start_step(
            step, synchronise=synchronise, draw=self._draw, ended=self._use_spares
        )

    def _draw(self) -> Arguments:
        """Prompts of the slots, and those that may take their places, `max_resample` for each."""
        algorithm, rollout = self._config.algorithm, self._config.rollout
        wanted = rollout.prompts
        first_draw = self._loader.drawn == 0
        prompts = self._loader.take(self._config.prompts_at_once if first_draw else wanted)
        if self._at_its_worst:
            # Equal prompts would be computed once.
            longest, tokens = self._longest, self._longest.tokens
            prompts = [
                (draw, replace(longest, tokens=np.roll(tokens, number)))
                for number, (draw, _) in enumerate(prompts)
            ]
        count = algorithm.max_resample * wanted if algorithm.dynamic_sampling else 0
        spares = self._loader.coming(count)
        return {"rollout": {"slots": wanted, "prompts": prompts, "spares": spares}}

    def _use_spares(self, reports: Reports) -> None:
        """Draw no spare again that was used; the others are the first prompts of later steps."""
        for report in reports["rollout"]:
            self._loader.use(report.result.spares)

    def _metrics(self, report: StepReport) -> dict[str, float]:
        """Metrics of one step, from what the workers returned."""
        metrics: dict[str, float] = {}
        for trainer in ("critic", "actor"):
            if trainer in report.stages:
                metrics.update(report.results(trainer)[0])
        generated: list[GenerationReport] = report.results("rollout")
        if self._config.cluster.auto_scheduler:
            made: list[Any] = [choice for part in generated for choice in part.choices]
            made += cast(Any, metrics.pop("choices"))
            write_choices(self._directory.path, self._state.step, made)
            metrics["rollout/moved"] = float(sum(part.moved for part in generated))
        scored: list[RewardReport] = report.results("reward")
        faults = sum((Counter(part.faults) for part in scored), Counter())
        for name in self._config.reward.functions:
            values = [value for part in scored for value in part.values[name]]
            # The exact sum: the order in which workers scored them changes nothing.
            metrics[f"reward/{name}"] = math.fsum(values) / max(len(values), 1)
        rejected = sum(len(part.spares) for part in generated)
        state, tokens = self._state, sum(part.tokens for part in generated)
        state.prompts += sum(part.begun for part in generated) + rejected
        state.sequences += sum(part.completions for part in generated)
        state.tokens += tokens
        for reason, count in faults.items():
            state.faults[reason] = state.faults.get(reason, 0) + count
            metrics[f"reward/faults/{reason}"] = float(count)
        metrics["rollout/prompts"] = float(state.prompts)
        metrics["rollout/tokens"] = float(state.tokens)
        metrics["rollout/rejected_groups"] = float(rejected)
        if self._config.rollout.partial is not None:
            for name in ("interrupted", "carried", "regenerated", "dropped_tokens"):
                count = sum(getattr(part, name) for part in generated)
                metrics[f"rollout/{name}"] = float(count)
        if self._config.rollout.agent is not None:
            ended = sum(part.completions for part in generated)
            metrics["rollout/turns"] = sum(part.turns for part in generated) / max(ended, 1)
        metrics["rollout/engine_restarts"] = float(sum(part.engine_restarts for part in generated))
        seconds = {name: report.seconds(name) for name in report.stages}
        metrics["rollout/tokens_per_second"] = tokens / seconds["rollout"]
        metrics.update({f"time/{name}": value for name, value in seconds.items()})
        return metrics

    @property
    def _training_flow(self) -> Flow:
        return training_flow(self._config)

    def _rates(self, seconds: float) -> dict[str, float]:
        return {"rollout/sequences_per_second": self._config.rollout.sequences / seconds}

    # -- evaluation -----------------------------------------------------------------------------

    def _evaluate_now(self) -> dict[str, float] | None:
        if not self._due(self._config.validation.val_check_interval):
            return None
        return self._evaluate()

    def _evaluate(self) -> dict[str, float] | None:
        """Answer validation prompts with the newest weights and write the result down."""
        begin = time.perf_counter()
        self._synchronise()
        name = f"{self._directory.name} step {self._state.step}"
        metrics = self._evaluator.evaluate(self._system, name, self._state.step)
        if metrics is None:
            return None
        self._state.note_success(metrics["eval/success"])
        return {**metrics, "time/eval": time.perf_counter() - begin}

    def _conclude(self) -> None:
        """Final evaluation, learning curve and the trained model."""
        evaluated = self._evaluate() if not self._state.evaluated_now else {}
        if evaluated:
            self._metrics_log.log(self._state.step, evaluated)
        path = self._directory.path / FINAL_MODEL
        self._system.save_model(path)
        state = self._state
        print(
            f"training: {state.sequences} sequences, {state.tokens} tokens in "
            f"{state.training_seconds:.1f} s"
        )
        if np.isfinite(state.success):
            gain = 100 * (state.success - state.pass_before)
            print(
                f"held-out prompts: {self._evaluator.last} (before training "
                f"{100 * state.pass_before:.1f} %: {gain:+.1f} points)"
            )
        self._show_curve()
        print(f"model: {path}", flush=True)

    # -- checkpoints ----------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict()}

    def _load_own_state(self, tree: dict[str, Any]) -> None:
        self._loader.load_state_dict(tree["loader"])
