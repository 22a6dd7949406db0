"""What policy, critic and supervised training share: passes over batches, divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.algorithms.batch import Batch
from rlinf.trainers.language.batching import MicroBatchRule, plan_micro_batches
from rlinf.trainers.language.config import ComputeConfig, PhaseConfig
from rlinf.trainers.language.layout import Layout, layout_of, lengths_of, prompts_of
from rlinf.trainers.language.parallel import Grid, Ranks
from rlinf.trainers.language.trained import PlainModule, TrainedModule
from rlinf.trainers.skipped import Update

LossOf = Callable[[Any, Layout], tuple[Tensor, dict[str, Tensor]]]
"""From a micro batch and its layout to its share of the loss and of the metrics."""


class SequenceCore:
    """A scoring module, how it is divided over ranks, and passes over batches.

    Args:
        module: Gives numbers for scored tokens; ``module.model`` is of transformers. It lies on the
            host, and where there are several ranks it is never whole on a device.
        config: How it computes.
        ranks: The processes.
        prefix: Of the metrics.
    """

    def __init__(self, module: Any, config: ComputeConfig, ranks: Ranks, *, prefix: str) -> None:
        config.check_ranks(ranks.world_size)
        self.config, self.prefix = config, prefix
        self.ranks = Grid(ranks, config.tensor_parallel_size)
        module.eval()
        if config.gradient_checkpointing:
            module.model.gradient_checkpointing_enable({"use_reentrant": False})
            module.train()
        self.trained = self._divide(module)

    def _divide(self, module: Any) -> TrainedModule:
        if self.ranks.world_size == 1:
            return PlainModule(module.to(self.ranks.device), self.config)
        # Imports a good deal that one rank does not need.
        from rlinf.trainers.language.sharded import ShardedModule

        return ShardedModule(module, repeated_layers(module.model), self.config, self.ranks)

    def __call__(self, layout: Layout, **options: Any) -> Any:
        """A forward pass."""
        return self.trained.module(layout, **options)

    @torch.no_grad()
    def evaluate(self, batch: Batch, score: Callable[[Layout], Sequence[Tensor]]) -> list[Tensor]:
        """Numbers of scored tokens for a whole batch.

        Args:
            batch: N sequences, the same on every rank.
            score: From a layout to one or more [M].

        Returns:
            One [N, L] float32 on the CPU for each, 0 where ``mask`` is 0.
        """
        self.need_loaded()
        results: list[Tensor] = []
        for indices, part in self._micro_batches(batch):
            layout = self._layout(part)
            scored = [layout.scatter(numbers).float().cpu() for numbers in score(layout)]
            results = results or [torch.zeros(batch.mask.shape) for _ in scored]
            for result, numbers in zip(results, scored, strict=True):
                result[indices] = numbers[: len(indices)]
        if self.ranks.world_size > 1:
            self.trained.changed()
        return [self.ranks.sum_data(result) for result in results]

    def update(
        self,
        batch: Batch,
        loss_of: LossOf,
        *,
        factor: float,
        accepts: Callable[[Mapping[str, float]], bool] = lambda metrics: True,
        check: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> Update:
        """One optimizer step on one global batch.

        Args:
            batch: The same on every rank.
            loss_of: Shares of loss and metrics of a micro batch, to be summed.
            factor: Of the learning rate.
            accepts: Whether the algorithm wants a step with such metrics, finite or not.
            check: Raises for finite metrics that say that something is wrong.
        """
        self.need_loaded()
        trained_rows = (batch.mask > 0).any(dim=1)
        if not bool(trained_rows.any()):
            return Update("empty", {})
        if not bool(trained_rows.all()):
            batch = batch.select(trained_rows)
        self.trained.discard_gradients()
        metrics = self._gradients(batch, loss_of)
        norm = self.trained.gradient_norm()
        metrics[f"{self.prefix}/grad_norm"] = norm
        finite = isfinite(norm) and isfinite(metrics[f"{self.prefix}/loss"])
        if finite:
            check(metrics)
        if not accepts(metrics):
            return Update("refused", metrics)
        if not finite:
            return Update("skipped", metrics)
        self.trained.apply_step(norm=norm, factor=factor)
        return Update("applied", metrics)

    def _gradients(self, batch: Batch, loss_of: LossOf) -> dict[str, float]:
        """Add up the gradients of a global batch; its metrics."""
        totals: Tensor | None = None
        names: list[str] = []
        micro_batches = self._micro_batches(batch)
        for number, (_, part) in enumerate(micro_batches, start=1):
            layout = self._layout(part)
            loss, shares = loss_of(part.to(self.ranks.device), layout)
            self.trained.backward(loss, last=number == len(micro_batches))
            shares = {f"{self.prefix}/loss": loss.detach()} | shares
            names = list(shares)
            tokens = torch.tensor(float(layout.tokens), device=self.ranks.device)
            stacked = torch.stack([tokens, *(share.detach() for share in shares.values())]).double()
            totals = stacked if totals is None else totals + stacked
        assert totals is not None
        tokens, *sums = self.ranks.sum_data(totals).tolist()
        metrics = dict(zip(names, sums, strict=True))
        metrics[f"{self.prefix}/tokens"] = tokens
        return metrics

    def _layout(self, batch: Batch) -> Layout:
        return layout_of(batch, packing=self.config.packing, device=self.ranks.device)

    def _micro_batches(self, batch: Batch) -> list[tuple[list[int], Batch]]:
        """This rank's micro batches; an empty one holds a sequence of which nothing counts."""
        config = self.config
        rule = MicroBatchRule(
            sequences=config.micro_batch_size,
            tokens=config.max_tokens_per_micro_batch,
            padded=not config.packing,
        )
        plan = plan_micro_batches(
            lengths_of(batch),
            prompts=prompts_of(batch),
            ranks=self.ranks.data_size,
            balance=config.balance,
            rule=rule,
        )
        mine = plan[self.ranks.data_rank]
        return [(indices, _select(batch, indices)) for indices in mine]

    @contextmanager
    def loaded(self, *kinds: str) -> Iterator[bool]:
        """Bring back what is offloaded, or some of it, for a moment; whether anything was."""
        away = self.trained.offloaded
        if away:
            self.trained.onload(*kinds)
        try:
            yield away
        finally:
            if away:
                self.trained.offload()

    def need_loaded(self) -> None:
        """Refuse to compute with what is not there.

        Raises:
            RuntimeError: Something is offloaded.
        """
        if self.trained.offloaded:
            raise RuntimeError("weights, gradients or optimizer are offloaded; call onload first")


def _select(batch: Batch, indices: list[int]) -> Batch:
    if indices:
        whole = indices == list(range(len(batch)))
        return batch if whole else batch.select(torch.tensor(indices))
    filler = batch.select(torch.tensor([0]))
    return replace(filler, mask=torch.zeros_like(filler.mask))


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules in a model: its layers."""
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=[])


def global_batches(batch: Batch, config: PhaseConfig, *, seed: int, step: int) -> Iterator[Batch]:
    """The global batches of a phase: passes over the sequences, each in its own order."""
    size = ceil(len(batch) / config.n_minibatches)
    for epoch in range(config.update_epoch):
        order = torch.arange(len(batch))
        if config.shuffle and size < len(batch):
            generator = torch.Generator().manual_seed(
                (seed * 1_000_003 + step * 1009 + epoch) % (1 << 63)
            )
            order = torch.randperm(len(batch), generator=generator)
        for chosen in torch.split(order, size):
            yield batch if len(chosen) == len(batch) else batch.select(chosen)


def phase_metrics(updates: Sequence[Update], *, prefix: str) -> dict[str, float]:
    """Mean over the optimizer steps of a phase that had something to train on; counts."""
    full = [update.metrics for update in updates if update.metrics]
    names = full[0] if full else {}
    metrics = {name: sum(each[name] for each in full) / len(full) for name in names}
    for outcome, name in (
        ("applied", "optimizer_steps"),
        ("skipped", "skipped_updates"),
        ("refused", "refused_updates"),
        ("empty", "empty_updates"),
    ):
        metrics[f"{prefix}/{name}"] = float(sum(update.outcome == outcome for update in updates))
    return metrics
