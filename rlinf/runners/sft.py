"""The fine-tuning task: a language model learns answers to prompts."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlinf.runners.supervised import SupervisedTask
from rlinf.workers.config.supervised import FineTuningActorConfig, FineTuningConfig

if TYPE_CHECKING:
    from rlinf.models.language_config import LanguageModelConfig
    from rlinf.runners.run import Run
    from rlinf.workers.context import WorkerContext


class FineTuning(SupervisedTask[FineTuningConfig]):
    """Trains a language model on prompts and answers."""

    config_class = FineTuningConfig
    groups: ClassVar = {
        "source": "rlinf.workers.source:SourceWorker",
        "actor": "rlinf.workers.fit:FineTuningWorker",
    }
    changeable = (
        *SupervisedTask.changeable,
        *(f"actor.{key}" for key in FineTuningActorConfig.of_rounding),
    )

    @cached_property
    def _model(self) -> LanguageModelConfig:
        """What the run begins with; a fresh model is written when it is needed first."""
        config = self.config
        if config.model.architecture is None:
            return config.model
        from rlinf.workers.initial_model import write_initial_model

        texts = None if config.model.path else config.data.texts
        return write_initial_model(config.model, self.directory, config.seed, texts=texts)

    def context(self, *, trains: bool) -> WorkerContext:
        """With the model that the run begins with."""
        return replace(super().context(trains=trains), model=self._model)

    @property
    def instead_of_evaluation(self) -> str:
        """Who asks the model, and where the loss on held-out texts is seen."""
        run, model = (shlex.quote(str(each)) for each in (self.directory, self._left))
        task = self.config.data.task
        if task is None:
            asked = f"evaluation/math500 model.path={model} benchmark.path=FILE"
        else:
            given = {"type": task.type, **task.model_dump(mode="json", exclude_defaults=True)}
            section = shlex.quote(f"data.task={json.dumps(given)}")
            asked = (
                f"reasoning/arithmetic_grpo model.path={model} model.architecture=null "
                f"warm_start=null {section}"
            )
        return (
            f"its model answers prompts by: rlinf eval {asked}; its losses are shown by: "
            f"rlinf view {run}"
        )

    @property
    def _left(self) -> Path:
        return self.directory / "model"

    def leave(self, run: Run) -> None:
        """The model, as other programs read it."""
        path = self._left
        run.groups.save_model(path)
        print(f"model: {path}", flush=True)
