"""Fit workers: ranks that are trained on what a source hands out."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.supervised import Supervised
from rlinf.checkpoint.manifest import FileRecord
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError, in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import build_language_model
from rlinf.models.policy import Policy
from rlinf.models.registry import build_policy
from rlinf.trainers.modules import POLICY
from rlinf.trainers.ranks import Replicas
from rlinf.trainers.sequences import policy_trainer, save_pretrained
from rlinf.trainers.trainer import Trainer
from rlinf.workers.actor import ActorWorker
from rlinf.workers.context import WorkerContext
from rlinf.workers.supervised_config import BehaviourCloningConfig, FineTuningConfig
from rlinf.workers.training_ranks import TrainingWorker, write_parts


class FitStage(StageWorker):
    """What fits: one global batch per step, and the loss on what validates."""

    _trainer: Trainer
    _algorithm: Supervised

    def fit(
        self, batches: InputStream, held_out: InputStream, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: train on the global batch of a step; returns its metrics.

        Args:
            batches: One :class:`~rlinf.algorithms.batch.Batch`.
            held_out: Batches that are not trained on, of which the loss is computed afterwards;
                most steps have none.
            step: Number of the step, from 0.
        """
        batch: Batch = next(batches).payload
        metrics = self._trainer.train([batch.to(self.compute_device)], step)
        policy = self._trainer.modules.modules[POLICY]
        if isinstance(policy, Policy):
            policy.update_normalizer(batch.to(self.compute_device).inputs)
        errors, terms = list[float](), 0.0
        for item in held_out:
            seen: Batch = item.payload
            errors += self._row_errors(seen.to(self.compute_device))
            terms += float((seen.mask > 0).sum())
        metrics["train/loss"] = metrics["actor/loss"]
        metrics["train/terms"] = float((batch.mask > 0).sum())
        if terms:
            # The exact sum: in which batches the rows came changes nothing.
            metrics["validation/loss"] = math.fsum(errors) / terms
        yield from ()  # a stage is a generator, also one that yields nothing
        return metrics

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

    def start(self, env_spec: EnvSpec) -> dict[str, int]:
        """Build policy and trainer; returns the number of parameters.

        Args:
            env_spec: What was recorded.

        Raises:
            ConfigError: The policy cannot deal with it, or has no mode to compare with.
        """
        config = self._cloning
        self._algorithm = Supervised(config.objective)
        policy = build_policy(config.model, env_spec, value_dim=0, seed=config.seed)
        if config.objective == "squared_error" and not hasattr(policy, "mode"):
            raise ConfigError(
                f"a policy of type {config.model.type} has no mode in closed form; nearest: "
                "likelihood",
                key="objective",
            )
        self._trainer = Trainer(
            {POLICY: policy},
            self._algorithm,
            config.actor,
            ranks=Replicas(
                self._rank,
                self._world_size,
                device=self.compute_device,
                all_reduce=self._all_reduce if self._world_size > 1 else None,
            ),
            total_steps=config.training_steps,
            seed=config.seed,
        )
        return {"parameters": sum(parameter.numel() for parameter in policy.parameters())}


class FineTuningWorker(FitStage, TrainingWorker):
    """One rank that trains a language model on texts."""

    def __init__(self, config: FineTuningConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context

    def start(self, rendezvous: str | None = None) -> dict[str, int]:
        """Build the trainer; returns the number of parameters.

        Args:
            rendezvous: :meth:`meeting` of rank 0; None for one rank.
        """
        config = self._config
        with in_section("model"):
            source = self._context.model or config.model
            model, self._tokenizer = build_language_model(source, seed=config.seed)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._algorithm = Supervised()
        self._trainer = policy_trainer(
            model,
            self._algorithm,
            cast(Any, config.actor),
            ranks=cast(Any, self._meet(rendezvous)),
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._context.failures,
        )
        return {"parameters": parameters}

    def save_model(self, directory: Path) -> None:
        """Write model and tokenizer in the format of transformers."""
        save_pretrained(self._trainer, directory)
        if self._rank == 0:
            self._tokenizer.save_pretrained(directory)

    def onload(self) -> None:
        """Bring to the device what :meth:`offload` took from it."""
        self._trainer.onload()

    def offload(self) -> None:
        """Free the device until the next step."""
        self._trainer.offload()

    def state(self, *, whole: bool = True) -> dict[str, Any] | None:
        """Everything that training needs to continue; rank 0 gives it.

        Args:
            whole: The trainer's state, gathered; otherwise :meth:`save_parts` writes it.
        """
        trainer = self._trainer.state_dict() if whole else None
        return {"trainer": trainer} if self._rank == 0 else None

    def save_parts(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Write this rank's part of the trainer's state into the directory of a checkpoint."""
        return write_parts(self._trainer.save_sharded, checkpoint, "actor")

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from :meth:`state`.

        Args:
            state: What it gave.
            checkpoint: Where :meth:`save_parts` wrote, if it did.
        """
        if state["trainer"] is not None:
            self._trainer.load_state_dict(state["trainer"])
        else:
            assert checkpoint is not None
            self._trainer.load_sharded(checkpoint / "actor")

    def close(self) -> None:
        """Give the memory back, and leave the other ranks."""
        if hasattr(self, "_trainer"):
            self._trainer.close()
        self._leave()
