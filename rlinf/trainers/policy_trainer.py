"""Applies an algorithm's gradients to a policy: epochs, global batches, micro batches, ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Evaluation
from rlinf.algorithms.staleness import staleness_metrics
from rlinf.checkpoint.compatibility import check_compatible
from rlinf.data.trajectory import Trajectory
from rlinf.errors import RunFailure
from rlinf.models.policy import ActionEvaluation, Policy
from rlinf.trainers.config import ActorConfig
from rlinf.trainers.flat_parameters import FlatParameters
from rlinf.trainers.optimizer import VectorAdamW, parameter_groups
from rlinf.trainers.reduction import block_of, tree_sum
from rlinf.trainers.skipped import SkippedUpdates, Update

_KL, _FAR, _COUNT = "first/kl", "first/far", "first/count"

AllReduce = Callable[[torch.Tensor], torch.Tensor]


class PolicyTrainer:
    """Trains a policy on trajectories.

    Every rank holds the whole policy, the whole batch's order and the same random state; a rank
    computes the gradients of its own block of micro batches.

    Args:
        policy: The network; its parameters are updated in place.
        algorithm: Advantages and loss.
        config: Batch sizes and optimizer.
        samples: Valid samples that one rollout trains on; a multiple of ``global_batch_size``.
        total_steps: Training phases of the run, for the schedule.
        seed: Seed of the order of samples.
        rank: Data-parallel rank.
        world_size: Data-parallel ranks.
        all_reduce: Sums a tensor over the ranks in rank order (:func:`sum_ranks`).
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        config: ActorConfig,
        *,
        samples: int,
        total_steps: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.policy = policy
        self._algorithm = algorithm
        self._config = config
        self._samples = samples
        self._total_steps = total_steps
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._all_reduce = all_reduce
        self._first_kl: float | None = None
        self._skipped = SkippedUpdates(bound=config.max_skipped_updates, section="actor")
        self._reference = copy.deepcopy(policy).eval() if algorithm.needs_reference else None
        self._flat = FlatParameters(parameter_groups(policy, policy.value_parameters()))
        self._optimizer = VectorAdamW(self._flat.vectors, config.optim)
        self._device = self._flat.vectors[0].device

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward and backward pass."""
        config = self._config
        return config.micro_batch_size or config.global_batch_size // self._world_size

    def train(
        self, trajectory: Trajectory, step: int, *, version: int | None = None
    ) -> dict[str, float]:
        """Run one training phase.

        Args:
            trajectory: All environments of the rollout, in order of their numbers.
            step: Number of the phase, from 0.
            version: Number of the present weights; None: they acted in the whole rollout.

        Returns:
            Metrics of the phase, equal on every rank.

        Raises:
            RunFailure: If the policy that trains does not compute the log-probs of the one that
                acted where it is the same, or if too many updates had a loss or gradient that is
                not finite.
        """
        trajectory = trajectory.to(self._device)
        factor = self._config.lr_sched.factor(step, self._total_steps)
        self._optimizer.set_factor(factor)
        present = self._present(trajectory, version) if self._algorithm.needs_present else None
        batch, metrics = (
            self._algorithm.prepare(trajectory)
            if present is None
            else self._algorithm.prepare_stale(trajectory, present)
        )
        if version is not None:
            batch = replace(batch, version=version)
            metrics.update(staleness_metrics(version - batch.versions[:, 0]))
        if self._reference is not None:
            batch = replace(batch, reference_log_probs=self._reference_log_probs(batch))
        updates: list[Update] = []
        for epoch in range(self._config.update_epoch):
            if not self._epoch(batch, step, epoch, updates):
                break
        self.policy.update_normalizer(batch.inputs)
        metrics.update(_mean_metrics(updates))
        if self._first_kl is not None:
            metrics["actor/first_update_kl"] = self._first_kl
        metrics["actor/lr"] = self._config.optim.lr * factor
        for outcome, name in (("applied", "optimizer_steps"), ("skipped", "skipped_updates")):
            metrics[f"actor/{name}"] = float(sum(u.outcome == outcome for u in updates))
        return metrics

    def _reference_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probs of the samples' actions under the reference, shaped as those of the batch."""
        assert self._reference is not None
        found = self._evaluate(self._reference, batch.inputs, len(batch))
        return batch.fold(found.log_probs)

    def _present(self, trajectory: Trajectory, version: int | None) -> ActionEvaluation | None:
        """A rollout under the present weights; None where they acted in all of it."""
        if version is None or bool((trajectory.versions == version).all()):
            return None
        rows = trajectory.num_steps, trajectory.num_envs
        flat = {name: t.flatten(0, 1) for name, t in trajectory.forward_inputs.items()}
        found = self._evaluate(self.policy, flat, rows[0] * rows[1])
        return ActionEvaluation(
            **{each.name: getattr(found, each.name).unflatten(0, rows) for each in fields(found)}
        )

    @torch.no_grad()
    def _evaluate(
        self, policy: Policy, forward_inputs: Mapping[str, torch.Tensor], count: int
    ) -> ActionEvaluation:
        """Stored actions [count, ...] under a policy, in micro batches."""
        size = self.micro_batch_size
        parts = [
            policy.evaluate_actions({k: t[i : i + size] for k, t in forward_inputs.items()})
            for i in range(0, count, size)
        ]
        return ActionEvaluation(
            **{
                each.name: torch.cat([getattr(part, each.name) for part in parts])
                for each in fields(ActionEvaluation)
            }
        )

    def _epoch(self, batch: Batch, step: int, epoch: int, updates: list[Update]) -> bool:
        """Pass once over the samples; False ends the phase early."""
        shuffled = batch.select(self._order(len(batch), step, epoch))
        for global_batch in shuffled.split(self._config.global_batch_size):
            update = self._update(global_batch, first=not updates)
            updates.append(update)
            self._skipped.note(updates, global_batch, step=step)
            target = self._config.target_kl
            if target is not None and update.metrics["actor/approx_kl"] > target:
                return False
        return True

    def _order(self, available: int, step: int, epoch: int) -> torch.Tensor:
        """The samples of one epoch, shuffled; a surplus from a topped-up rollout is left out."""
        if available < self._samples:
            raise RunFailure(
                f"the rollout gave {available} valid samples, {self._samples} are trained on"
            )
        generator = torch.Generator().manual_seed(
            (self._seed * 1_000_003 + step * 1009 + epoch) % (1 << 63)
        )
        return torch.randperm(available, generator=generator)[: self._samples]

    def _update(self, batch: Batch, *, first: bool) -> Update:
        """One optimizer step on one global batch."""
        count = math.ceil(len(batch) / self.micro_batch_size)
        normalizer = self._algorithm.normalizer(batch)
        micro_batches = batch.split(self.micro_batch_size)
        first_micro, last_micro = block_of(self._rank, self._world_size, count)
        names: list[str] = []

        def leaf(index: int) -> torch.Tensor:
            """Gradient of one micro batch with its metrics behind it, as one vector."""
            micro = micro_batches[index]
            evaluation = self.policy.evaluate_actions(micro.inputs)
            loss, metrics = self._algorithm.loss(evaluation, micro, normalizer=normalizer)
            if first:
                metrics = metrics | self._disagreement(evaluation, micro)
            names[:] = metrics
            summed = torch.stack([metrics[name].detach() for name in names])
            return torch.cat([self._flat.gradient(loss), summed])

        total = tree_sum(first_micro, last_micro, leaf)
        if self._all_reduce is not None:
            total = self._all_reduce(total)
        metrics = dict(zip(names, total[-len(names) :].tolist(), strict=True))
        if first:
            self._check_first_update(metrics)
        return self._apply(total[: -len(names)], metrics)

    @torch.no_grad()
    def _disagreement(self, evaluation: Evaluation, batch: Batch) -> dict[str, torch.Tensor]:
        """Sums over the samples of the weights that train; KL by Schulman's k3."""
        log_ratio = batch.fold(evaluation.log_probs) - batch.log_probs
        staleness = batch.staleness()
        if staleness is not None:
            log_ratio = log_ratio[staleness == 0]
        ratio = log_ratio.exp()
        near = (ratio - 1).abs() <= self._config.first_update_ratio_bound
        return {
            _KL: (ratio - 1 - log_ratio).sum(),
            _FAR: (~near).sum(),  # also what is no number
            _COUNT: torch.tensor(float(ratio.numel()), device=ratio.device),
        }

    def _check_first_update(self, metrics: dict[str, float]) -> None:
        """Compare the policy that trains with the one that acted, where their weights are equal.

        Args:
            metrics: Of the first update of a phase; the sums of the comparison are taken out.

        Raises:
            RunFailure: They disagree.
        """
        kl, far, count = (metrics.pop(name) for name in (_KL, _FAR, _COUNT))
        self._first_kl = kl / count if count else None
        config = self._config
        if self._first_kl is None or (self._first_kl <= config.first_update_kl_bound and not far):
            return
        raise RunFailure(
            "rollout and trainer do not compute the same log-probs: in the first update after a "
            f"weight synchronisation the KL between them is {self._first_kl:.2e} (bound "
            f"{config.first_update_kl_bound:.0e}), and {far:.0f} of {count:.0f} ratios are further "
            f"than {config.first_update_ratio_bound:.0e} away from 1"
        )

    def _apply(self, gradient: torch.Tensor, metrics: dict[str, float]) -> Update:
        """Clip and apply a flat gradient; skipped where it is not finite."""
        norm = torch.linalg.vector_norm(gradient)
        metrics["actor/grad_norm"] = norm.item()
        if not math.isfinite(metrics["actor/grad_norm"]):
            return Update("skipped", metrics)
        limit = self._config.optim.max_grad_norm
        if limit is not None and metrics["actor/grad_norm"] > limit:
            gradient = gradient * (limit / (norm + 1e-6))
        self._optimizer.step(self._flat.by_group(gradient))
        return Update("applied", metrics)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and the algorithm's running statistics."""
        return {
            "policy": _on_host(self.policy.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "algorithm": self._algorithm.state_dict(),
            "reference": (
                None if self._reference is None else _on_host(self._reference.state_dict())
            ),
            "skipped": self._skipped.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            CheckpointError: The weights are of another model.
        """
        check_compatible(self.policy.state_dict(), state["policy"])
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._algorithm.load_state_dict(state["algorithm"])
        if self._reference is not None:
            self._reference.load_state_dict(state["reference"])
        self._skipped.in_a_row = int(state["skipped"])


def _on_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def _mean_metrics(updates: list[Update]) -> dict[str, float]:
    """Mean over the optimizer steps of a phase."""
    names = updates[0].metrics
    return {name: sum(u.metrics[name] for u in updates) / len(updates) for name in names}
