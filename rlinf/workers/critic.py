"""Critic worker: values of tokens, advantages from them, and the training of the value network."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.checkpoint.manifest import FileRecord
from rlinf.errors import in_section
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import build_network, check_tokenizer, load_tokenizer, padding_token
from rlinf.trainers.language.critic import FSDPCritic
from rlinf.workers.answering_config import AnsweringConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.training_ranks import TrainingWorker, read_batch, write_parts


class CriticWorker(TrainingWorker):
    """One rank of the trainer of the value network."""

    def __init__(self, config: AnsweringConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._algorithm = config.algorithm.build()
        self._critic: FSDPCritic

    def start(self, rendezvous: str | None = None) -> dict[str, int]:
        """Build the value network; returns the number of parameters.

        Args:
            rendezvous: :meth:`meeting` of rank 0; None for one rank.
        """
        config, critic = self._config, self._config.critic
        source = self._context.model or config.model
        if critic is None:
            raise ValueError("the config has no section critic")
        with in_section("model"):
            self._tokenizer = load_tokenizer(source)
        with in_section("model" if critic.model is None else "critic.model"):
            model = build_network(
                critic.model or source, tokenizer=self._tokenizer, seed=config.seed
            )
            check_tokenizer(model, self._tokenizer)
        self._critic = critic.build(
            model,
            self._algorithm,
            ranks=self._meet(rendezvous),
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._context.failures,
        )
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def train(self, groups: InputStream, *, step: int) -> Generator[Emit, None, dict[str, float]]:
        """Stage: hand the batch with its advantages on, then train; returns the phase's metrics.

        Args:
            groups: See :func:`~rlinf.workers.training_ranks.read_batch`.
            step: Number of the training phase, and so of the weights that it begins with.
        """
        batch = read_batch(groups, pad_id=padding_token(self._tokenizer), version=step)
        begin = time.perf_counter()
        batch, metrics = self._algorithm.prepare(replace(batch, values=self._critic.values(batch)))
        prepared = time.perf_counter()
        if self._rank == 0:
            yield Emit("advantages", 0, batch)
        metrics.update(self._critic.train(batch, step))
        metrics["time/values"] = prepared - begin
        return metrics

    def onload(self) -> None:
        """Bring to the device what :meth:`offload` took from it."""
        self._critic.onload()

    def offload(self) -> None:
        """Free the device until the next training phase."""
        self._critic.offload()

    def state(self, *, whole: bool = True) -> dict[str, Any] | None:
        """Everything that training needs to continue; rank 0 gives it.

        Args:
            whole: The trainer's state too, gathered; otherwise :meth:`save_parts` writes it.
        """
        state = self._critic.state_dict() if whole else None
        if self._rank > 0:
            return None
        return {"trainer": state, "algorithm": self._algorithm.state_dict()}

    def save_parts(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Write this rank's part of the trainer's state into the directory of a checkpoint.

        Returns:
            What it wrote.

        Raises:
            OSError: A rank could not write; on all ranks.
        """
        return write_parts(self._critic.save_sharded, checkpoint, "critic")

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from :meth:`state`.

        Args:
            state: What it gave.
            checkpoint: Where :meth:`save_parts` wrote, if it did.
        """
        if state["trainer"] is not None:
            self._critic.load_state_dict(state["trainer"])
        else:
            assert checkpoint is not None
            self._critic.load_sharded(checkpoint / "critic")
        self._algorithm.load_state_dict(state["algorithm"])

    def close(self) -> None:
        """Leave the other ranks."""
        self._leave()
