"""Trains the weights or an adapter of a language model, on one rank or divided by FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Scores
from rlinf.errors import RunFailure
from rlinf.models.adapters import adapter_file_name, inject_adapters, is_adapter
from rlinf.models.buffers import saved_buffers
from rlinf.trainers.language import lora
from rlinf.trainers.language.checkpoint import load_parts, save_parts
from rlinf.trainers.language.config import FSDPTrainerConfig, SupervisedConfig
from rlinf.trainers.language.core import SequenceCore, global_batches, phase_metrics
from rlinf.trainers.language.export import save_adapter, save_model
from rlinf.trainers.language.failure import batch_keeper
from rlinf.trainers.language.layout import Layout
from rlinf.trainers.language.parallel import Grid, Ranks
from rlinf.trainers.language.protocol import Content, LanguageTrainer
from rlinf.trainers.language.scoring import TokenScorer
from rlinf.trainers.language.supervised import Example, SupervisedTrainer, target_batch
from rlinf.trainers.language.trained import Source, TrainedModule
from rlinf.trainers.skipped import SkippedUpdates, Update

_KL, _RATIO, _COUNT = "first/kl", "first/ratio", "first/tokens"


class FSDPTrainer(LanguageTrainer):
    """See :class:`LanguageTrainer` and :meth:`LanguageTrainerConfig.build`."""

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        config: FSDPTrainerConfig,
        *,
        ranks: Ranks,
        total_steps: int,
        seed: int,
        temperature: float = 1.0,
        failure_directory: Path | None = None,
    ) -> None:
        self._algorithm, self._config = algorithm, config
        self._total_steps, self._seed, self._temperature = total_steps, seed, temperature
        self._skipped = SkippedUpdates(
            bound=config.max_skipped_updates,
            section="actor",
            keep=batch_keeper(failure_directory if ranks.rank == 0 else None, "actor"),
        )
        self._adapter = None
        if config.lora is not None:
            self._adapter = inject_adapters(model, config.lora, seed=seed)
        scorer = TokenScorer(
            model, packing=config.packing, logits_per_chunk=config.logits_per_chunk
        )
        self._model = model
        self._core = SequenceCore(scorer, config, ranks, prefix="actor")
        self._ranks = self._core.ranks
        self._reference = self._keep_reference() if algorithm.needs_reference else None
        self.version = 0
        self._updated_in = -1  # the last phase in which an update was applied

    def _keep_reference(self) -> list[Tensor]:
        """Copies of the weights on the host; none with an adapter, which can be switched off."""
        if self._adapter is not None:
            return []
        return [tensor.to("cpu", copy=True) for tensor in self._core.trained.used()]

    def log_probs(self, batch: Batch, *, temperature: float | None = None) -> Tensor:
        """See :meth:`LanguageTrainer.log_probs`."""
        return self._score(batch, temperature, entropy=False)[0]

    def log_probs_and_entropy(
        self, batch: Batch, *, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`LanguageTrainer.log_probs_and_entropy`."""
        log_probs, entropy = self._score(batch, temperature, entropy=True)
        return log_probs, entropy

    def _score(self, batch: Batch, temperature: float | None, *, entropy: bool) -> list[Tensor]:
        divisor = self._temperature if temperature is None else temperature

        def score(layout: Layout) -> list[Tensor]:
            results = self._core(layout, temperature=divisor, entropy=entropy)
            return [result for result in results if result is not None]

        return self._core.evaluate(batch, score)

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """See :meth:`LanguageTrainer.reference_log_probs`."""
        with self._reference_weights():
            return self.log_probs(batch)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Exchange the weights for those of the reference."""
        if self._reference is None:
            raise RuntimeError("the algorithm asked for no reference policy")
        self._core.need_loaded()
        if self._adapter is not None:
            with lora.without_adapter(self._model):
                yield
            return
        trained = self._core.trained
        used = trained.used()
        with torch.no_grad():
            present = [tensor.clone() for tensor in used]
            _copy(used, self._reference)
            trained.forget_gathered()
            try:
                yield
            finally:
                _copy(used, present)
                trained.forget_gathered()

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """See :meth:`LanguageTrainer.train`."""
        pieces = global_batches(batch, self._config, seed=self._seed, step=step)
        return self.train_stream(pieces, step)

    def train_stream(self, batches: Iterable[Batch], step: int) -> dict[str, float]:
        """See :meth:`LanguageTrainer.train_stream`."""
        factor = self._config.lr_sched.factor(step, self._total_steps)
        updates: list[Update] = []
        if self._algorithm.trains_policy(step):
            for batch in batches:
                # Taken before the update, and known to ranks that join during the phase.
                fresh = self._updated_in != step
                updates.append(self._update(batch, factor=factor, fresh=fresh))
                if updates[-1].outcome == "applied":
                    self._updated_in = step
                self._skipped.note(updates, batch, step=step)
        self.version += 1
        metrics = phase_metrics(updates, prefix="actor")
        metrics["actor/lr"] = self._config.optim.lr * factor
        return metrics

    def _update(self, batch: Batch, *, factor: float, fresh: bool) -> Update:
        """One optimizer step; ``fresh``: the weights are still those of the engine."""
        normalizer = self._algorithm.normalizer(batch)
        compared = fresh and batch.version == self.version

        def loss_of(part: Batch, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
            scored, entropies = self._core(
                layout, temperature=self._temperature, entropy=self._algorithm.needs_entropy
            )
            log_probs = layout.scatter(scored)
            entropy = None if entropies is None else layout.scatter(entropies)
            loss, metrics = self._algorithm.loss(
                Scores(log_probs, entropy), part, normalizer=normalizer
            )
            if compared:
                metrics = metrics | _disagreement(log_probs, part)
            return loss, metrics

        update = self._core.update(
            batch,
            loss_of,
            factor=factor,
            accepts=self._algorithm.accepts,
            check=self._check_first_update if compared else lambda metrics: None,
        )
        for name in (_KL, _RATIO, _COUNT):
            update.metrics.pop(name, None)
        return update

    def _check_first_update(self, metrics: Mapping[str, float]) -> None:
        """Compare the policy that trains with the one that sampled, while their weights are equal.

        Raises:
            RunFailure: They disagree.
        """
        if not metrics[_COUNT]:
            return
        kl, deviation = metrics[_KL] / metrics[_COUNT], metrics[_RATIO] / metrics[_COUNT]
        kl_bound, ratio_bound = self._config.first_update_bounds
        if kl <= kl_bound and deviation <= ratio_bound:
            return
        raise RunFailure(
            "engine and trainer do not compute the same log-probs: over the "
            f"{metrics[_COUNT]:.0f} tokens that the present weights sampled the KL between them is "
            f"{kl:.2e} (bound {kl_bound:.0e}) and ratios are {deviation:.2e} away from 1 on "
            f"average (bound {ratio_bound:.0e})"
        )

    def fine_tune(
        self, config: SupervisedConfig, examples: Sequence[Example], *, seed: int
    ) -> dict[str, float]:
        """See :meth:`LanguageTrainer.fine_tune`."""
        trainer = SupervisedTrainer(self._core, config, seed=seed)
        losses = [metrics["supervised/loss"] for metrics in trainer.fit(target_batch(examples))]
        self._core.trained.restart_optimizer(self._config.optim)
        if self._reference is not None:
            self._reference = self._keep_reference()
        return {"supervised/loss_begin": losses[0], "supervised/loss_end": losses[-1]}

    def weights(self, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
        """See :meth:`LanguageTrainer.weights`."""
        with self._core.loaded("weights") as away:
            self._core.trained.keep_gathered()
            if content == "adapter":
                found = self._adapter_weights()
            elif self._adapter is not None:
                found = chain(self._merged_weights(), saved_buffers(self._model))
            else:
                parameters = self._model.named_parameters()
                whole = ((name, self._whole(parameter)) for name, parameter in parameters)
                found = chain(whole, saved_buffers(self._model))
            for name, tensor in found:
                yield name, tensor.clone() if away else tensor

    def _whole(self, parameter: Tensor) -> Tensor:
        trained = self._core.trained
        return trained.whole(parameter, None if parameter.dtype == trained.dtype else trained.dtype)

    def _adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapter is None:
            raise ValueError("there is no adapter; write a section lora")
        for name, parameter in self._model.named_parameters():
            if is_adapter(name):
                yield adapter_file_name(name), self._whole(parameter)

    def _merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self._config.lora is not None
        layers = lora.adapted_layers(self._model)
        for name, parameter in self._model.named_parameters():
            plain = lora.plain_name(name)
            if plain is None:
                continue
            whole = self._whole(parameter)
            layer = name.removesuffix(".base_layer.weight")
            if layer in layers and layer != name:
                first, second = (
                    self._whole(next(iter(getattr(layers[layer], key).parameters())))
                    for key in ("lora_A", "lora_B")
                )
                whole = lora.merged(whole, first, second, layers[layer].scaling["default"])
            yield plain, whole

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`LanguageTrainer.state_dict`."""
        keep, trained = self._ranks.rank == 0, self._core.trained
        reference = None
        with self._core.loaded() as away:
            if self._reference:
                reference = trained.gather(self._reference, keep=keep, dtype=trained.dtype)
            state: dict[str, Any] = {
                "model": trained.state_dict(keep=keep, copy=away),
                "reference": reference,
                **self._numbers(),
            }
        return state if keep else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`LanguageTrainer.load_state_dict`."""
        with self._core.loaded():
            self._core.trained.load_state_dict(state["model"])
        if self._reference and state["reference"] is not None:
            for name, value in state["reference"].items():
                self._core.trained.fill(name, self._reference, value)
        self._load_numbers(state)

    def save_sharded(self, directory: Path) -> list[Path]:
        """See :meth:`LanguageTrainer.save_sharded`."""
        trained, numbers = self._core.trained, self._numbers()
        with self._core.loaded():
            return save_parts(directory, trained, self._reference, numbers, self._ranks)

    def load_sharded(self, directory: Path) -> None:
        """See :meth:`LanguageTrainer.load_sharded`."""
        with self._core.loaded():
            numbers = load_parts(
                directory, self._core.trained, self._reference, self._numbers(), self._ranks
            )
        self._load_numbers(numbers)

    def _numbers(self) -> dict[str, Any]:
        return {
            "algorithm": self._algorithm.state_dict(),
            "version": self.version,
            "skipped": self._skipped.in_a_row,
        }

    def _load_numbers(self, numbers: Mapping[str, Any]) -> None:
        self._algorithm.load_state_dict(numbers["algorithm"])
        self.version = int(numbers["version"])
        self._skipped.in_a_row = int(numbers["skipped"])

    # -- what lets the number of ranks change ----------------------------------------------------

    @property
    def config(self) -> FSDPTrainerConfig:
        """How it computes."""
        return self._config

    @property
    def parts(self) -> tuple[TrainedModule | None, Source | None]:
        """This rank's weights and moments, and its copies of the reference policy's weights."""
        return self._core.trained, self._reference

    @property
    def keeps_reference(self) -> bool:
        """Whether weights of a reference policy are kept beside those that are trained."""
        return self._algorithm.needs_reference and self._adapter is None

    def numbers_to_join(self) -> dict[str, Any]:
        """Small state that a rank goes on from which joins; see :meth:`adopt`."""
        steps = self._core.trained.optimizer.steps
        return {**self._numbers(), "steps": steps, "updated_in": self._updated_in}

    def adopt(
        self,
        trained: TrainedModule | None,
        reference: Source | None,
        ranks: Grid | None,
        numbers: Mapping[str, Any] | None,
    ) -> None:
        """Go on with other weights and moments, or with none.

        Args:
            trained: They; None: this rank computes nothing until the next call.
            reference: Copies of the reference policy's weights.
            ranks: That divide them; None likewise.
            numbers: From :meth:`numbers_to_join` of another rank, where this one had no weights.
        """
        steps = 0 if self._core.trained is None else self._core.trained.optimizer.steps
        self._core.trained, self._reference = cast(TrainedModule, trained), reference
        self._model = None if trained is None else trained.module.model
        if trained is None or ranks is None:
            return
        self._core.ranks = self._ranks = ranks
        if numbers is not None:
            self._load_numbers(numbers)
            self._updated_in = int(numbers["updated_in"])
            steps = int(numbers["steps"])
        trained.optimizer.steps = steps
        trained.changed()

    def save_pretrained(self, directory: Path) -> None:
        """See :meth:`LanguageTrainer.save_pretrained`."""
        first = self._ranks.rank == 0
        save_model(directory, self._model, self.weights(), write=first)
        if self._adapter is not None:
            adapter = self.weights("adapter")
            save_adapter(directory / "adapter", self._adapter, adapter, write=first)
        self._ranks.barrier()

    def offload(self) -> None:
        """See :meth:`LanguageTrainer.offload`."""
        self._core.trained.offload()

    def onload(self) -> None:
        """See :meth:`LanguageTrainer.onload`."""
        self._core.trained.onload()

    def close(self) -> None:
        """See :meth:`LanguageTrainer.close`."""
        self._reference = None
        self._core.trained.onload()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def _disagreement(log_probs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Sums over the tokens that the present weights sampled; KL by Schulman's k3."""
    fresh = (batch.mask > 0) & (batch.versions == batch.version)
    log_ratio = torch.where(fresh, log_probs - batch.log_probs, 0.0)
    ratio = log_ratio.exp()
    return {
        _KL: (ratio - 1 - log_ratio).sum(),
        _RATIO: (ratio - 1).abs().sum(),
        _COUNT: fresh.sum(),
    }
