"""Language actor worker: trains a language model on scored groups of completions."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import require_prepared
from rlinf.data.sequences import PromptGroup
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import padding_token
from rlinf.trainers.ranks import Ranks
from rlinf.workers.config.answering import AnsweringConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.global_batches import GlobalBatches, TrainingHook
from rlinf.workers.training_ranks import (
    LanguageWorker,
    WeightSendingWorker,
    count_no_old_tokens,
    old_tokens,
    read_batch,
    token_batch,
    without_old_tokens,
)


class LanguageActorWorker(WeightSendingWorker, LanguageWorker):
    """One rank of the trainer of a language model."""

    _config: AnsweringConfig

    def __init__(self, config: AnsweringConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._algorithm = config.algorithm.build()
        self._oldest = count_no_old_tokens(self._algorithm, config.rollout.partial)
        self._hook: TrainingHook | None = None

    def start(self, rendezvous: str | None = None) -> dict[str, int]:
        """Build the trainer; returns the number of parameters."""
        config, failures = self._config, self._context.failures
        hook, model = self._context.training_hook, self._build_model()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if hook is not None:
            self._hook = self._joined(hook, rendezvous)
        self._trainer = config.actor.build(
            model,
            self._algorithm,
            ranks=self._meet(rendezvous) if hook is None else Ranks(device=self._device()),
            total_steps=config.training_steps,
            seed=config.seed,
            temperature=config.rollout.sampling.temperature,
            reader=self._picture_reader(),
            failure_directory=None if hook and self._rank else failures,
        )
        if self._hook is not None:
            self._hook.attach(self._trainer)
        self._open_weights()
        return {"parameters": parameters}

    def infer(self, groups: InputStream) -> Generator[Emit, None, None]:
        """Stage: hand the batch of the step on, with the log-probs that the algorithm needs."""
        batch = self._trainer.with_log_probs(self._read(groups))
        if self._rank == 0:
            yield Emit("log_probs", 0, batch)

    def train(
        self, groups: InputStream, *, step: int, shared: Any = None
    ) -> Generator[Emit, None, dict[str, Any]]:
        """Stage: train on the scored groups of all positions; returns the phase's metrics.

        The stream may be one batch, to which a critic gave advantages; ``shared`` says how devices
        are shared with the rollout inside the step.
        """
        yield from ()  # a stage is a generator, also one that yields nothing
        if self._trains_parts:
            return self._train_parts(groups, step, shared)
        batch = self._read(groups)
        begin = time.perf_counter()
        batch, metrics = self._prepare(self._trainer.with_log_probs(batch))
        prepared = time.perf_counter()
        metrics.update(self._trainer.train(batch, step))
        metrics["time/prepare"] = prepared - begin
        metrics["time/update"] = time.perf_counter() - prepared
        return metrics

    @property
    def _trains_parts(self) -> bool:
        """Whether a global batch can be trained on when its groups are known, before all are."""
        actor = self._config.actor
        if actor.order == "length":
            return True
        return actor.trains_in_order and self._config.algorithm.prepares_parts

    def _train_parts(self, stream: InputStream, step: int, shared: Any) -> dict[str, Any]:
        """Train on each global batch as soon as it is complete; the same wherever it runs."""
        pad_id, version = padding_token(self._tokenizer), self._trainer.version
        positions, actor = self._config.rollout.prompts, self._config.actor
        batches = GlobalBatches(
            stream,
            positions=positions,
            size=positions // actor.n_minibatches,
            by_length=actor.order == "length",
        )

        def prepare(found: list[PromptGroup]) -> Batch:
            # The version that this rank began with is old where it has only joined.
            batch = token_batch(found, pad_id, self._trainer.version)
            return self._prepare(self._trainer.with_log_probs(batch))[0]

        if self._hook is None:
            begin = time.perf_counter()
            metrics: dict[str, Any] = dict(self._trainer.train(map(prepare, batches), step))
            metrics["time/update"] = time.perf_counter() - begin - stream.seconds_waiting
        else:
            trained = self._hook.train(batches, prepare, step=step, shared=shared)
            if trained is None:
                return {}
            metrics = trained
        whole = token_batch(batches.groups(), pad_id, version)
        return {**self._prepare(whole)[1], **metrics}

    def _prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with its advantages and without tokens that are too old; metrics about it."""
        metrics: dict[str, float] = {}
        bound, sampled = self._oldest, batch
        if batch.advantages is None:
            found = self._algorithm.prepare(batch)
            batch, metrics = require_prepared(found, self._algorithm)
        if bound is not None:
            batch = without_old_tokens(batch, bound)
            metrics["rollout/masked_tokens"] = float(old_tokens(sampled, bound))
        return batch, metrics

    def _read(self, groups: InputStream) -> Batch:
        return read_batch(
            groups, pad_id=padding_token(self._tokenizer), version=self._trainer.version
        )

    @property
    def _has_model(self) -> bool:
        return self._hook is None or self._hook.has_part

    def close(self) -> None:
        """Give the memory back, and leave the other ranks."""
        super().close()
        if self._hook is not None:
            self._hook.close()
