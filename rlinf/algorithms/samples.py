"""From rollouts to batches: what credit says about one, and the rows of one over time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.base_config import Level
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.credit import episode_length_weights, idle_rows, normalize
from rlinf.algorithms.losses import at_level
from rlinf.data.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class CreditEstimate:
    """What a rollout is worth, before advantages are normalised.

    Args:
        advantages: Of answers [N, L]; of chunk steps [T, B, 1], or [T, B, C] of each primitive
            action.
        trained: [N] or [T, B] bool, what can be trained on; None: everything valid.
        returns: Value targets [N, L] or [T, B, V]; None without a critic.
        metrics: About it.
    """

    advantages: Tensor
    trained: Tensor | None = None
    returns: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Credit(ABC):
    """Where the advantages of an algorithm come from."""

    def value_dim(self, chunk: int) -> int:
        """See :meth:`Algorithm.value_dim`."""
        del chunk
        return 0

    @abstractmethod
    def of_answers(self, batch: Batch) -> CreditEstimate:
        """Credit of the terms of answers.

        Raises:
            ValueError: The batch lacks what is needed.
        """

    @abstractmethod
    def of_chunk_steps(self, trajectory: Trajectory) -> CreditEstimate:
        """Credit of the rows of a rollout over time."""

    def state_dict(self) -> dict[str, Any]:
        """Running statistics."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        del state


def rows_of(
    trajectory: Trajectory,
    *,
    logprob_type: Level,
    advantages: Tensor,
    returns: Tensor | None = None,
    weights: Tensor | None = None,
    normalized: bool = False,
    proximal_log_probs: Tensor | None = None,
) -> Batch:
    """Flatten time and environments, and drop the rows that a fault spoilt.

    Args:
        trajectory: The rollout.
        logprob_type: Level that log-probs are summed to.
        advantages: [T, B, 1] of chunks, or [T, B, C] of primitive actions.
        returns: [T, B, V] or None.
        weights: [T, B] or None.
        normalized: Bring the advantages to mean 0 and standard deviation 1 over what is trained on.
        proximal_log_probs: [T, B, C, A] or None.
    """
    intact = trajectory.uninterrupted().flatten()
    kept = None if bool(intact.all()) else intact.nonzero().squeeze(-1)

    def flat(column: Tensor) -> Tensor:
        rows = column.flatten(0, 1)
        return rows if kept is None else rows[kept]

    log_probs = at_level(flat(trajectory.log_probs), logprob_type)
    row_weights = None if weights is None else flat(weights)
    of_rows = flat(advantages)
    if normalized:
        of_rows = normalize(of_rows, weights=row_weights)
    return Batch(
        inputs={name: flat(column) for name, column in trajectory.forward_inputs.items()},
        mask=torch.ones_like(log_probs),
        log_probs=log_probs,
        rewards=flat(trajectory.rewards.sum(dim=-1)),
        versions=flat(trajectory.versions).unsqueeze(1).expand(log_probs.shape),
        groups=flat(trajectory.env_ids.expand(trajectory.num_steps, -1)),
        truncated=flat(trajectory.truncations.any(dim=-1)),
        valid=flat(trajectory.valid),
        weights=row_weights,
        values=flat(trajectory.values) if returns is not None else None,
        returns=None if returns is None else flat(returns),
        # Those of a primitive action hold for each of its dimensions.
        advantages=of_rows.repeat_interleave(log_probs.shape[1] // of_rows.shape[1], dim=1),
        proximal_log_probs=(
            None if proximal_log_probs is None else at_level(flat(proximal_log_probs), logprob_type)
        ),
    )


def row_weights(
    trajectory: Trajectory, trained: Tensor | None, *, by_length: bool
) -> Tensor | None:
    """[T, B] share of each row in the loss; None where all are 1.

    Args:
        trajectory: The rollout.
        trained: [T, B] bool, what can be trained on; None: every row of a running episode.
        by_length: Give every environment's rollout the same share however early it ended.
    """
    idle = idle_rows(trajectory)
    active = ~idle & trajectory.uninterrupted()
    rows = active if trained is None else trained & active
    if bool(rows.all()) or (trained is None and not bool(idle.any())):
        return None
    if by_length and not bool(active.all()):
        return episode_length_weights(rows)
    return rows.float()
