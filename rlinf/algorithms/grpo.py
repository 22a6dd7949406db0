"""Group-relative policy optimisation (Shao et al. 2024) on embodied episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.advantages import (
    episode_length_weights,
    group_advantages,
    idle_rows,
)
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import GRPOConfig
from rlinf.algorithms.objective import policy_terms, total_weight
from rlinf.algorithms.protocol import Algorithm, Evaluation
from rlinf.algorithms.samples import advantage_metrics, training_batch
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, RunFailure


@dataclass(frozen=True)
class _Episodes:
    """M episodes of a rollout: their rows, scores and groups."""

    of_row: Tensor
    """[T, B] number of the row's episode."""
    scores: Tensor
    """[M] float64 sum of rewards."""
    groups: Tensor
    """[M] int64."""
    complete: Tensor
    """[M] bool: may be compared with others."""


class GRPO(Algorithm):
    """Every step of an episode gets the episode's score relative to its group.

    A group is formed by the episodes of ``group_size`` consecutive environments that started from
    the same reset seed. An episode counts if the rollout holds it whole: one that began in an
    earlier rollout, that a fault spoilt, or that the end of the rollout cut while others of the
    rollout ended, is not trained on; neither is the only episode of a group.
    """

    def __init__(self, config: GRPOConfig, *, group_size: int) -> None:
        if group_size < 2:
            raise ConfigError(
                f"env.train.group_size: {group_size} is illegal for grpo, which compares episodes "
                "of environments with equal reset states; nearest: 2"
            )
        self.config = config
        self.needs_reference = config.kl_beta > 0
        self._group_size = group_size
        self._open_episodes: dict[int, int] = {}

    def value_dim(self, chunk: int) -> int:
        """No critic."""
        del chunk
        return 0

    def prepare(self, trajectory: Trajectory) -> tuple[Batch, dict[str, float]]:
        """Samples with group-relative advantages; see :meth:`Algorithm.prepare`.

        Raises:
            RunFailure: no group of the rollout has two complete episodes.
        """
        active = ~idle_rows(trajectory) & trajectory.uninterrupted()
        episodes = self._episodes(trajectory, active)
        advantages, trained = self._advantages(episodes)
        rows = trained[episodes.of_row] & active
        by_length = self.config.weight_by_episode_length and not bool(active.all())
        weights = episode_length_weights(rows) if by_length else rows.float()
        batch = training_batch(
            trajectory,
            logprob_type=self.config.logprob_type,
            advantages=(advantages[episodes.of_row] * rows).float().unsqueeze(-1),
            returns=None,
            values=None,
            weights=None if bool(rows.all()) else weights,
            normalized=self.config.normalize_advantages,
            groups=episodes.groups[episodes.of_row],
        )
        metrics = advantage_metrics(batch, trajectory)
        metrics["rollout/trained_episodes"] = float(trained.sum())
        return batch, metrics

    def _episodes(self, trajectory: Trajectory, active: Tensor) -> _Episodes:
        """Sum rewards by episode and find the group of each."""
        rows, envs = active.shape
        device = active.device
        column = torch.arange(envs, device=device).expand(rows, envs)
        keys = torch.stack([column.flatten(), trajectory.episode_ids.flatten()])
        unique, of_row = torch.unique(keys, dim=1, return_inverse=True)
        count = unique.shape[1]
        rewards = torch.where(active, trajectory.rewards.sum(dim=-1), 0.0).double()
        zeros = torch.zeros(count, dtype=torch.float64, device=device)
        scores = zeros.index_add(0, of_row, rewards.flatten())
        seeds = torch.zeros(count, dtype=torch.int64, device=device)
        seeds[of_row] = trajectory.reset_seeds.flatten()
        group = trajectory.env_ids[unique[0]] // self._group_size
        _, groups = torch.unique(torch.stack([group, seeds]), dim=1, return_inverse=True)
        of_row = of_row.view(rows, envs)
        return _Episodes(
            of_row=of_row,
            scores=scores,
            groups=groups,
            complete=self._complete(trajectory, of_row, count),
        )

    def _complete(self, trajectory: Trajectory, of_row: Tensor, count: int) -> Tensor:
        """[M] bool; remembers which episodes the rollout leaves unfinished."""
        ended = torch.zeros(count, dtype=torch.bool, device=of_row.device)
        ended[of_row[trajectory.dones]] = True
        spans_rollout = of_row[0] == of_row[-1]
        complete = ended.clone()
        complete[of_row[0][spans_rollout]] = True
        complete[of_row[~trajectory.uninterrupted()]] = False
        envs, first = trajectory.env_ids.tolist(), trajectory.episode_ids[0].tolist()
        for column, (env, episode) in enumerate(zip(envs, first, strict=True)):
            if self._open_episodes.get(env) == episode:
                complete[of_row[0, column]] = False
        last, over = trajectory.episode_ids[-1].tolist(), ended[of_row[-1]].tolist()
        self._open_episodes = {
            env: episode
            for env, episode, is_over in zip(envs, last, over, strict=True)
            if not is_over
        }
        return complete

    def _advantages(self, episodes: _Episodes) -> tuple[Tensor, Tensor]:
        """[M] advantages, and [M] bool which episodes are trained on."""
        config = self.config
        complete = episodes.complete
        advantages = torch.zeros_like(episodes.scores)
        trained = torch.zeros_like(complete)
        scored, means, sizes = group_advantages(
            scores=episodes.scores[complete], groups=episodes.groups[complete]
        )
        advantages[complete] = scored
        trained[complete] = sizes >= 2
        if not bool(trained.any()):
            raise RunFailure(
                "no group of the rollout has two complete episodes to compare; the rollout must "
                "hold whole episodes: let its steps be a multiple of max_episode_steps and start "
                "the environments of a group from equal reset states"
            )
        low, high = config.rewards_lower_bound, config.rewards_upper_bound
        if config.filter_rewards and low is not None and high is not None:
            trained[complete] &= (means >= low) & (means <= high)
        return advantages, trained

    def normalizer(self, batch: Batch) -> float:
        """Sum of the sample weights."""
        return total_weight(batch)

    def loss(
        self, evaluation: Evaluation, batch: Batch, *, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss; see :meth:`Algorithm.loss`."""
        return policy_terms(self.config, evaluation, batch, normalizer=normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Episodes that the last rollout left unfinished."""
        envs = sorted(self._open_episodes)
        return {
            "env_ids": torch.tensor(envs, dtype=torch.int64),
            "episode_ids": torch.tensor([self._open_episodes[e] for e in envs], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        envs, episodes = state["env_ids"].tolist(), state["episode_ids"].tolist()
        self._open_episodes = dict(zip(envs, episodes, strict=True))
