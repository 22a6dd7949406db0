"""Supervised fine-tuning: cross entropy on target tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.errors import RunFailure
from rlinf.trainers.language.config import ComputeConfig, SupervisedConfig
from rlinf.trainers.language.core import SequenceCore
from rlinf.trainers.language.layout import Layout
from rlinf.trainers.language.parallel import Ranks
from rlinf.trainers.language.scoring import TokenScorer
from rlinf.trainers.language.trained import PlainModule
from rlinf.trainers.skipped import Update

Example = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt and of its target."""


def target_batch(
    examples: Sequence[Example], learnt: Sequence[Sequence[bool]] | None = None
) -> Batch:
    """Texts of which the targets are to be learnt: terms are their tokens.

    Prompts (at least one token each) are padded on the left and targets on the right, by 0.

    Args:
        examples: The texts.
        learnt: Which tokens of each target are to be learnt; None: all.
    """
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
    return Batch.of(inputs=inputs, mask=mask)


class SupervisedTrainer:
    """Teaches a causal language model texts, with an optimizer of its own.

    Args:
        core: Passes of the model, a :class:`TokenScorer`.
        config: Steps, batch size, optimizer.
        seed: Of the order of the texts.
    """

    def __init__(self, core: SequenceCore, config: SupervisedConfig, *, seed: int) -> None:
        self._core, self._config, self._seed = core, config, seed
        self._updates: list[Update] = []
        core.trained.restart_optimizer(config.optim)

    @classmethod
    def of_model(
        cls,
        model: Any,
        config: SupervisedConfig,
        *,
        seed: int,
        compute: ComputeConfig | None = None,
        ranks: Ranks | None = None,
    ) -> SupervisedTrainer:
        """A trainer of a model alone.

        Args:
            model: Of transformers, trained in place; the same on every rank.
            config: Steps, batch size, optimizer.
            seed: Of the order of the texts.
            compute: Micro batches, precision, packing; its optimizer is not looked at.
            ranks: The processes; None: this one alone.
        """
        compute = compute or ComputeConfig()
        scorer = TokenScorer(
            model, packing=compute.packing, logits_per_chunk=compute.logits_per_chunk
        )
        core = SequenceCore(scorer, compute, ranks or Ranks(), prefix="supervised")
        return cls(core, config, seed=seed)

    def fit(self, texts: Batch) -> Iterator[dict[str, float]]:
        """Train for the configured steps, and give the metrics of each.

        The texts are passed over again and again, each time in another order; a remainder smaller
        than a batch is left out of a pass.
        """
        size = min(self._config.batch_size, len(texts))
        per_pass = len(texts) // size
        for step in range(self._config.steps):
            epoch, number = divmod(step, per_pass)
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(len(texts), generator=generator)
            yield self.step(texts.select(order[number * size : (number + 1) * size]), step)

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        """One optimizer step on the mean cross entropy of the target tokens.

        Args:
            batch: The same on every rank.
            step: Number of the step, from 0, for the schedule.

        Raises:
            RunFailure: Too many steps had a loss or gradient that is not finite.
        """
        factor = self._config.lr_sched.factor(step, self._config.steps)
        tokens = float((batch.mask > 0).sum())

        def loss_of(part: Batch, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
            del part
            return -self._core(layout)[0].sum() / tokens, {}

        update = self._core.update(batch, loss_of, factor=factor)
        self._updates.append(update)
        skipped = sum(each.outcome == "skipped" for each in self._updates)
        if skipped > self._config.max_skipped_updates:
            raise RunFailure(
                f"{skipped} supervised steps had a loss or gradient that is not finite; lower "
                "optim.lr or optim.max_grad_norm"
            )
        own = f"{self._core.prefix}/"
        metrics = {"supervised/" + n.removeprefix(own): v for n, v in update.metrics.items()}
        return metrics | {"supervised/lr": self._config.optim.lr * factor}

    def finish(self) -> None:
        """Give the model its float32 weights back, in memory of their own.

        Raises:
            RuntimeError: The model is divided over ranks.
        """
        trained = self._core.trained
        if not isinstance(trained, PlainModule):
            raise RuntimeError("a model that is divided over ranks stays so")
        trained.release_parameters()
