"""Trains modules by the losses of an algorithm: policies, critics, Q functions, language models."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.credit import idle_rows
from rlinf.algorithms.protocol import Algorithm, Loss, require_prepared, require_share
from rlinf.algorithms.samples import staleness_metrics
from rlinf.algorithms.supervised import with_noise
from rlinf.checkpoint.weights_file import STATE_SCALING, refuse_unscaled
from rlinf.data.trajectory import Trajectory
from rlinf.errors import CheckpointError, ConfigError, RunFailure
from rlinf.models.adapters import adapt_policy, without_adapters
from rlinf.models.policy import ActionEvaluation, Policy, checkpoint_layers
from rlinf.models.policy_weights import BASE
from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.trainers.export import Content, weights_of
from rlinf.trainers.modules import (
    CRITIC,
    POLICY,
    Average,
    KeptWeights,
    Reference,
    TrainedModules,
)
from rlinf.trainers.packing import Rows
from rlinf.trainers.ranks import Grid, Ranks, Replicas
from rlinf.trainers.trained import Source, TrainedModule
from rlinf.trainers.updates import (
    FirstUpdate,
    SkippedUpdates,
    UntrainedPhases,
    Update,
    phase_metrics,
)

Score = Callable[[Batch], Sequence[Tensor]]
"""From a micro batch to numbers [n, ...] for each of its rows."""

_KL = "actor/approx_kl"
_COPIED_WHOLE_BYTES = 128 << 20
"""Up to here a batch is put in order once for a pass, of which its parts are views: each column
that is picked from takes a while. A larger one, of pictures, is not held twice."""


class Trainer:
    """Applies an algorithm's gradients: epochs, global batches, micro batches, ranks.

    Every rank calls the same methods in the same order with the same batches and gets the same
    results. For each global batch every loss whose modules are all here is one optimizer step of
    these modules, in the order in which the algorithm names the losses.

    Args:
        modules: By the names that losses call them; the same on every rank. ``policy``, if it is
            among them, is called with a batch and gives an
            :class:`~rlinf.algorithms.protocol.Evaluation`. What no loss trains is kept and saved.
        algorithm: Credit and losses.
        config: Sizes, precision, optimizer.
        ranks: Processes that divide the modules, or ranks that hold them whole.
        packing: How a batch becomes micro batches; None: rows in their order.
        optim: Optimizers of modules that have settings of their own; others have ``config.optim``.
        total_steps: Training phases of the run, for the schedule.
        seed: Of the order of rows.
        rows: Rows of a rollout that are trained on, of which more may come; None: all.
        section: Of the config that the policy has; in metrics and messages.
        failure_directory: Where a batch is written that stopped the run; None: nowhere.

    Attributes:
        modules: What holds the modules.
        version: Training phases that were run; number of the present weights.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        ranks: Ranks | Replicas | None = None,
        packing: Rows | None = None,
        optim: Mapping[str, OptimizerConfig] | None = None,
        total_steps: int,
        seed: int,
        rows: int | None = None,
        section: str = "actor",
        failure_directory: Path | None = None,
    ) -> None:
        self._algorithm, self._config = algorithm, config
        self._total_steps, self._seed, self._rows = total_steps, seed, rows
        ranks = ranks or Replicas()
        self._packing = packing or Rows(config.micro_batch_size)
        lora, policy = getattr(config, "lora", None), modules.get(POLICY)
        self._policy = policy if isinstance(policy, Policy) else None
        self._base = None if self._policy is None else self._policy.base
        self._state_scaling = None if self._policy is None else self._policy.state_scaling
        if lora is not None and isinstance(policy, Policy):
            adapt_policy(policy, lora, seed=seed)
        if getattr(config, "gradient_checkpointing", False) and isinstance(policy, Policy):
            checkpoint_layers(policy)
        self._losses = [each for each in algorithm.losses() if modules.keys() >= {*each.parameters}]
        self._prefixes = {
            each.name: section if each.name == POLICY else each.name for each in self._losses
        }
        trained = dict.fromkeys(name for each in self._losses for name in each.parameters)
        self._optim = {name: (optim or {}).get(name, config.optim) for name in trained}
        self.modules = TrainedModules(modules, config, ranks, optim=self._optim)
        self.version = 0
        self._updated_in = -1  # the last phase in which an update was applied
        bounds = getattr(config, "first_update_bounds", None)
        self._first: FirstUpdate | None = None
        if bounds is not None and algorithm.reads_log_probs:
            self._first = FirstUpdate(bounds)
        own = {name: f"{section}.{name}_optim" for name in optim or {}}
        self._skipped = {
            name: SkippedUpdates(
                bound=config.max_skipped_updates,
                section=prefix,
                optim=own.get(name, f"{section if POLICY in modules else prefix}.optim"),
                directory=failure_directory if ranks.rank == 0 else None,
                tells=ranks.rank == 0,
            )
            for name, prefix in self._prefixes.items()
        }
        self._untrained = {
            name: UntrainedPhases(prefix)
            for name, prefix in self._prefixes.items()
            if ranks.rank == 0
        }
        needs_reference = algorithm.needs_reference and POLICY in modules
        self.reference = None
        if needs_reference:
            self.reference = Reference(self.modules, algorithm.reference_weights)
        averages = algorithm.averages and POLICY in modules
        self.average = Average(self.modules) if averages else None

    @property
    def ranks(self) -> Any:
        """Those that hold the modules now."""
        return self.modules.ranks

    @torch.no_grad()
    def evaluate(self, batch: Batch, score: Score) -> list[Tensor]:
        """Numbers of the rows of a whole batch under the present weights, by ``score`` of its micro
        batches on the device; each [N, ...] float32, where the batch lies."""
        self.modules.need_loaded()
        ranks, results = self.ranks, list[Tensor]()
        whole = isinstance(ranks, Replicas)
        rank, size = (0, 1) if whole else (ranks.data_rank, ranks.data_size)
        for indices, part in self._packing.micro_batches(batch, rank, size):
            placed = self._packing.place(part, ranks.device)
            scored = [each.float().to(batch.mask) for each in score(placed)]
            if not results:
                results = [each.new_zeros((len(batch), *each.shape[1:])) for each in scored]
            for result, numbers in zip(results, scored, strict=True):
                result[indices] = numbers[: len(indices)]
        if whole:
            return results
        self.modules.settle()
        return [ranks.sum_data(result) for result in results]

    def log_probs(self, batch: Batch, **options: Any) -> Tensor:
        """Log-probs [N, K] of the terms under the present weights; options go to the policy."""
        policy = self.modules.modules[POLICY]
        return self.evaluate(batch, lambda part: [part.fold(policy(part, **options).log_probs)])[0]

    def values(self, batch: Batch) -> Tensor:
        """Values [N, V] of the critic before each term that counts; 0 where ``mask`` is 0."""
        critic = self.modules.modules[CRITIC]
        return self.evaluate(batch, lambda part: [critic(part)])[0]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs [N, K] under the weights that the run began with; a RuntimeError where the
        algorithm did not ask for them, so that no copy was kept."""
        if self.reference is None:
            raise RuntimeError("the algorithm asked for no reference policy")
        with self.reference.in_place():
            return self.log_probs(batch)

    def learn(
        self,
        rollout: Trajectory | Batch,
        step: int,
        change: Callable[[Batch], Batch] | None = None,
    ) -> dict[str, float]:
        """Prepare a rollout, perhaps ``change`` what came of it, and run a training phase on it;
        the metrics of both.

        Running statistics of a policy's observations are taken afterwards, so that those who act
        and the trainer compute with equal ones.
        """
        batch, metrics = self.prepare(rollout)
        batch = batch if change is None else change(batch)
        metrics.update(self.train(batch, step))
        self.observe(batch.inputs if isinstance(rollout, Batch) else _observed(rollout))
        return metrics

    def observe(self, inputs: Mapping[str, Tensor]) -> None:
        """Let modules that have running statistics of observations take these [N, ...] in."""
        for module in self.modules.modules.values():
            take: Callable[[Mapping[str, Tensor]], None] | None
            take = getattr(module, "update_normalizer", None)
            if take is not None:
                take({name: column.to(self.ranks.device) for name, column in inputs.items()})

    def prepare(self, rollout: Trajectory | Batch) -> tuple[Batch, dict[str, float]]:
        """A rollout as a batch with everything that the losses read; metrics about it."""
        algorithm = self._algorithm
        if isinstance(rollout, Batch):
            found = algorithm.prepare(self.with_log_probs(rollout))
            batch, metrics = require_prepared(found, algorithm)
            return self.with_log_probs(batch), metrics
        stale = bool((rollout.versions != self.version).any())
        if algorithm.needs_present and stale:
            found = algorithm.prepare_stale(rollout, self._present(rollout))
        else:
            found = algorithm.prepare(rollout)
        batch, metrics = require_prepared(found, algorithm)
        if algorithm.needs_present and not stale and self._config.precision.param != "float32":
            # The same weights acted, but batches of another size were rounded otherwise.
            batch = replace(batch, proximal_log_probs=None)
        metrics.update(staleness_metrics(self.version - batch.versions[:, 0]))
        return self.with_log_probs(self._asked(replace(batch, version=self.version))), metrics

    def _acting(self) -> AbstractContextManager[None]:
        """Compute with the weights that act."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _asked(self, batch: Batch) -> Batch:
        """A prepared rollout with what its algorithm asks of the weights that act, of which it
        knows before the first update only."""
        algorithm, modules = self._algorithm, self.modules.modules
        if not algorithm.asked:
            return batch
        policy: Any = modules[POLICY]
        # Other numbers than those that the rollout of this phase was drawn with.
        given = with_noise(batch, policy.imitation_noise, (self._seed, self.version, 0, 1))
        with self._acting():
            found = self.evaluate(given, lambda part: algorithm.ask(modules, part))
        told = dict(zip(algorithm.asked, found, strict=True))
        return replace(batch, inputs={**batch.inputs, **told})

    def _present(self, trajectory: Trajectory) -> ActionEvaluation:
        """A rollout under the present weights, each [T, B, ...]."""
        shape = trajectory.num_steps, trajectory.num_envs
        rows = Batch.of(
            inputs={name: t.flatten(0, 1) for name, t in trajectory.forward_inputs.items()},
            mask=trajectory.valid.flatten().float().unsqueeze(1),
        )
        policy = self.modules.modules[POLICY]

        def score(part: Batch) -> list[Tensor]:
            found = policy(part)
            return [found.log_probs, found.values, found.entropy]

        found = self.evaluate(rows, score)
        return ActionEvaluation(*(each.view(*shape, *each.shape[1:]) for each in found))

    def with_log_probs(self, batch: Batch) -> Batch:
        """A batch with the log-probs that the algorithm needs and that it does not have yet."""
        algorithm = self._algorithm
        if algorithm.needs_proximal and batch.proximal_log_probs is None:
            batch = replace(batch, proximal_log_probs=self.log_probs(batch))
        if algorithm.needs_reference and batch.reference_log_probs is None:
            batch = replace(batch, reference_log_probs=self.reference_log_probs(batch))
        return batch

    def train(self, batches: Batch | Iterable[Batch], step: int) -> dict[str, float]:
        """Run one training phase; the version rises by 1.

        Args:
            batches: A prepared rollout, which is passed over in global batches as the config says;
                or these themselves, each trained on as it arrives.
            step: Number of the phase, from 0.

        Returns:
            Metrics, mean over the optimizer steps.

        Raises:
            RunFailure: Those who act and the trainer disagree about the log-probs of the same
                weights, or too many updates had a loss or gradient that is not finite.
            ConfigError: ``target_kl`` is set, and the loss tells no KL divergence.
        """
        if isinstance(batches, Batch):
            batches = global_batches(
                batches, self._config, seed=self._seed, step=step, rows=self._rows
            )
        factor = self._config.lr_sched.factor(step, self._total_steps)
        self._algorithm.begin_phase(step)
        losses = [
            loss
            for loss in self._losses
            if POLICY not in loss.parameters or self._algorithm.trains_policy(step)
        ]
        updates: dict[str, list[Update]] = {loss.name: [] for loss in self._losses}
        for batch in batches if losses else ():
            for loss in losses:
                updates[loss.name].append(self._update(loss, batch, step=step, factor=factor))
                self._skipped[loss.name].note(updates[loss.name], batch, step=step)
            self.modules.settle()
            self._algorithm.after_update(self.modules.modules)
            if self._is_far(updates):
                break
        self.version += 1
        for name, untrained in self._untrained.items():
            untrained.note(updates[name], step=step)
        metrics = self._metrics(updates, factor)
        if self.average is not None:
            metrics["actor/acting_share"] = self._algorithm.share(step)
            self.average.follow(metrics["actor/acting_share"])
        return metrics

    def _update(self, loss: Loss, batch: Batch, *, step: int, factor: float) -> Update:
        """One optimizer step of a loss on one global batch."""
        batch = self._packing.trained(batch)
        if not len(batch):
            return Update("empty", {})
        modules, normalizer = self.modules.modules, self._algorithm.normalizer(batch)
        # Known also to ranks that join during the phase.
        fresh = POLICY in loss.parameters and self._updated_in != step
        first = self._first if fresh and batch.version == self.version else None
        prefix, ranks = self._prefixes[loss.name], self.ranks

        def share(part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            placed = self._packing.place(part, ranks.device)
            with _outputs_of(modules.get(POLICY) if first else None) as seen:
                found = loss.of(modules, placed, normalizer)
            value, metrics = require_share(found, self._algorithm, loss)
            told = {f"{prefix}/loss": value.detach(), **metrics}
            tokens = self._packing.tokens(part)
            if tokens is not None:
                told[f"{prefix}/tokens"] = value.new_tensor(float(tokens))
            for evaluation in seen[:1]:
                assert first is not None
                told |= first.disagreement(placed.fold(evaluation.log_probs), placed)
            return value, told

        mine = self._packing.micro_batches(batch, ranks.data_rank, ranks.data_size)
        metrics = self.modules.gradients(loss.parameters, [part for _, part in mine], share)
        norms = self.modules.norms(loss.parameters)
        metrics[f"{prefix}/grad_norm"] = sum(norm**2 for norm in norms.values()) ** 0.5
        is_finite = all(map(isfinite, [metrics[f"{prefix}/loss"], *norms.values()]))
        if first is not None:
            first.check(metrics, finite=is_finite)
        if POLICY in loss.parameters and not self._algorithm.accepts(metrics):
            return Update("refused", metrics)
        if not is_finite:
            return Update("skipped", metrics)
        of_policy = POLICY in loss.parameters
        values_alone = of_policy and self._algorithm.trains_values_alone(step)
        self.modules.step(norms, factor=factor, values_alone=values_alone)
        if of_policy:
            self._updated_in = step
        return Update("applied", metrics)

    def _is_far(self, updates: Mapping[str, list[Update]]) -> bool:
        """Whether the policy has moved as far in this phase as it may."""
        target = getattr(self._config, "target_kl", None)
        found = updates[POLICY][-1].metrics if updates.get(POLICY) else {}
        if target is None or not found:
            return False
        if _KL not in found:
            raise ConfigError(
                f"{target:g} is to end a phase by the KL divergence of its updates, and the loss "
                f"of {type(self._algorithm).__name__} tells none; return it among the metrics as "
                f"`{_KL}`, or leave target_kl out",
                key="actor.target_kl",
            )
        return bool(found[_KL] > target)

    def _metrics(self, updates: Mapping[str, list[Update]], factor: float) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for loss in self._losses:
            prefix = self._prefixes[loss.name]
            metrics |= phase_metrics(updates[loss.name], prefix=prefix)
            optim = self._optim[loss.parameters[0]]
            metrics[f"{prefix}/lr"] = optim.lr * factor
            if optim.value_lr is not None:
                metrics["critic/lr"] = optim.value_lr * factor
        if self._first is not None and self._first.kl is not None:
            metrics["actor/first_update_kl"], self._first.kl = self._first.kl, None
        return metrics

    def weights(self, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the policy for those who act, one at a time; every rank must iterate to
        the end.

        Names and shapes are those of the model's own state, a tied tensor comes once, numbers are
        in ``precision.param``. They may be views of what is trained: write or copy them before the
        next phase. ``adapter`` gives an adapter by the names of its file.
        """
        needed = ("weights",) if self.average is None else ()
        with self.modules.loaded(*needed) as away, self._acting():
            for name, tensor in weights_of(self.modules.held[POLICY], content):
                yield name, tensor.clone() if away or self.average is not None else tensor

    @property
    def gives_copies(self) -> bool:
        """Whether :meth:`weights` puts tensors together anew on the device, which may have no room
        for all of them at once."""
        return self.ranks.world_size > 1 or self.modules.offloaded or self.average is not None

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, whole; on ranks other than 0 an empty dict.

        Tensors may share memory with the trainer: write or copy them before the next phase.
        """
        keep = self.ranks.rank == 0
        with self.modules.loaded() as away:
            modules = self.modules.state_dict(keep=keep, copy=away)
            kept = {
                name: None if each is None else each.state_dict(keep=keep, copy=away)
                for name, each in self._kept.items()
            }
        return {"modules": modules, **kept, **self.numbers()} if keep else {}

    @property
    def _kept(self) -> dict[str, KeptWeights | None]:
        """Other weights of the policy, by their names in a checkpoint."""
        return {"reference": self.reference, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, given whole on every rank, from any number of ranks; a
        CheckpointError where the weights are of another model, or the format is an older one."""
        _check_format(state)
        with self.modules.loaded():
            self.modules.load_state_dict(state["modules"])
            for name, each in self._kept.items():
                if each is not None and state.get(name) is not None:
                    each.load_state_dict(state[name])
        self.load_numbers(state)

    def numbers(self) -> dict[str, Any]:
        """What training goes on from beside weights and moments."""
        return {
            "algorithm": self._algorithm.state_dict(),
            "version": self.version,
            "updated_in": self._updated_in,
            "skipped": {name: skipped.in_a_row for name, skipped in self._skipped.items()},
            "values_alone": {
                name: held.optimizer.values_alone for name, held in self.modules.held.items()
            },
            BASE: self._base,
            STATE_SCALING: self._state_scaling,
        }

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from :meth:`numbers`; a CheckpointError where they belong to another base, a
        ConfigError where the policy read states otherwise."""
        base = numbers.get(BASE)
        same = self._base == base if self._policy is None else self._policy.began_from(base)
        if not same:
            raise CheckpointError(
                f"the checkpoint was trained from other weights ({base}) than "
                f"{self._base}, which `model.path` has now; resume with the model of the run"
            )
        refuse_unscaled(
            self._state_scaling, numbers, source="the checkpoint", key="model.proprioception"
        )
        self._algorithm.load_state_dict(numbers["algorithm"])
        self.version = int(numbers["version"])
        self._updated_in = int(numbers["updated_in"])
        for name, skipped in self._skipped.items():
            skipped.in_a_row = int(numbers["skipped"][name])
        # Runs of before stepped everything in each step.
        alone = numbers.get("values_alone", {})
        for name, held in self.modules.held.items():
            held.optimizer.values_alone = int(alone.get(name, 0))

    def save_sharded(self, directory: Path) -> list[Path]:
        """Write the same as :meth:`state_dict` into a directory of this checkpoint alone; each rank
        its own part, of whose files it gives the paths. An OSError is raised on all ranks."""
        with self.modules.loaded():
            return self.modules.save_sharded(directory, self._more())

    def load_sharded(self, directory: Path) -> None:
        """Continue from :meth:`save_sharded`, written by any number of ranks."""
        with self.modules.loaded():
            found = self.modules.load_sharded(directory, self._more())
            for name, each in self._kept.items():
                if each is not None:
                    each.load_parts(found[name])
        self.load_numbers(_numbers_in(found["numbers"]))

    def _more(self) -> dict[str, Any]:
        """Written beside the modules; numbers are text, as their tensors may change shape."""
        file = io.BytesIO()
        torch.save(self.numbers(), file)
        kept = {name: each.parts() for name, each in self._kept.items() if each is not None}
        numbers = base64.b64encode(file.getvalue()).decode()
        return {"reference": {}, **kept, "numbers": numbers}

    @property
    def parts(self) -> tuple[TrainedModule | None, Source | None]:
        """This rank's policy, and its copies of the reference policy's weights."""
        reference = None if self.reference is None else self.reference.weights
        return self.modules.held.get(POLICY), reference

    @property
    def keeps_reference(self) -> bool:
        """Whether weights of a reference policy are kept beside those that are trained."""
        return self.reference is not None and self.reference.keeps

    def numbers_to_join(self) -> dict[str, Any]:
        """Small state that a rank goes on from which joins; see :meth:`adopt`."""
        return {**self.numbers(), "steps": self.modules.held[POLICY].optimizer.steps}

    def adopt(
        self,
        trained: TrainedModule | None,
        reference: Source | None,
        ranks: Grid | None,
        numbers: Mapping[str, Any] | None,
    ) -> None:
        """Go on with another division of the policy, or with none.

        Args:
            trained: It; None: this rank computes nothing until the next call.
            reference: Copies of the reference policy's weights.
            ranks: That divide them; None likewise.
            numbers: From :meth:`numbers_to_join` of another rank, where this one had no weights.
        """
        former = self.modules.held.pop(POLICY, None)
        if self.reference is not None:
            self.reference.weights = reference or []
        if trained is None or ranks is None:
            return
        self.modules.held[POLICY], self.modules.ranks = trained, ranks
        if former is not None:
            trained.optimizer.steps = former.optimizer.steps
            trained.optimizer.values_alone = former.optimizer.values_alone
        if numbers is not None:
            self.load_numbers(numbers)
            trained.optimizer.steps = int(numbers["steps"])
        trained.changed()

    def offload(self) -> None:
        """See :meth:`TrainedModules.offload`."""
        self.modules.offload()

    def onload(self) -> None:
        """Bring everything back, bit for bit."""
        self.modules.onload()

    def close(self) -> None:
        """Give the memory back."""
        self.modules.onload()
        for held in self.modules.held.values():
            held.beside = []
        self.reference = self.average = None


@contextmanager
def _outputs_of(module: nn.Module | None) -> Iterator[list[Any]]:
    """What calls of a module give, in their order; nothing without a module."""
    seen: list[Any] = []
    if module is None:
        yield seen
        return
    handle = module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


def global_batches(
    batch: Batch, config: TrainerConfig, *, seed: int, step: int, rows: int | None = None
) -> Iterator[Batch]:
    """Passes over the rows of a rollout, each in its own order, in phase ``step`` of a run.

    Raises:
        RunFailure: There are fewer than ``rows``, which are trained on; None: all are.
    """
    rows = len(batch) if rows is None else rows
    if len(batch) < rows:
        raise RunFailure(f"the rollout gave {len(batch)} valid samples, {rows} are trained on")
    size, shuffle = config.partition(rows)
    for epoch in range(config.update_epoch):
        if not shuffle:
            yield from batch.select(slice(rows)).split(size)
            continue
        order = row_order(len(batch), seed=seed, step=step, epoch=epoch)[:rows]
        if batch.nbytes <= _COPIED_WHOLE_BYTES:
            yield from batch.select(order).split(size)
            continue
        for chosen in torch.split(order, size):
            yield batch.select(chosen)


def row_order(rows: int, *, seed: int, step: int, epoch: int) -> Tensor:
    """[rows] in the order of one pass."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step * 1009 + epoch) % (1 << 63))
    return torch.randperm(rows, generator=generator)


def _observed(trajectory: Trajectory) -> dict[str, Tensor]:
    """What running episodes showed, [N, ...] each."""
    rows = (trajectory.uninterrupted() & ~idle_rows(trajectory)).flatten()
    inputs = {name: column.flatten(0, 1) for name, column in trajectory.forward_inputs.items()}
    return inputs if bool(rows.all()) else {name: each[rows] for name, each in inputs.items()}


def read_sharded(directory: Path) -> dict[str, Any]:
    """What :func:`saved_weights` reads, and :meth:`Trainer.numbers`, of what
    :meth:`Trainer.save_sharded` wrote: whole, on the CPU, whatever number of ranks wrote it."""
    from rlinf.trainers.checkpoint import read_whole

    names = *(f"modules.{POLICY}.{each}" for each in ("master", "buffers")), "average", "numbers"
    found = read_whole(directory, names)
    policy = {"buffers": {}, **found["modules"][POLICY]}
    numbers = _numbers_in(found.pop("numbers"))
    return {**found, "modules": {POLICY: policy}, **numbers}


def _numbers_in(text: str) -> dict[str, Any]:
    """What a sharded checkpoint holds beside tensors."""
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except (pickle.UnpicklingError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the numbers of a checkpoint cannot be read: {error}") from error
    return found


def saved_weights(state: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Weights and buffers of a module in the state of a trainer that trains all of them; of the
    policy those that act."""
    _check_format(state)
    module, average = state["modules"][name], state.get("average") if name == POLICY else None
    weights = module["master"] if average is None else average["weights"]
    return without_adapters({**weights, **module["buffers"]})


def _check_format(state: Mapping[str, Any]) -> None:
    if "modules" not in state:
        raise CheckpointError(
            "the trainer's state is of an older format, without `modules`; resume it with the "
            "version of rlinf that wrote it"
        )
