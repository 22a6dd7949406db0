"""What a token algorithm offers to the trainer, and the data that passes between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.tokens.base_config import TokenAlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """N sequences of S tokens; responses have up to L tokens.

    Args:
        input_ids: [N, S] int64, left-padded prompt | right-padded response.
        attention_mask: [N, S] bool.
        mask: [N, L], 1 where a token of the response counts in the loss: it was sampled, and, in
            a prepared batch, its sequence is trained on.
        rollout_log_probs: [N, L], of the engine that sampled.
        rewards: [N] of each sequence.
        groups: [N] int64; the answers to one prompt share a number.
        versions: [N, L] int64, of the weights that sampled each token.
        truncated: [N] bool, cut off by the token limit.
        valid: [N] bool; False where the reward could not be computed. Such a sequence is neither
            compared with others nor trained on.
        old_log_probs: [N, L], recomputed by the trainer before the first update.
        reference_log_probs: [N, L], of the reference policy.
        values: [N, L] of the critic before the first update; that of token t is a function of
            everything before it.
        advantages: [N, L]; None before :meth:`TokenAlgorithm.prepare`.
        returns: [N, L] value targets; None before that, and without a critic.
        version: Of the weights that the step's updates begin with.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    rollout_log_probs: Tensor
    rewards: Tensor
    groups: Tensor
    versions: Tensor
    truncated: Tensor
    valid: Tensor
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    version: int | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def select(self, indices: Tensor | slice) -> TokenBatch:
        """The sequences at ``indices`` (integers, a mask or a slice)."""
        return self._map(lambda column: column[indices])

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on a device."""
        return self._map(lambda column: column.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: change(column) if isinstance(column, Tensor) else column
            for name, column in columns.items()
        }
        return TokenBatch(**changed)

    def split(self, size: int) -> list[TokenBatch]:
        """Consecutive pieces of ``size`` sequences; the last one may be smaller."""
        return [self.select(slice(i, i + size)) for i in range(0, len(self), size)]


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
    def needs_old_log_probs(self) -> bool:
        """Whether batches must carry log-probs that the trainer recomputed."""
        return self.config.needs_old_log_probs

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
    def prepare(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        """Add advantages and returns to a rollout, and return metrics about it.

        In the result ``mask`` is 0 for whole sequences that are not trained on. Statistics are
        taken over the given batch: all sequences of a step, or of a global batch; groups must be
        whole.

        Raises:
            ValueError: The batch lacks what the algorithm needs.
        """

    @abstractmethod
    def normalizer(self, batch: TokenBatch) -> float:
        """Normaliser of the losses of one prepared global batch, to be passed to its micro batches.

        It belongs to the whole global batch, over all ranks.
        """

    @abstractmethod
    def loss(
        self, log_probs: Tensor, entropy: Tensor | None, batch: TokenBatch, *, normalizer: float
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
        self, values: Tensor, batch: TokenBatch, *, normalizer: float
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
