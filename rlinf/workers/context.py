"""What a worker is told beside the run's config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlinf.models.language_config import LanguageModelConfig


@dataclass(frozen=True)
class WorkerContext:
    """What is known only when workers are launched; the same for all of a run.

    Args:
        directory: Of the run.
        model: The language model that every worker loads, where it is not that of the config: one
            that the run created.
        trains: Whether there is a trainer; False: the workers evaluate alone.
    """

    directory: Path
    model: LanguageModelConfig | None = None
    trains: bool = True

    @property
    def failures(self) -> Path:
        """Directory for batches that could not be trained on."""
        return self.directory / "failures"
