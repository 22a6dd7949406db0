"""Trainers of language models: the policy, its critic, and texts that are to be learnt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.algorithms.batch import Batch, Shared
from rlinf.algorithms.protocol import Algorithm
from rlinf.data.pictures import PictureReader, Pictures, copy_settings
from rlinf.models.adapters import inject_adapters
from rlinf.trainers.config import (
    CriticTrainerConfig,
    PolicyTrainerConfig,
    SequenceConfig,
)
from rlinf.trainers.export import save_adapter, save_model
from rlinf.trainers.modules import CRITIC, POLICY
from rlinf.trainers.packing import Sequences
from rlinf.trainers.ranks import Ranks
from rlinf.trainers.scoring import ScoringModel, TokenScorer, ValueScorer
from rlinf.trainers.trainer import Trainer

Tokens = Sequence[int] | np.ndarray
Example = tuple[Tokens, Tokens]
"""Tokens of a prompt and of its target."""


def policy_trainer(
    model: Any,
    algorithm: Algorithm,
    config: PolicyTrainerConfig,
    *,
    ranks: Ranks,
    total_steps: int,
    seed: int,
    temperature: float = 1.0,
    reader: PictureReader | None = None,
    section: str = "actor",
    failure_directory: Path | None = None,
) -> Trainer:
    """The trainer of a causal language model of transformers, which is trained in place; further
    arguments are those of :class:`Trainer`, the temperature at which sequences are sampled, and
    what reads the pictures of prompts.
    ``seed`` is also that of a fresh adapter."""
    adapter = None
    if config.lora is not None:
        adapter = inject_adapters(model, config.lora, seed=seed)
    scorer = TokenScorer(
        model,
        packing=config.packing,
        logits_per_chunk=config.logits_per_chunk,
        reader=reader,
        temperature=temperature,
        entropy=algorithm.needs_entropy,
        adapter=adapter,
    )
    return Trainer(
        {POLICY: _ready(scorer, config)},
        algorithm,
        config,
        ranks=ranks,
        packing=Sequences(config),
        total_steps=total_steps,
        seed=seed,
        section=section,
        failure_directory=failure_directory,
    )


def critic_trainer(
    model: Any,
    algorithm: Algorithm,
    config: CriticTrainerConfig,
    *,
    ranks: Ranks,
    total_steps: int,
    seed: int,
    reader: PictureReader | None = None,
    failure_directory: Path | None = None,
) -> Trainer:
    """The trainer of a value network on the layers of a causal language model, which are copied."""
    # Where there are several ranks, they read the weights and leave them as they are.
    kept = model.parameters() if ranks.world_size > 1 else ()
    shared: dict[int, Any] = {id(parameter): parameter for parameter in kept}
    backbone = copy.deepcopy(model.base_model, shared)
    scorer = ValueScorer(backbone, packing=config.packing, reader=reader)
    return Trainer(
        {CRITIC: _ready(scorer, config)},
        algorithm,
        config,
        ranks=ranks,
        packing=Sequences(config),
        total_steps=total_steps,
        seed=seed,
        failure_directory=failure_directory,
    )


def _ready(scorer: ScoringModel, config: SequenceConfig) -> ScoringModel:
    scorer.eval()
    if config.gradient_checkpointing:
        scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
        scorer.train()
    return scorer


def text_batch(
    examples: Sequence[Example],
    learnt: Sequence[Sequence[bool]] | None = None,
    pictures: Sequence[Pictures] | None = None,
) -> Batch:
    """Pad prompts (at least one token each) on the left and targets on the right, by 0; ``learnt``
    says which tokens of each target count, None: all. ``pictures`` are those of each prompt."""
    prompts, targets = zip(*examples, strict=True)
    window, length = max(map(len, prompts)), max(map(len, targets))
    ids = np.zeros((len(prompts), window + length), np.int64)
    attended = np.zeros(ids.shape, np.bool_)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        columns = slice(window - len(prompt), window + len(target))
        ids[row, columns] = np.concatenate([np.asarray(prompt), np.asarray(target)])
        attended[row, columns] = True
    mask = torch.from_numpy(attended[:, window:].astype(np.float32))
    for row, wanted in enumerate(learnt or ()):
        mask[row, : len(wanted)] *= torch.tensor(wanted)
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(attended)}
    return Batch.of(inputs=inputs, mask=mask, pictures=shared_pictures(pictures or ()))


def shared_pictures(of_prompts: Sequence[Pictures], times: Sequence[int] = ()) -> Shared | None:
    """Pictures of rows from those of prompts, of which each has so many rows, or one; None: there
    are none."""
    if not any(of_prompts):
        return None
    index = np.repeat(np.arange(len(of_prompts)), times if len(times) else 1)
    return Shared(torch.from_numpy(index), tuple(of_prompts))


def save_pretrained(
    trainer: Trainer, directory: Path, tokenizer: Any = None, base: Path | None = None
) -> None:
    """Write the policy with its tokenizer in the format of transformers, and what its ``base`` says
    of pictures; an adapter is merged into it, and saved alone in the subdirectory ``adapter``. All
    ranks take part."""
    first = trainer.ranks.rank == 0
    scorer = trainer.modules.held[POLICY].module
    assert isinstance(scorer, TokenScorer)
    save_model(directory, scorer.model, trainer.weights(), write=first)
    if scorer.adapter is not None:
        weights = trainer.weights("adapter")
        save_adapter(directory / "adapter", scorer.adapter, weights, write=first)
    if first and tokenizer is not None:
        tokenizer.save_pretrained(directory)
        copy_settings(base, directory)
    trainer.ranks.barrier()
