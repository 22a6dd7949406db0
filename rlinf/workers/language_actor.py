"""Language actor worker: trains a language model on scored groups of completions."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlinf.algorithms.tokens.config import TokenAlgorithmConfig
from rlinf.algorithms.tokens.protocol import TokenBatch
from rlinf.data.prompts.assemble import assemble_sequences
from rlinf.data.sequences import PromptGroup
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import build_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.language.config import (
    CriticTrainerConfig,
    LanguageTrainerConfig,
)
from rlinf.trainers.language.critic import FSDPCritic
from rlinf.trainers.language.parallel import Ranks
from rlinf.trainers.language.protocol import LanguageTrainer
from rlinf.weight_sync.config import WeightSyncConfig
from rlinf.weight_sync.protocol import Parties, WeightSender


@dataclass(frozen=True)
class LanguageActorSetup:
    """What a language actor needs to build its trainer.

    Args:
        model: Directory and number format of the model.
        algorithm: Advantages and loss.
        actor: Trainer of the policy.
        critic: Trainer of the value network, where the algorithm needs one.
        temperature: At which completions are sampled and scored.
        total_steps: Training phases of the run.
        seed: Seed of the run.
        failure_directory: Where a batch is saved that could not be trained on.
        weight_sync: How weights are sent.
        parties: Who sends them, and who receives.
    """

    model: LanguageModelConfig
    algorithm: TokenAlgorithmConfig
    actor: LanguageTrainerConfig
    critic: CriticTrainerConfig | None
    temperature: float
    total_steps: int
    seed: int
    failure_directory: Path
    weight_sync: WeightSyncConfig
    parties: Parties


class LanguageActorWorker(StageWorker):
    """One rank of the trainer of a language model."""

    def __init__(self, setup: LanguageActorSetup) -> None:
        super().__init__()
        self._setup = setup
        self._algorithm = setup.algorithm.build()
        self._critic: FSDPCritic | None = None
        self._trainer: LanguageTrainer
        self._weights: WeightSender[Any] | None = None

    def start(self, rendezvous: str | None = None) -> dict[str, int]:
        """Build the trainer, and the critic if one is needed; returns the number of parameters.

        Args:
            rendezvous: Where the ranks meet, as torch writes it; None for one rank.
        """
        setup = self._setup
        model, self._tokenizer = build_language_model(setup.model, seed=setup.seed)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        ranks = Ranks(
            self._rank,
            self._world_size,
            device="cuda" if torch.cuda.is_available() else "cpu",
            init_method=rendezvous,
        )
        if setup.critic is not None:
            self._critic = setup.critic.build(
                model,
                self._algorithm,
                ranks=ranks,
                total_steps=setup.total_steps,
                seed=setup.seed,
                failure_directory=setup.failure_directory,
            )
        self._trainer = setup.actor.build(
            model,
            self._algorithm,
            ranks=ranks,
            total_steps=setup.total_steps,
            seed=setup.seed,
            temperature=setup.temperature,
            failure_directory=setup.failure_directory,
        )
        if self._rank == 0:
            self._weights = setup.weight_sync.build_sender(self, setup.parties)
        return {"parameters": parameters}

    def train(self, groups: InputStream, *, step: int) -> Generator[Emit, None, dict[str, float]]:
        """Stage: train on the scored groups of all slots; returns the phase's metrics.

        Args:
            groups: Stream of :class:`~rlinf.data.sequences.PromptGroup`; the source of an item is
                the slot of its group.
            step: Number of the training phase.
        """
        begin = time.perf_counter()
        batch, metrics = self._prepared([group for _, group in sorted(_by_slot(groups).items())])
        prepared = time.perf_counter()
        if self._critic is not None:
            metrics.update(self._critic.train(batch, step))
        metrics.update(self._trainer.train(batch, step))
        metrics["time/prepare"] = prepared - begin - groups.seconds_waiting
        metrics["time/update"] = time.perf_counter() - prepared
        yield from ()  # a stage is a generator, also one that yields nothing
        return metrics

    def _prepared(self, groups: Sequence[PromptGroup]) -> tuple[TokenBatch, dict[str, float]]:
        """The batch of some groups with everything that the algorithm needs."""
        batch = token_batch(groups, self._tokenizer.pad_token_id, self._trainer.version)
        algorithm, trainer = self._algorithm, self._trainer
        if algorithm.needs_old_log_probs:
            batch = replace(batch, old_log_probs=trainer.log_probs(batch))
        if algorithm.needs_reference:
            batch = replace(batch, reference_log_probs=trainer.reference_log_probs(batch))
        if self._critic is not None:
            batch = replace(batch, values=self._critic.values(batch))
        return algorithm.prepare(batch)

    def send_weights(self) -> int:
        """Send the weights from rank 0 to every generation worker; returns their version."""
        weights = dict(self._trainer.weights())  # every rank takes part in gathering them
        if self._weights is not None:
            self._weights.send(weights, self._trainer.version)
        return self._trainer.version

    def save_model(self, directory: Path) -> None:
        """Write model and tokenizer in the format of transformers."""
        self._trainer.save_pretrained(directory)
        if self._rank == 0:
            self._tokenizer.save_pretrained(directory)

    def onload(self) -> None:
        """Bring to the device what :meth:`offload` took from it."""
        self._trainer.onload()

    def offload(self) -> None:
        """Free the device until the next training phase."""
        self._trainer.offload()

    def state(self) -> dict[str, Any] | None:
        """Everything that training needs to continue; rank 0 gives it."""
        trainer = self._trainer.state_dict()
        critic = None if self._critic is None else self._critic.state_dict()
        if self._rank > 0:
            return None
        return {
            "trainer": trainer,
            "critic": critic,
            "algorithm": self._algorithm.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._trainer.load_state_dict(state["trainer"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        self._algorithm.load_state_dict(state["algorithm"])

    def close(self) -> None:
        """Give the memory back."""
        if self._weights is not None:
            self._weights.close()
        if hasattr(self, "_trainer"):
            self._trainer.close()


def _by_slot(groups: InputStream) -> dict[int, PromptGroup]:
    return {item.source: item.payload for item in groups}


def token_batch(groups: Sequence[PromptGroup], pad_id: int, version: int) -> TokenBatch:
    """Tensors of scored groups, in their order.

    Args:
        groups: The groups.
        pad_id: Token of the padding.
        version: Of the weights that training begins with.
    """
    arrays = assemble_sequences(groups, pad_id=pad_id)
    names = (
        "input_ids", "attention_mask", "mask", "rollout_log_probs", "rewards", "groups",
        "versions", "truncated", "valid",
    )  # fmt: skip
    tensors = {name: torch.from_numpy(getattr(arrays, name)) for name in names}
    return TokenBatch(**tensors, version=version)
