"""Fit workers: ranks that are trained on what a source hands out."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.supervised import Supervised, check_objective, imitated, with_noise
from rlinf.data.pictures import copy_settings
from rlinf.envs.spec import EnvSpec
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.adapters import peft_settings
from rlinf.models.language import save_language_model
from rlinf.models.policy import Policy, told_elsewhere
from rlinf.trainers.language_trainers import policy_trainer
from rlinf.trainers.modules import POLICY
from rlinf.trainers.scoring import TokenScorer
from rlinf.trainers.trained import PlainModule
from rlinf.trainers.trainer import Trainer
from rlinf.workers.actor import ActorWorker
from rlinf.workers.config.answering import WarmStartConfig
from rlinf.workers.config.supervised import BehaviourCloningConfig, FineTuningConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.training_ranks import LanguageWorker, TrainingWorker


class FitStage(TrainingWorker):
    """What fits: one global batch per step, and the loss on what validates."""

    _algorithm: Supervised

    def fit(
        self, batches: InputStream, held_out: InputStream, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: train on the global batch of a step; returns its metrics.

        Of ``held_out`` batches, which most steps have none of, the loss is computed afterwards.
        """
        batch = self._ready(next(batches).payload, "train", step)
        metrics = self._trainer.train([batch], step)
        policy = self._trainer.modules.modules[POLICY]
        if isinstance(policy, Policy):
            policy.update_normalizer(batch.to(self.compute_device).inputs)
        errors, terms = list[float](), 0.0
        for item in held_out:
            seen = self._ready(item.payload, "validation", item.source)
            errors += self._row_errors(seen)
            terms += float((seen.mask > 0).sum())
        metrics["train/loss"] = metrics[f"{self.section}/loss"]
        metrics["train/terms"] = float((batch.mask > 0).sum())
        if terms:
            # The exact sum: in which batches the rows came changes nothing.
            metrics["validation/loss"] = math.fsum(errors) / terms
        yield from ()  # a stage is a generator, also one that yields nothing
        return metrics

    def _ready(self, batch: Batch, purpose: str, number: int) -> Batch:
        """A whole batch with what its errors are computed with."""
        del purpose, number
        return batch

    def _row_errors(self, batch: Batch) -> list[float]:
        """Sum of the errors of each row under the present weights."""
        policy = self._trainer.modules.modules[POLICY]

        def score(part: Batch) -> list[Any]:
            return [self._algorithm.errors(policy, part).sum(dim=1)]

        found: list[float] = self._trainer.evaluate(batch, score)[0].tolist()
        return found


class CloningWorker(FitStage, ActorWorker):
    """One rank that trains a policy on recorded episodes."""

    def __init__(self, config: BehaviourCloningConfig, context: WorkerContext) -> None:
        super().__init__(cast(Any, config), context)
        self._cloning = config

    def start(self, env_spec: EnvSpec, rendezvous: str | None = None) -> dict[str, Any]:
        """Build policy and trainer; returns the number of parameters, and which recorded actions
        are learnt together; see :attr:`~rlinf.models.policy.Policy.imitated`.

        Args:
            env_spec: What the environments show, and so the episodes.
            rendezvous: :meth:`meeting` of rank 0; None for one rank.

        Raises:
            ConfigError: The policy cannot deal with it, or has no mode to compare with.
        """
        config = self._cloning
        self._algorithm = Supervised(config.objective)
        with told_elsewhere(self._rank > 0):
            policy = config.model.build(env_spec, value_dim=0, seed=config.seed)
        check_objective(policy, config.objective, model=config.model.type, key="objective")
        self._noise = policy.imitation_noise if config.objective == "model" else {}
        self._trainer = Trainer(
            {POLICY: policy},
            self._algorithm,
            config.actor,
            ranks=self._meet(rendezvous) if config.actor.type == "fsdp" else self._replicas(),
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._context.failures,
        )
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        return {"parameters": parameters, "imitated": imitated(policy, config.objective)}

    def _ready(self, batch: Batch, purpose: str, number: int) -> Batch:
        """With noise that depends on the seed and the number of the batch alone, not on the ranks
        that divide it; that of a validation is the same each time."""
        words = (self._cloning.seed, int(purpose == "validation"), number)
        return with_noise(batch, self._noise, words)


class FineTuningWorker(FitStage, LanguageWorker):
    """One rank that trains a language model on texts."""

    _config: FineTuningConfig | WarmStartConfig

    def start(self, rendezvous: str | None = None) -> dict[str, int]:
        """Build the trainer; returns the number of parameters.

        Args:
            rendezvous: :meth:`meeting` of rank 0; None for one rank.
        """
        config, model = self._config, self._build_model()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._algorithm = Supervised()
        self._trainer = policy_trainer(
            model,
            self._algorithm,
            config.actor,
            ranks=self._meet(rendezvous),
            total_steps=config.training_steps,
            seed=config.seed,
            reader=self._picture_reader(),
            section=self.section,
            failure_directory=self._context.failures,
        )
        return {"parameters": parameters}


class WarmStartWorker(FineTuningWorker):
    """The one rank that teaches a model before the first step of a run."""

    section = "warm_start"

    def _build_model(self) -> Any:
        """See :meth:`LanguageWorker._build_model`; refuses an adapter that the model cannot have
        before it is taught."""
        model = super()._build_model()
        if isinstance(self._config, WarmStartConfig) and self._config.adapter is not None:
            peft_settings(model, self._config.adapter)
        return model

    def _write(self, directory: Path) -> None:
        """In float32, whatever number format it was trained in."""
        held = self._trainer.modules.held[POLICY]
        assert isinstance(held, PlainModule)
        held.release_parameters()
        assert isinstance(held.module, TokenScorer)
        save_language_model(held.module.model, directory, tokenizer=self._tokenizer)
        copy_settings(self._source.path, directory)
