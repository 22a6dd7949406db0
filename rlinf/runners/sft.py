"""The supervised tasks: a source hands out what is to be learnt, and an actor fits it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlinf.flow.graph import Flow, Stage
from rlinf.runners.task import Evaluated, Purpose, Task
from rlinf.workers.config.supervised import FineTuningConfig, SupervisedRunConfig

if TYPE_CHECKING:
    from rlinf.flow.executor import Arguments, StepReport
    from rlinf.models.language_config import LanguageModelConfig
    from rlinf.runners.run import Run
    from rlinf.workers.context import WorkerContext

ConfigT = TypeVar("ConfigT", bound=SupervisedRunConfig)
INITIAL_MODEL, FINAL_MODEL = "initial_model", "model"


@dataclass
class FitCounts:
    """What a supervised run counts."""

    rows: int = 0
    terms: int = 0
    loss: float = math.inf
    """Of the last validation."""
    best: float = math.inf
    """Smallest loss of a validation."""
    waited: int = 0
    """Validations since then."""


class SupervisedTask(Task[ConfigT]):
    """Fits one global batch per step, and ends once the loss on held-out rows falls no more."""

    weights = None
    changeable = ("runner", "cluster", "checkpoint", "logger")
    figures = (
        ("rows", "train/rows", ",.0f"),
        ("rows/s", "train/rows_per_second", ",.0f"),
        ("loss", "train/loss", ".4f"),
        ("validation loss", "validation/loss", ".4f"),
        ("epoch", "train/epoch", ".2f"),
    )

    def __init__(self, config: ConfigT, directory: Path) -> None:
        super().__init__(config, directory)
        self.counts = FitCounts()

    @classmethod
    def step(cls, flow: Flow, config: ConfigT) -> None:
        """The source hands out a global batch, and the actor fits it."""
        edges = ("batches", "held_out")
        flow.stage("draw", Stage("source", "draw", outputs=edges), ahead=True)
        flow.stage("fit", Stage("actor", "fit", inputs=edges, replicated=edges))

    steps = property(lambda self: self.config.training_steps)

    def arguments(self, step: int) -> Arguments:
        """Both are told the number of the step, and the source whether a validation is due."""
        validate = self.config.validates_after(step)
        return {"source": {"step": step, "validate": validate}, "actor": {"step": step}}

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """What both returned, and totals of the run."""
        found = super().metrics(report, step=step, seconds=seconds)
        rows, counts = self.config.actor.global_batch_size, self.counts
        counts.rows += rows
        counts.terms += int(found.pop("train/terms"))
        found["train/rows"], found["train/rows_per_second"] = float(counts.rows), rows / seconds
        if "actor/tokens" in found:
            found["train/tokens_per_second"] = found["actor/tokens"] / seconds
        if "validation/loss" in found:
            self._note(found["validation/loss"])
        return found

    def _note(self, loss: float) -> None:
        counts, counts.loss = self.counts, loss
        better = loss < counts.best - self.config.validation.min_improvement
        counts.waited = 0 if better else counts.waited + 1
        counts.best = loss if better else counts.best

    @property
    def evaluation_interval(self) -> int:
        """Validations happen in the step itself; what they found is taken note of."""
        return self.config.validation.interval if self.config.data.validates else 0

    def evaluate(self, run: Run, purpose: Purpose) -> Evaluated | None:
        """The loss of the validation of this step, by which the best weights are kept."""
        if purpose == "held_out":
            return super().evaluate(run, purpose)
        return Evaluated({}, score=-self.counts.loss, text=f"loss {self.counts.loss:.4f}")

    @property
    def finished(self) -> bool:
        """Whether the loss on held-out rows has not fallen for long enough."""
        patience = self.config.validation.patience
        return patience is not None and self.counts.waited >= patience

    def conclude(self, run: Run) -> None:
        """The best weights, where there was a validation, else the last ones, are left behind."""
        counts, state = self.counts, run.state
        print(
            f"training: {counts.rows} rows, {counts.terms} terms in {state.training_seconds:.1f} s"
        )
        if math.isfinite(counts.best):
            step = run.restore_best()
            print(f"smallest validation loss: {-state.best_score:.4f}, after step {step}")
        self.leave(run)
        run.show_curve()

    def leave(self, run: Run) -> None:
        """Write what was trained, for runs that begin with it."""

    def progress(self) -> dict[str, Any]:
        """Rows so far."""
        return {"rows": self.counts.rows}

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        return asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.counts = FitCounts(**state)


class FineTuning(SupervisedTask[FineTuningConfig]):
    """Trains a language model on prompts and answers."""

    config_class = FineTuningConfig
    groups: ClassVar = {
        "source": "rlinf.workers.source:SourceWorker",
        "actor": "rlinf.workers.fit:FineTuningWorker",
    }

    def __init__(self, config: FineTuningConfig, directory: Path) -> None:
        super().__init__(config, directory)
        self._model = config.model
        if config.model.architecture is not None:
            self._model = self._created(directory / INITIAL_MODEL)

    def _created(self, directory: Path) -> LanguageModelConfig:
        """A model with random weights; without a tokenizer one is trained on the task's texts."""
        from rlinf.data.tokenizer import train_tokenizer
        from rlinf.models.language import load_tokenizer
        from rlinf.runners.initial_model import write_initial_model

        model, data = self.config.model, self.config.data

        def tokenizer(unfinished: Path) -> Any:
            if model.path is not None:
                return load_tokenizer(model)
            return train_tokenizer(data.texts(), unfinished)

        return write_initial_model(model, directory, seed=self.config.seed, tokenizer=tokenizer)

    def context(self, *, trains: bool) -> WorkerContext:
        """With the model that the run begins with."""
        return replace(super().context(trains=trains), model=self._model)

    def leave(self, run: Run) -> None:
        """The model, as other programs read it."""
        path = self.directory / FINAL_MODEL
        run.groups["actor"].save_model(path).wait()
        print(f"model: {path}", flush=True)
