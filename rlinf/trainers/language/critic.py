"""The value network of PPO on tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm
from rlinf.trainers.language.checkpoint import load_parts, save_parts
from rlinf.trainers.language.config import CriticTrainerConfig
from rlinf.trainers.language.core import SequenceCore, global_batches, phase_metrics
from rlinf.trainers.language.failure import batch_keeper
from rlinf.trainers.language.layout import Layout
from rlinf.trainers.language.parallel import Ranks
from rlinf.trainers.language.scoring import ValueScorer
from rlinf.trainers.skipped import SkippedUpdates, Update


class FSDPCritic:
    """Values of tokens, trained by the algorithm's value loss with an optimizer of their own.

    Every rank calls the same methods with the same batches. See
    :meth:`~rlinf.trainers.language.config.CriticTrainerConfig.build`.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        config: CriticTrainerConfig,
        *,
        ranks: Ranks,
        total_steps: int,
        seed: int,
        failure_directory: Path | None = None,
    ) -> None:
        self._algorithm, self._config = algorithm, config
        self._total_steps, self._seed = total_steps, seed
        self._skipped = SkippedUpdates(
            bound=config.max_skipped_updates,
            section="critic",
            keep=batch_keeper(failure_directory if ranks.rank == 0 else None, "critic"),
        )
        # Where there are several ranks, they read the weights and leave them as they are.
        kept = model.parameters() if ranks.world_size > 1 else ()
        shared: dict[int, Any] = {id(parameter): parameter for parameter in kept}
        backbone = copy.deepcopy(model.base_model, shared)
        self._core = SequenceCore(
            ValueScorer(backbone, packing=config.packing), config, ranks, prefix="critic"
        )
        self._ranks = self._core.ranks

    def values(self, batch: Batch) -> Tensor:
        """[N, L] float32, the value before each token that counts; 0 where ``mask`` is 0."""
        return self._core.evaluate(batch, lambda layout: [self._core(layout)])[0]

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Run one training phase on a prepared rollout.

        Args:
            batch: All sequences, with values and returns.
            step: Number of the phase, from 0.

        Returns:
            Metrics, mean over the optimizer steps.

        Raises:
            RunFailure: Too many updates had a loss or gradient that is not finite.
        """
        pieces = global_batches(batch, self._config, seed=self._seed, step=step)
        return self.train_stream(pieces, step)

    def train_stream(self, batches: Iterable[Batch], step: int) -> dict[str, float]:
        """Like :meth:`train`, with one optimizer step per prepared batch, as they arrive."""
        factor = self._config.lr_sched.factor(step, self._total_steps)
        updates: list[Update] = []
        for batch in batches:
            updates.append(self._update(batch, factor))
            self._skipped.note(updates, batch, step=step)
        metrics = phase_metrics(updates, prefix="critic")
        metrics["critic/lr"] = self._config.optim.lr * factor
        return metrics

    def _update(self, batch: Batch, factor: float) -> Update:
        normalizer = self._algorithm.normalizer(batch)

        def loss_of(part: Batch, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
            values = layout.scatter(self._core(layout))
            return self._algorithm.value_loss(values, part, normalizer=normalizer)

        return self._core.update(batch, loss_of, factor=factor)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer, whole; on ranks other than 0 an empty dict."""
        with self._core.loaded() as away:
            state = self._core.trained.state_dict(keep=self._ranks.rank == 0, copy=away)
        return {**state, **self._numbers()} if state else {}

    def _numbers(self) -> dict[str, Any]:
        return {"skipped": self._skipped.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, given whole on every rank.

        Raises:
            CheckpointError: The weights are of another model.
        """
        with self._core.loaded():
            self._core.trained.load_state_dict(state)
        self._skipped.in_a_row = int(state["skipped"])

    def save_sharded(self, directory: Path) -> list[Path]:
        """Write the same; each rank its own part, of whose files it gives the paths."""
        with self._core.loaded():
            return save_parts(directory, self._core.trained, None, self._numbers(), self._ranks)

    def load_sharded(self, directory: Path) -> None:
        """Continue from :meth:`save_sharded`, written by any number of ranks."""
        with self._core.loaded():
            numbers = load_parts(directory, self._core.trained, None, self._numbers(), self._ranks)
        self._skipped.in_a_row = int(numbers["skipped"])

    def offload(self) -> None:
        """Take from the device what ``offload`` in the config names."""
        self._core.trained.offload()

    def onload(self) -> None:
        """Bring everything back, bit for bit."""
        self._core.trained.onload()
