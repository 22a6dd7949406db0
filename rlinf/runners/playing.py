"""Tasks whose policy plays episodes to be evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rlinf.envs.spec import EnvSpec
from rlinf.flow.graph import Flow, Stage
from rlinf.runners.embodied_evaluation import ENV_SPEC_FILE, EpisodeEvaluator
from rlinf.runners.task import Task
from rlinf.workers.config.acting import EvaluatedConfig

if TYPE_CHECKING:
    from rlinf.checkpoint.contents import Checkpoint
    from rlinf.runners.groups import Groups

EvaluatedT = TypeVar("EvaluatedT", bound=EvaluatedConfig)


class PlayingTask(Task[EvaluatedT]):
    """What tasks share whose policy plays episodes to be evaluated."""

    starts_with: ClassVar = {"source": "env", "rollout": "env", "actor": "env"}
    evaluates = ("env", "rollout")

    def __init__(self, config: EvaluatedT, directory: Path) -> None:
        super().__init__(config, directory)
        self.evaluator: EpisodeEvaluator = EpisodeEvaluator(config)

    @classmethod
    def evaluation(cls, flow: Flow, config: EvaluatedT) -> None:
        """Environments and policy answer each other until every episode has ended."""
        flow.loop(
            "evaluation",
            Stage("env", "evaluate", inputs=("actions",), outputs=("observations",)),
            Stage("rollout", "generate", inputs=("observations",), outputs=("actions",)),
        )

    evaluation_start = property(lambda self: self.config.evaluation.start)

    def launched(self, groups: Groups) -> None:
        """Write down what the policy sees and does."""
        spec: EnvSpec = groups.started["env"][0]
        (self.directory / ENV_SPEC_FILE).write_text(json.dumps(spec.to_json()), encoding="utf-8")

    def load_weights(self, groups: Groups, checkpoint: Checkpoint) -> None:
        """The policy acts without an actor."""
        self.evaluator.load_weights(groups, checkpoint.tree["workers"], checkpoint.step)
