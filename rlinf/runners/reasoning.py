"""The reasoning task: a language model learns from rewards, one batch of prompts at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from rlinf.data.prompts.loader import PromptLoader
from rlinf.errors import in_section
from rlinf.flow.graph import Flow, Stage
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.reasoning_evaluation import PromptEvaluator, answering_step
from rlinf.runners.rescaling import (
    HANDING_OVER,
    open_mailboxes,
    rescaled_training,
    step_arguments,
    write_choices,
)
from rlinf.runners.task import Counts, Task

if TYPE_CHECKING:
    from rlinf.flow.executor import Arguments, Reports, StepReport
    from rlinf.runners.groups import Groups
    from rlinf.runners.run import Run
    from rlinf.workers.context import WorkerContext
    from rlinf.workers.generation import GenerationReport
    from rlinf.workers.reward import RewardReport

INITIAL_MODEL, FINAL_MODEL = "initial_model", "model"


@dataclass
class AnswerCounts(Counts):
    """What a reasoning run counts."""

    prompts: int = 0
    sequences: int = 0
    tokens: int = 0
    pass_before: float = float("nan")
    """Pass rate before training."""


class Reasoning(Task[ReasoningConfig]):
    """Trains a language model on rewards for its answers to prompts."""

    config_class = ReasoningConfig
    groups: ClassVar = {
        "rollout": "rlinf.workers.generation:GenerationWorker",
        "reward": "rlinf.workers.reward:RewardWorker",
        "actor": "rlinf.workers.language_actor:LanguageActorWorker",
        "critic": "rlinf.workers.critic:CriticWorker",
    }
    changeable = ("runner", "cluster", "validation.val_check_interval", "checkpoint", "logger")
    figures = (
        ("prompts", "rollout/prompts", ",.0f"),
        ("sequences/s", "rollout/sequences_per_second", ",.1f"),
        ("tokens/s", "rollout/tokens_per_second", ",.0f"),
        ("reward", "rollout/rewards", ".3f"),
        ("pass@1", "eval/success", ".3f"),
        ("length", "rollout/response_length", ".1f"),
        ("KL", "actor/approx_kl", ".5f"),
        ("explained variance", "critic/explained_variance", ".3f"),
    )

    def __init__(self, config: ReasoningConfig, directory: Path) -> None:
        from rlinf.models.language import load_tokenizer
        from rlinf.runners.reasoning_model import check_lengths, initial_model, prompt_sets

        super().__init__(config, directory)
        self.counts = AnswerCounts()
        self._model = initial_model(config, directory / INITIAL_MODEL)
        with in_section("model"):
            tokenizer = load_tokenizer(self._model)
        sets = prompt_sets(config, tokenizer)
        check_lengths(config, self._model, sets)
        self._loader = PromptLoader(
            sets.train, shuffle=config.data.shuffle, seed=config.data.seed + config.seed
        )
        self._longest = max(sets.train, key=lambda prompt: len(prompt.tokens))
        self.evaluator = PromptEvaluator(config, sets.validation, tokenizer)

    @classmethod
    def step(cls, flow: Flow, config: ReasoningConfig) -> None:
        """Groups are generated and scored until every slot has one to train on.

        Where the algorithm needs a critic, it gives the batch its advantages before the actor
        trains; where they depend on the log-probs of the reference policy, the actor computes
        these first.
        """
        flow.loop(
            "rollout",
            Stage("rollout", "generate", inputs=("scored",), outputs=("completions", "groups")),
            Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
            ahead=True,
        )
        batch = ("groups",)
        if config.critic is not None and config.algorithm.kl_reward_beta:
            log_probs = ("log_probs",)
            stage = Stage("actor", "infer", batch, log_probs, replicated=batch, key="inference")
            flow.stage("inference", stage)
            batch = log_probs
        if config.critic is not None:
            advantages = ("advantages",)
            flow.stage("critic", Stage("critic", "train", batch, advantages, replicated=batch))
            batch = advantages
        flow.stage("train", Stage("actor", "train", inputs=batch, replicated=batch))

    @classmethod
    def evaluation(cls, flow: Flow, config: ReasoningConfig) -> None:
        """Answers to validation prompts are generated and scored."""
        answering_step(flow)

    steps = property(lambda self: self.config.training_steps)
    ahead = property(lambda self: self.config.rollout.max_staleness)
    sources = property(lambda self: self.config.rollout.prompts)
    evaluation_interval = property(lambda self: self.config.validation.val_check_interval)

    @property
    def handing_over(self) -> tuple[str, ...]:
        """Rollout and trainer, where they share devices inside a step."""
        return HANDING_OVER if self.config.cluster.auto_scheduler else ()

    def context(self, *, trains: bool) -> WorkerContext:
        """With the model that the run begins with."""
        hook = rescaled_training() if trains and self.config.cluster.auto_scheduler else None
        return replace(super().context(trains=trains), model=self._model, training_hook=hook)

    def launched(self, groups: Groups) -> None:
        """Open what rollout workers are told through inside a step."""
        if self.config.cluster.auto_scheduler:
            self._mailboxes = open_mailboxes(self.config)

    def arguments(self, step: int) -> Arguments:
        """All who train and generate are told the number of the step."""
        arguments = {name: {"step": step} for name in ("rollout", "critic", "actor")}
        if self.config.cluster.auto_scheduler:
            for name, more in step_arguments(self.config, self._mailboxes).items():
                arguments[name] = {**arguments[name], **more}
        return arguments

    def draw(self, *, worst: bool = False) -> Arguments:
        """Prompts of the slots, and those that may take their places, `max_resample` for each."""
        algorithm, wanted = self.config.algorithm, self.config.rollout.prompts
        first_draw = self._loader.drawn == 0
        prompts = self._loader.take(self.config.prompts_at_once if first_draw else wanted)
        if worst:
            # Equal prompts would be computed once.
            longest, tokens = self._longest, self._longest.tokens
            prompts = [
                (draw, replace(longest, tokens=np.roll(tokens, number)))
                for number, (draw, _) in enumerate(prompts)
            ]
        count = algorithm.max_resample * wanted if algorithm.dynamic_sampling else 0
        spares = self._loader.coming(count)
        return {"rollout": {"slots": wanted, "prompts": prompts, "spares": spares}}

    def rolled_out(self, reports: Reports) -> None:
        """Draw no spare again that was used; the others are the first prompts of later steps."""
        for report in reports["rollout"]:
            self._loader.use(report.result.spares)

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """What the workers returned, and totals of the run."""
        metrics: dict[str, float] = {}
        for trainer in ("critic", "actor"):
            if trainer in report.stages:
                metrics.update(report.results(trainer)[0])
        generated: list[GenerationReport] = report.results("rollout")
        if self.config.cluster.auto_scheduler:
            made: list[Any] = [choice for part in generated for choice in part.choices]
            made += cast(Any, metrics.pop("choices"))
            write_choices(self.directory, step, made)
            metrics["rollout/moved"] = float(sum(part.moved for part in generated))
        metrics.update(self._scored(report.results("reward")))
        metrics.update(self._generated(generated))
        taken = {name: report.seconds(name) for name in report.stages}
        tokens = sum(part.tokens for part in generated)
        metrics["rollout/tokens_per_second"] = tokens / taken["rollout"]
        metrics["rollout/sequences_per_second"] = self.config.rollout.sequences / seconds
        metrics.update({f"time/{name}": value for name, value in taken.items()})
        return metrics

    def _scored(self, scored: list[RewardReport]) -> dict[str, float]:
        metrics = {}
        for name in self.config.reward.functions:
            values = [value for part in scored for value in part.values[name]]
            # The exact sum: the order in which workers scored them changes nothing.
            metrics[f"reward/{name}"] = math.fsum(values) / max(len(values), 1)
        faults = sum((Counter(part.faults) for part in scored), Counter[str]())
        return metrics | self.counts.add_faults(faults, "reward")

    def _generated(self, generated: list[GenerationReport]) -> dict[str, float]:
        def total(name: str) -> int:
            return sum(getattr(part, name) for part in generated)

        counts, rejected = self.counts, sum(len(part.spares) for part in generated)
        counts.prompts += total("begun") + rejected
        counts.sequences += total("completions")
        counts.tokens += total("tokens")
        metrics = {
            "rollout/prompts": float(counts.prompts),
            "rollout/tokens": float(counts.tokens),
            "rollout/rejected_groups": float(rejected),
            "rollout/engine_restarts": float(total("engine_restarts")),
        }
        if self.config.rollout.partial is not None:
            for name in ("interrupted", "carried", "regenerated", "dropped_tokens"):
                metrics[f"rollout/{name}"] = float(total(name))
        if self.config.rollout.agent is not None:
            metrics["rollout/turns"] = total("turns") / max(total("completions"), 1)
        return metrics

    # -- beginning and end ------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """See what the model can do before it is trained."""
        evaluated = run.evaluate("periodic")
        self.counts.pass_before = run.state.score
        run.log(evaluated)
        if evaluated:
            print(f"before training: {run.last_evaluation}", flush=True)
        run.save()

    def conclude(self, run: Run) -> None:
        """Final evaluation, learning curve and the trained model."""
        known = run.state.evaluated_now
        if not known or run.last_evaluation is None:
            evaluated = run.evaluate("periodic")
            run.log({} if known else evaluated)
        path = self.directory / FINAL_MODEL
        for written in run.groups["actor"].save_model(path).wait():
            if written is not None:
                written.bring(path)
        counts, state = self.counts, run.state
        print(
            f"training: {counts.sequences} sequences, {counts.tokens} tokens in "
            f"{state.training_seconds:.1f} s"
        )
        if np.isfinite(state.score):
            gain = 100 * (state.score - counts.pass_before)
            print(
                f"held-out prompts: {run.last_evaluation} (before training "
                f"{100 * counts.pass_before:.1f} %: {gain:+.1f} points)"
            )
        run.show_curve()
        print(f"model: {path}", flush=True)

    def progress(self) -> dict[str, Any]:
        """Prompts and tokens so far."""
        return {"prompts": self.counts.prompts, "tokens": self.counts.tokens}

    def state_dict(self) -> dict[str, Any]:
        """What was counted, and which prompts were drawn."""
        return {"counts": asdict(self.counts), "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.counts = AnswerCounts(**state["counts"])
        self._loader.load_state_dict(state["loader"])
