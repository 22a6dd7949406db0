"""What a worker is told beside the run's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.models.language_config import LanguageModelConfig


@dataclass(frozen=True)
class WorkerContext:
    """What is known only when workers are launched; the same for all of a run.

    Args:
        directory: Of the run.
        model: The language model that every worker loads, where it is not that of the config: one
            that the run created.
        trains: Whether there is a trainer; False: the workers evaluate alone.
        training_hook: What lets the number of ranks of an actor change inside a step: makes a
            :class:`~rlinf.workers.global_batches.TrainingHook` from the arguments of
            :class:`~rlinf.trainers.ranks.Ranks`. None: nothing does.
    """

    directory: Path
    model: LanguageModelConfig | None = None
    trains: bool = True
    training_hook: Callable[..., Any] | None = None

    @property
    def failures(self) -> Path:
        """Directory for batches that could not be trained on."""
        return self.directory / "failures"
