"""Critic worker: values of tokens, advantages from them, and the training of the value network."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace

from rlinf.algorithms.protocol import require_prepared
from rlinf.errors import in_section
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import (
    build_network,
    check_tokenizer,
    load_tokenizer,
    padding_token,
    picture_reader,
)
from rlinf.trainers.language_trainers import critic_trainer
from rlinf.workers.config.answering import AnsweringConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.training_ranks import TrainingWorker, count_no_old_tokens, read_batch


class CriticWorker(TrainingWorker):
    """One rank of the trainer of the value network."""

    section = "critic"

    def __init__(self, config: AnsweringConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._algorithm = config.algorithm.build()
        count_no_old_tokens(self._algorithm, config.rollout.partial)

    def start(self, rendezvous: str | None = None) -> dict[str, int]:
        """Build the value network; returns the number of parameters."""
        config, critic = self._config, self._config.critic
        source = self._context.model or config.model
        if critic is None:
            raise ValueError("the config has no section critic")
        with in_section("model"):
            self._tokenizer = load_tokenizer(source)
        own = critic.model or source
        with in_section("model" if critic.model is None else "critic.model"):
            reader = picture_reader(own, self._tokenizer) if config.has_pictures else None
            model = build_network(own, tokenizer=self._tokenizer, seed=config.seed)
            check_tokenizer(model, self._tokenizer)
        self._trainer = critic_trainer(
            model,
            self._algorithm,
            critic,
            ranks=self._meet(rendezvous),
            total_steps=config.training_steps,
            seed=config.seed,
            reader=reader,
            failure_directory=self._context.failures,
        )
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def train(self, groups: InputStream, *, step: int) -> Generator[Emit, None, dict[str, float]]:
        """Stage: hand the batch with its advantages on, then train; returns the phase's metrics."""
        batch = read_batch(groups, pad_id=padding_token(self._tokenizer), version=step)
        begin = time.perf_counter()
        found = self._algorithm.prepare(replace(batch, values=self._trainer.values(batch)))
        batch, metrics = require_prepared(found, self._algorithm)
        prepared = time.perf_counter()
        if self._rank == 0:
            yield Emit("advantages", 0, batch)
        metrics.update(self._trainer.train(batch, step))
        metrics["time/values"] = prepared - begin
        return metrics
