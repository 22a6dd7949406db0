"""What supervised tasks share: a source hands out what is to be learnt, and an actor fits it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlinf.flow.graph import Flow, Stage
from rlinf.runners.task import Evaluated, Purpose, Task
from rlinf.workers.config.supervised import SupervisedRunConfig

if TYPE_CHECKING:
    from rlinf.flow.executor import Arguments, StepReport
    from rlinf.runners.run import Run

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=SupervisedRunConfig)


@dataclass
class FitCounts:
    """What a supervised run counts: rows, terms; the last and the smallest loss of a validation,
    and the validations since then; whether an evaluation reached the rate that is enough."""

    rows: int = 0
    terms: int = 0
    loss: float = math.inf
    best: float = math.inf
    waited: int = 0
    solved: bool = False

    def validated(self, loss: float, min_improvement: float) -> None:
        """Take note of the loss of a validation."""
        better = loss < self.best - min_improvement
        self.loss, self.best = loss, loss if better else self.best
        self.waited = 0 if better else self.waited + 1


class SupervisedTask(Task[ConfigT]):
    """Fits one global batch per step, and ends once the loss on held-out rows falls no more, or
    what was trained is good enough."""

    weights = None
    leaves_best = True
    changeable: ClassVar[tuple[str, ...]] = ("runner", "cluster", "checkpoint", "logger")
    figures: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("rows", "train/rows", ",.0f"),
        ("rows/s", "train/rows_per_second", ",.0f"),
        ("loss", "train/loss", ".4f"),
        ("validation loss", "validation/loss", ".4f"),
        ("epoch", "train/epoch", ".2f"),
    )

    def __init__(self, config: ConfigT, directory: Path) -> None:
        super().__init__(config, directory)
        self.counts: FitCounts = FitCounts()

    @classmethod
    def step(cls, flow: Flow, config: ConfigT) -> None:
        """The source hands out a global batch, and the actor fits it."""
        edges = ("batches", "held_out")
        flow.stage("draw", Stage("source", "draw", outputs=edges), ahead=True)
        flow.stage("fit", Stage("actor", "fit", inputs=edges, replicated=edges))

    steps = property(lambda self: self.config.training_steps)

    def arguments(self, step: int) -> Arguments:
        """Both are told the number of the step, and the source whether a validation is due."""
        due = self.config.validates_after(step)
        return {"source": {"step": step, "validate": due}, "actor": {"step": step}}

    def draw(self, *, worst: bool = False) -> Arguments:
        """Whether the source hands out its longest rows."""
        return {"source": {"longest": True}} if worst else {}

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """What both returned, and totals of the run."""
        found = super().metrics(report, step=step, seconds=seconds)
        rows, counts = self.config.actor.global_batch_size, self.counts
        counts.rows += rows
        counts.terms += int(found["train/terms"])
        found["train/rows"], found["train/terms"] = float(counts.rows), float(counts.terms)
        found["train/rows_per_second"] = rows / seconds
        if "actor/tokens" in found:
            found["train/tokens_per_second"] = found["actor/tokens"] / seconds
        if "validation/loss" in found:
            counts.validated(found["validation/loss"], self.config.validation.min_improvement)
        return found

    @property
    def evaluation_interval(self) -> int:
        """Validations happen in the step itself; what they found is taken note of."""
        return self.config.validation.interval if self.config.data.validates else 0

    def begin(self, run: Run) -> None:
        """Say what was read, what was left out, and that nothing will be validated."""
        print(run.groups.started["source"][0], flush=True)
        interval, steps = self.config.validation.interval, self.config.training_steps
        if self.config.data.validates and interval > steps:
            log.warning(
                "validation.interval = %d is more than the %d steps of the run, so that nothing is "
                "validated; nearest: %d",
                interval,
                steps,
                steps,
            )
        super().begin(run)

    def evaluate(self, run: Run, purpose: Purpose) -> Evaluated | None:
        """The loss of the validation of this step, by which the best weights are kept."""
        if purpose == "held_out":
            return super().evaluate(run, purpose)
        return Evaluated({}, score=-self.counts.loss, text=f"loss {self.counts.loss:.4f}")

    @property
    def finished(self) -> bool:
        """Whether the loss on held-out rows has not fallen for long enough, or need not fall."""
        patience = self.config.validation.patience
        return self.counts.solved or (patience is not None and self.counts.waited >= patience)

    def best(self, score: float) -> str:
        """In words, what the best evaluation found."""
        return f"smallest validation loss: {-score:.4f}"

    def conclude(self, run: Run) -> None:
        """The best weights, where any were evaluated, else the last ones, are left behind."""
        counts, seconds = self.counts, run.state.training_seconds
        print(f"training: {counts.rows} rows, {counts.terms} terms in {seconds:.1f} s")
        if self.finished and run.state.step < self.steps:
            key = "evaluation.stop_at_success" if counts.solved else "validation.patience"
            print(f"{key} ended it after step {run.state.step} of {self.steps}")
        if math.isfinite(run.state.best_score):
            best = run.restore_best()
            if best is not None:
                print(f"{self.best(best[1])}, after step {best[0]}")
        self.leave(run)
        run.show_curve()

    def leave(self, run: Run) -> None:
        """Write what was trained, for runs that begin with it."""

    def progress(self) -> dict[str, Any]:
        """Rows so far."""
        return {"rows": self.counts.rows}
