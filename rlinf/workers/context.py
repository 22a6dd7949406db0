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
        model: What every worker loads, where the run created a model.
        trains: Whether there is a trainer; False: the workers evaluate alone.
        training_hook: Makes a :class:`~rlinf.workers.global_batches.TrainingHook` from arguments
            of :class:`~rlinf.trainers.ranks.Ranks`; None: ranks do not change inside a step.
    """

    directory: Path
    model: LanguageModelConfig | None = None
    trains: bool = True
    training_hook: Callable[..., Any] | None = None

    @property
    def failures(self) -> Path:
        """Directory for batches that could not be trained on."""
        return self.directory / "failures"
