"""The reasoning task: a language model learns from rewards, one batch of prompts at a time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf.data.prompts.dataset import PromptSets
from rlinf.data.prompts.loader import PromptLoader
from rlinf.flow.graph import Flow, Stage
from rlinf.runners import rescaling
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.reasoning_evaluation import (
    AnswerCounts,
    PromptEvaluator,
    answering_step,
    write_completions,
)
from rlinf.runners.task import Task
from rlinf.trainers.config import SequenceConfig

if TYPE_CHECKING:
    from rlinf.flow.executor import Arguments, Reports, StepReport
    from rlinf.runners.groups import Groups
    from rlinf.runners.run import Run
    from rlinf.workers.context import WorkerContext


_SCORING = ("reward.processes", "reward.deadline", "reward.start_deadline", "reward.memory_mib")
"""In how many processes and within which bounds answers are scored, not what they are worth."""


class Reasoning(Task[ReasoningConfig]):
    """Trains a language model on rewards for its answers to prompts."""

    config_class = ReasoningConfig
    groups: ClassVar = {
        "rollout": "rlinf.workers.generation:GenerationWorker",
        "reward": "rlinf.workers.reward:RewardWorker",
        "actor": "rlinf.workers.language_actor:LanguageActorWorker",
        "critic": "rlinf.workers.critic:CriticWorker",
    }
    changeable = (
        "runner", "cluster", "weight_sync", "validation.val_check_interval", "checkpoint",
        "logger", *_SCORING, "rollout.engine.max_running_requests",
        *(f"{name}.{key}" for name in ("actor", "critic") for key in SequenceConfig.of_rounding),
    )  # fmt: skip
    changeable_evaluation = (
        "cluster", "weight_sync", *_SCORING, "rollout.engine", "actor.tensor_parallel_size",
        "critic.tensor_parallel_size", "validation", "data.files.validation",
    )  # fmt: skip
    evaluates_end = True
    figures = AnswerCounts.figures

    def __init__(self, config: ReasoningConfig, directory: Path) -> None:
        from rlinf.runners.reasoning_model import PromptReader

        super().__init__(config, directory)
        self.counts: AnswerCounts = AnswerCounts()
        self._prompts = PromptReader(config, directory)
        self._model, self._tokenizer = self._prompts.model, self._prompts.tokenizer
        self._loader: PromptLoader
        self._validation = self._prompts.read("validation") if config.data.validates else None
        self.evaluator = PromptEvaluator(config, self._validation, self._tokenizer)

    @classmethod
    def for_evaluation(cls, config: ReasoningConfig) -> ReasoningConfig:
        """Without the files of the prompts that are trained on, and without a warm start, which
        would train the model that is to be evaluated; the engine loads that model itself."""
        rollout = config.rollout.model_copy(update={"engine": config.rollout.engine.loading})
        update = {"data": config.data.for_evaluation, "warm_start": None, "rollout": rollout}
        return config.model_copy(update=update)

    def read_training_data(self) -> None:
        """The prompts, and how many of those that validate are among them."""
        data = self.config.data
        sets = PromptSets(self._prompts.read("train"), self._validation)
        print(f"training: {sets.train.report}")
        if sets.validation is not None:
            shared = f"; {sets.shared} of them are trained on, too" if sets.shared else ""
            print(f"validation: {sets.validation.report}{shared}", flush=True)
        seed = data.seed + self.config.seed
        self._loader = PromptLoader(sets.train, shuffle=data.shuffle, seed=seed)

    @classmethod
    def step(cls, flow: Flow, config: ReasoningConfig) -> None:
        """Groups are generated and scored until every position has one to train on. A critic gives
        the batch its advantages first; where they depend on log-probs, the actor computes these."""
        flow.loop(
            "rollout",
            Stage("rollout", "generate", inputs=("scored",), outputs=("completions", "groups")),
            Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
            ahead=True,
        )
        batch, infers = ("groups",), config.critic is not None and config.algorithm.kl_reward_beta
        if infers:
            infer = Stage(
                "actor", "infer", batch, ("log_probs",), replicated=batch, key="inference"
            )
            flow.stage("inference", infer)
            batch = ("log_probs",)
        if config.critic is not None:
            value = Stage("critic", "train", batch, ("advantages",), replicated=batch)
            flow.stage("critic", value)
            batch = ("advantages",)
        flow.stage("train", Stage("actor", "train", inputs=batch, replicated=batch))

    @classmethod
    def evaluation(cls, flow: Flow, config: ReasoningConfig) -> None:
        """Answers to validation prompts are generated and scored."""
        answering_step(flow)

    steps = property(lambda self: self.config.training_steps)
    ahead = property(lambda self: self.config.rollout.max_staleness)
    sources = property(lambda self: self.config.rollout.prompts)
    evaluation_interval = property(lambda self: self.config.validation.val_check_interval)
    handing_over = property(lambda self: rescaling.HANDING_OVER if self._rescales else ())
    _rescales = property(lambda self: self.config.cluster.auto_scheduler)

    def context(self, *, trains: bool) -> WorkerContext:
        """With the model that the run begins with."""
        hook = rescaling.rescaled_training() if trains and self._rescales else None
        return replace(super().context(trains=trains), model=self._model, training_hook=hook)

    def launched(self, groups: Groups) -> None:
        """Open what rollout workers are told through inside a step."""
        if self._rescales:
            self._mailboxes = rescaling.open_mailboxes(self.config)

    def arguments(self, step: int) -> Arguments:
        """All who train and generate are told the number of the step, and who scores how much of it
        is kept."""
        shared = rescaling.step_arguments(self.config, self._mailboxes) if self._rescales else {}
        own = {n: {"step": step, **shared.get(n, {})} for n in ("rollout", "critic", "actor")}
        return {**own, "reward": {"keep": self.config.runner.completions_kept}}

    def draw(self, *, worst: bool = False) -> Arguments:
        """Prompts of the positions, and `max_resample` for each that may take their places."""
        algorithm, wanted = self.config.algorithm, self.config.rollout.prompts
        first_draw = self._loader.drawn == 0
        prompts = self._loader.take(self.config.prompts_at_once if first_draw else wanted)
        count = algorithm.max_resample * wanted if algorithm.dynamic_sampling else 0
        spares = self._loader.coming(count)
        prompts = self._loader.longest(prompts) if worst else prompts
        return {"rollout": {"positions": wanted, "prompts": prompts, "spares": spares}}

    def rolled_out(self, reports: Reports) -> None:
        """Draw no spare again that was used; the others are the first prompts of later steps."""
        for report in reports["rollout"]:
            self._loader.use(report.result.spares)

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """What the workers returned, and totals of the run."""
        found = self.counts.metrics(report, self.config, seconds)
        kept = [group for part in report.results("reward") for group in part.kept]
        if kept:
            first = sorted(kept, key=lambda group: group.draw)[
                : self.config.runner.completions_kept
            ]
            write_completions(self.directory, step + 1, first, self._tokenizer)
        if self._rescales:
            found |= rescaling.note_choices(self.directory, step, report, found.pop("choices"))
        return found

    def begin(self, run: Run) -> None:
        """See what the model can do before it is trained."""
        run.log(run.evaluate("periodic"))
        self.counts.pass_before = run.state.score
        if run.last_evaluation is not None:
            print(f"before training: {run.last_evaluation}", flush=True)
        run.save()

    def conclude(self, run: Run) -> None:
        """Learning curve, the trained model and what it can do."""
        if run.last_evaluation is None:  # the last step was committed by a former process
            run.evaluate("periodic")
        path = self.directory / "model"
        run.groups.save_model(path)
        print(self.counts.summary(run))
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
