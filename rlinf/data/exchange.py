"""What environment and policy hand each other in one exchange of an embodied rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class ObservationBatch:
    """Environment to policy: the observations of one sub-batch.

    Args:
        observations: Arrays with leading dimension n.
        env_ids: [n] global environment numbers; they choose the rows of the exploration noise.
        time: Chunk step within the rollout; it chooses the noise as well.
        final_observations: Last observations of the m episodes that ended in the previous exchange,
            leading dimension m; None where none ended.
        final_mask: [n] bool, the m environments that they belong to.
        act: Whether actions are wanted. After the last chunk step only the values are.
    """

    observations: dict[str, np.ndarray]
    env_ids: np.ndarray
    time: int
    final_observations: dict[str, np.ndarray] | None
    final_mask: np.ndarray
    act: bool = True


@dataclass(frozen=True)
class PolicyBatch:
    """Policy to environment: the answer to one :class:`ObservationBatch` that wants actions.

    Args:
        actions: [n, C, A] float32, clipped to the action box.
        log_probs: [n, C, A] float32 of the raw actions.
        forward_inputs: What else is needed to recompute the log-probs; the observations are not
            sent back.
        version: Weight version that acted.
    """

    actions: np.ndarray
    log_probs: torch.Tensor
    forward_inputs: dict[str, torch.Tensor]
    version: int


@dataclass(frozen=True)
class RolloutValues:
    """Policy to environment: the values of a whole rollout of T exchanges, after its last one.

    The critic is not needed to act, so it is evaluated once for all observations.

    Args:
        values: [T, n, V] float32 of the observations that actions answered.
        final_values: [T, n, V] float32 of the last observations of the episodes that the actions
            ended, 0 where none ended.
        bootstrap_values: [n, V] float32 of the observation after the last action.
    """

    values: torch.Tensor
    final_values: torch.Tensor
    bootstrap_values: torch.Tensor
