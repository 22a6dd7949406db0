"""What a token algorithm offers to the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.tokens.base_config import TokenAlgorithmConfig


class TokenAlgorithm(ABC):
    """Advantages and losses of one algorithm, and what data they need.

    Order of calls in a step: :meth:`keep_group` as groups arrive; :meth:`prepare` once, on the
    batch with the log-probs and values that the algorithm needs; for each global batch
    :meth:`normalizer`, :meth:`loss` (and :meth:`value_loss`) of its micro batches, :meth:`accepts`
    with their summed metrics.
    """

    config: TokenAlgorithmConfig

    @property
    def needs_values(self) -> bool:
        """Whether a critic must be trained and batches must carry its values."""
        return self.config.needs_values

    @property
    def needs_reference(self) -> bool:
        """Whether batches must carry log-probs of the reference policy."""
        return self.config.needs_reference

    @property
    def needs_proximal(self) -> bool:
        """Whether batches must carry log-probs that the trainer recomputed."""
        return self.config.needs_proximal

    @property
    def needs_entropy(self) -> bool:
        """Whether :meth:`loss` must be given the entropy."""
        return self.config.needs_entropy

    def keep_group(self, rewards: np.ndarray, valid: np.ndarray | None = None) -> bool:
        """Whether a group is worth training on; True without dynamic sampling.

        With it, a group whose valid rewards are all equal would have advantages of 0 and is drawn
        again (Yu et al. 2025, "DAPO", eq. 11).

        Args:
            rewards: [G].
            valid: [G] bool; None where all are.
        """
        if not self.config.dynamic_sampling:
            return True
        counted = rewards if valid is None else rewards[valid]
        return len(counted) > 1 and bool(counted.max() > counted.min())

    def trains_policy(self, step: int) -> bool:
        """Whether the policy is trained in this step of the run, counted from 0.

        Where not, the trainer leaves out the policy's forward, backward and optimizer step.
        """
        del step
        return True

    @abstractmethod
    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add advantages and returns to a rollout, and return metrics about it.

        In the result ``mask`` is 0 for whole sequences that are not trained on. Statistics are
        taken over the given batch: all sequences of a step, or of a global batch; groups must be
        whole.

        Raises:
            ValueError: The batch lacks what the algorithm needs.
        """

    @abstractmethod
    def normalizer(self, batch: Batch) -> float:
        """Normaliser of the losses of one prepared global batch, to be passed to its micro batches.

        It belongs to the whole global batch, over all ranks.
        """

    @abstractmethod
    def loss(
        self, log_probs: Tensor, entropy: Tensor | None, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a micro batch, both to be summed over micro batches and ranks.

        The sums equal loss and metrics of the global batch whatever the split.

        Args:
            log_probs: [n, L] under the present weights.
            entropy: [n, L] in nats, or None.
            batch: The prepared micro batch.
            normalizer: :meth:`normalizer` of the global batch.

        Returns:
            Scalar loss, and scalars without gradient, ``actor/ratio`` among them.

        Raises:
            ValueError: The batch lacks what the loss needs.
        """

    def value_loss(
        self, values: Tensor, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Critic loss and metrics of a micro batch, to be summed as those of :meth:`loss`.

        Args:
            values: [n, L] under the present weights of the critic.
            batch: The prepared micro batch.
            normalizer: :meth:`normalizer` of the global batch.
        """
        raise NotImplementedError(f"{self.config.type} has no critic")

    def accepts(self, metrics: Mapping[str, float]) -> bool:
        """Whether the update of a global batch may be applied.

        Args:
            metrics: Of :meth:`loss`, summed over all micro batches and ranks.
        """
        bound = self.config.early_stop_imp_ratio
        return bound is None or not metrics["actor/ratio"] > bound

    def state_dict(self) -> dict[str, Any]:
        """Running statistics; a tree of tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        del state
