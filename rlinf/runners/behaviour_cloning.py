"""The behaviour-cloning task: a policy learns to do what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlinf.runners.embodied_evaluation import PlayingTask
from rlinf.runners.supervised import SupervisedTask
from rlinf.runners.task import Evaluated, Purpose, Task
from rlinf.workers.config.supervised import BehaviourCloningConfig, CloningActorConfig

if TYPE_CHECKING:
    from rlinf.runners.run import Run
    from rlinf.workers.context import WorkerContext


class BehaviourCloning(PlayingTask[BehaviourCloningConfig], SupervisedTask[BehaviourCloningConfig]):
    """Trains a policy to do what was recorded, and plays held-out episodes with it.

    Where ``evaluation.interval`` is given, it plays during training too, and the best weights are
    those that succeeded most often; else they are those of the smallest validation loss.
    """

    config_class = BehaviourCloningConfig
    groups: ClassVar = {
        "env": "rlinf.workers.env:EnvWorker",
        "source": "rlinf.workers.source:SourceWorker",
        "rollout": "rlinf.workers.rollout:RolloutWorker",
        "actor": "rlinf.workers.fit:CloningWorker",
    }
    changeable = (
        *SupervisedTask.changeable,
        *(f"actor.{key}" for key in CloningActorConfig.of_rounding),
    )
    figures = (*SupervisedTask.figures, ("eval success", "eval/success", ".3f"))

    sources = property(lambda self: self.config.sub_batches)

    @classmethod
    def for_evaluation(cls, config: BehaviourCloningConfig) -> BehaviourCloningConfig:
        """Without the episodes that are learnt from."""
        return config.model_copy(update={"data": None})

    def context(self, *, trains: bool) -> WorkerContext:
        """No experience is collected: environments are for evaluation alone."""
        return super().context(trains=False)

    @property
    def evaluation_interval(self) -> int:
        """Of playing, or else of validations."""
        return self.config.evaluation.interval or super().evaluation_interval

    def evaluate(self, run: Run, purpose: Purpose) -> Evaluated | None:
        """Play episodes, where that is asked for; training ends once they succeed often enough."""
        if purpose == "held_out" or not self.config.evaluation.interval:
            return super().evaluate(run, purpose)
        self._act_with_newest(run)
        found = Task.evaluate(self, run, purpose)
        target = self.config.evaluation.stop_at_success
        self.counts.solved = found is not None and target is not None and found.score >= target
        return found

    def best(self, score: float) -> str:
        """In words, what the best evaluation found."""
        if self.config.evaluation.interval:
            return f"highest success: {max(score, 0.0):.3f}"
        return super().best(score)

    def leave(self, run: Run) -> None:
        """The policy, as runs begin with it, and how often it succeeds."""
        self._act_with_newest(run)
        self.evaluator.leave_policy(run)

    def _act_with_newest(self, run: Run) -> None:
        step = run.state.step if run.weights_step is None else run.weights_step
        self.evaluator.load_weights(run.groups, run.groups.state(whole=True), step)
