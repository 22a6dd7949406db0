"""What an algorithm offers to the trainer, and the data that passes between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from rlinf.data.trajectory import Trajectory


class Evaluation(Protocol):
    """Stored actions under the present weights, as a policy returns it."""

    @property
    def log_probs(self) -> Tensor:
        """[N, C, A]."""

    @property
    def values(self) -> Tensor:
        """[N, V]."""

    @property
    def entropy(self) -> Tensor:
        """[N, C, A], in nats."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """N samples (chunk steps) to train on, time and environments flattened.

    Args:
        forward_inputs: Each [N, ...]; input of :meth:`Policy.evaluate_actions`.
        log_probs: Behaviour log-probs at the level of ``logprob_type``: [N, C, A], [N, C] or
            [N, 1].
        advantages: Of a shape that broadcasts to ``log_probs``.
        returns: [N, V] value targets; None without a critic.
        values: [N, V] of the critic that acted; None without a critic.
        weights: [N] weight of each sample in the loss, 0 for a sample that is not trained on; None
            where all are 1.
        versions: [N] weight version that acted.
        reference_log_probs: Log-probs under the reference policy, shaped as ``log_probs``; None
            without a reference.
        proximal_log_probs: Log-probs under the weights that the training phase began with, shaped
            as ``log_probs``; None where the algorithm does not need them.
        staleness: [N] int64, training phases between the weights that acted and those that the
            phase began with; None before the trainer knows.
    """

    forward_inputs: Mapping[str, Tensor]
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor | None
    values: Tensor | None
    weights: Tensor | None
    versions: Tensor
    reference_log_probs: Tensor | None = None
    proximal_log_probs: Tensor | None = None
    staleness: Tensor | None = None

    def __len__(self) -> int:
        return len(self.log_probs)

    def select(self, indices: Tensor | slice) -> TrainingBatch:
        """The samples at ``indices`` (integers, a mask or a slice)."""
        picked: dict[str, Any] = {
            "forward_inputs": {name: t[indices] for name, t in self.forward_inputs.items()}
        }
        for field in fields(self)[1:]:
            tensor = getattr(self, field.name)
            picked[field.name] = None if tensor is None else tensor[indices]
        return TrainingBatch(**picked)

    def split(self, size: int) -> list[TrainingBatch]:
        """Consecutive pieces of ``size`` samples; the last one may be smaller."""
        if size >= len(self):
            return [self]
        return [self.select(slice(i, i + size)) for i in range(0, len(self), size)]

    def at_level(self, log_probs: Tensor) -> Tensor:
        """Log-probs [N, C, A] summed to the level of :attr:`log_probs`."""
        if self.log_probs.ndim == 3:
            return log_probs
        per_action = log_probs.sum(dim=-1)
        return per_action if self.log_probs.shape[1] > 1 else per_action.sum(1, keepdim=True)


class Algorithm(ABC):
    """Advantages and loss of one algorithm, and what data they need."""

    needs_reference: bool
    """Whether the batch must carry log-probs of a reference policy."""
    needs_present: bool = False
    """Whether a rollout of older weights comes with what the present ones make of it, by
    :meth:`prepare_stale`."""

    @abstractmethod
    def value_dim(self, chunk: int) -> int:
        """V that the policy must have for chunks of ``chunk`` primitive actions."""

    @abstractmethod
    def prepare(self, trajectory: Trajectory) -> tuple[TrainingBatch, dict[str, float]]:
        """Turn a whole rollout into samples with advantages, and metrics about it.

        The samples are those of the rows that no fault spoilt, row by row, environments in the
        order of their numbers. Running statistics are updated.
        """

    def prepare_stale(
        self, trajectory: Trajectory, present: Evaluation
    ) -> tuple[TrainingBatch, dict[str, float]]:
        """As :meth:`prepare`, for a rollout in which older weights acted.

        Args:
            trajectory: The rollout.
            present: Its actions under the weights that the training phase begins with, each
                [T, B, ...].
        """
        del present
        return self.prepare(trajectory)

    @abstractmethod
    def normalizer(self, batch: TrainingBatch) -> float:
        """Normaliser of the loss of one global batch, to be passed to its micro batches."""

    @abstractmethod
    def loss(
        self, evaluation: Evaluation, batch: TrainingBatch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a micro batch, both to be summed over the micro batches.

        The sums equal loss and metrics of the global batch whatever the split.

        Args:
            evaluation: The micro batch under the present weights.
            batch: The micro batch.
            normalizer: :meth:`normalizer` of the global batch.

        Returns:
            Scalar loss, and scalars without gradient; ``actor/approx_kl`` among them where
            ``actor.target_kl`` is to end a phase early.
        """

    def state_dict(self) -> dict[str, Any]:
        """Running statistics; a tree of tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        del state
