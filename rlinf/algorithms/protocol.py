"""What an algorithm offers to the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from rlinf.algorithms.batch import Batch
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
    def prepare(self, trajectory: Trajectory) -> tuple[Batch, dict[str, float]]:
        """Turn a whole rollout into samples with advantages, and metrics about it.

        The samples are those of the rows that no fault spoilt, row by row, environments in the
        order of their numbers. Running statistics are updated.
        """

    def prepare_stale(
        self, trajectory: Trajectory, present: Evaluation
    ) -> tuple[Batch, dict[str, float]]:
        """As :meth:`prepare`, for a rollout in which older weights acted.

        Args:
            trajectory: The rollout.
            present: Its actions under the weights that the training phase begins with, each
                [T, B, ...].
        """
        del present
        return self.prepare(trajectory)

    @abstractmethod
    def normalizer(self, batch: Batch) -> float:
        """Normaliser of the loss of one global batch, to be passed to its micro batches."""

    @abstractmethod
    def loss(
        self, evaluation: Evaluation, batch: Batch, *, normalizer: float
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
