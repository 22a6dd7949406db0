"""What every trainer of language models does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.trainers.language.config import SupervisedConfig
from rlinf.trainers.language.supervised import Example

Content = Literal["merged", "adapter"]
"""Weights in which an adapter is contained, or the adapter alone."""


class LanguageTrainer(ABC):
    """Computes log-probs and applies gradients to one language model, divided over ranks or not.

    Every rank calls the same methods in the same order with the same batches and gets the same
    results; how work and weights are divided is the trainer's own affair. Batches and results lie
    on the CPU.
    """

    version: int
    """Training phases that were run; number of the present weights."""

    @abstractmethod
    def log_probs(self, batch: Batch, *, temperature: float | None = None) -> Tensor:
        """Log-probs of the tokens that count, under the present weights.

        Args:
            batch: N sequences.
            temperature: Divisor of the logits; None: that of the trainer.

        Returns:
            [N, L] float32, 0 where ``mask`` is 0.
        """

    @abstractmethod
    def log_probs_and_entropy(
        self, batch: Batch, *, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs as above, and the entropy of each distribution in nats, each [N, L]."""

    @abstractmethod
    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs [N, L] under the weights that the run began with.

        Raises:
            RuntimeError: The algorithm did not ask for them, so no copy was kept.
        """

    @abstractmethod
    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Run one training phase on a prepared rollout; the version rises by 1.

        Args:
            batch: All sequences, with advantages.
            step: Number of the phase, from 0.

        Returns:
            Metrics, mean over the optimizer steps.

        Raises:
            RunFailure: Engine and trainer disagree about the log-probs of the same weights, or too
                many updates had a loss or gradient that is not finite.
        """

    @abstractmethod
    def train_stream(self, batches: Iterable[Batch], step: int) -> dict[str, float]:
        """Like :meth:`train`, with one optimizer step per prepared batch, as they arrive."""

    @abstractmethod
    def fine_tune(
        self, config: SupervisedConfig, examples: Sequence[Example], *, seed: int
    ) -> dict[str, float]:
        """Supervised training before the first phase; the version stays, the reference follows.

        Args:
            config: How long, in which pieces.
            examples: Tokens of each prompt, one at least, and of its target.
            seed: Of the order of the examples.

        Returns:
            ``supervised/loss_begin`` and ``supervised/loss_end``, of the first and last step.
        """

    @abstractmethod
    def weights(self, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
        """Whole tensors for engines, one at a time; every rank must iterate to the end.

        Names and shapes are those of transformers, a tied tensor comes once, numbers are in
        ``precision.param``. They are views of what is trained or gathered where possible: write or
        copy them before the next phase. ``adapter`` gives an adapter by the names of its file.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, whole; on ranks other than 0 an empty dict.

        Tensors may share memory with the trainer: write or copy them before the next phase.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, given whole on every rank, from any number of ranks.

        Raises:
            CheckpointError: The weights are of another model.
        """

    @abstractmethod
    def save_sharded(self, directory: Path) -> list[Path]:
        """Write the same as :meth:`state_dict`; each rank its own part.

        Args:
            directory: The same one for all ranks, of this checkpoint alone.

        Returns:
            Files that this rank wrote.

        Raises:
            OSError: A rank could not write; on all ranks.
        """

    @abstractmethod
    def load_sharded(self, directory: Path) -> None:
        """Continue from :meth:`save_sharded`, written by any number of ranks."""

    @abstractmethod
    def save_pretrained(self, directory: Path) -> None:
        """Write the model in the format of transformers; an adapter is merged into it, and saved
        alone in the subdirectory ``adapter``."""

    @abstractmethod
    def offload(self) -> None:
        """Take from the device what ``offload`` in the config names; nothing else works until
        :meth:`onload`, but for saving and sending, which bring it back for a moment."""

    @abstractmethod
    def onload(self) -> None:
        """Bring everything back, bit for bit."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""
