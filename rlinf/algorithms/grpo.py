"""Group-relative policy optimisation (Shao et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.base_config import AlgorithmConfig
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import RewardFilterConfig
from rlinf.algorithms.credit import group_advantages, idle_rows
from rlinf.algorithms.objective import ClippedObjective
from rlinf.algorithms.ppo import reward_kl
from rlinf.algorithms.samples import Credit, CreditEstimate
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, RunFailure


@dataclass(frozen=True)
class _Episodes:
    """M episodes of a rollout."""

    of_row: Tensor  # [T, B] number of the row's episode
    scores: Tensor  # [M] float64 sum of rewards
    groups: Tensor  # [M] int64
    complete: Tensor  # [M] bool: may be compared with others


class GroupCredit(Credit):
    """Every token of an answer, or step of an episode, gets its score relative to its group.

    The answers to one prompt are a group; those that are not valid are not compared. So are the
    episodes of ``group_size`` consecutive environments that started from the same reset seed. An
    episode counts if the rollout holds it whole: one that began in an earlier rollout, that a fault
    spoilt, or that the end of the rollout cut while others of the rollout ended, is not trained on.
    The only member of a group has nothing to be compared with and is not trained on.
    """

    def __init__(self, config: AlgorithmConfig, group_size: int = 1) -> None:
        if config.family == "actions" and config.needs_groups and group_size < 2:
            raise ConfigError(
                f"env.train.group_size: {group_size} is illegal for {config.type}, which compares "
                "episodes of environments with equal reset states; nearest: 2"
            )
        super().__init__(config)
        self._group_size = group_size
        self._open_episodes: dict[int, int] = {}

    def _compare(self, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """[M] advantages and [M] sizes of groups, from [M] scores and [M] numbers of groups."""
        advantages, _, sizes = group_advantages(scores=scores, groups=groups)
        return advantages, sizes

    def of_answers(self, batch: Batch) -> CreditEstimate:
        """See :meth:`Credit.of_answers`."""
        return self._of_scores(batch, self._scores(batch))

    def _scores(self, batch: Batch) -> Tensor:
        """[N] float64 rewards without the KL divergence of the sequence."""
        return batch.rewards.double() - reward_kl(self._config, batch).sum(dim=1)

    def _of_scores(self, batch: Batch, scores: Tensor) -> CreditEstimate:
        advantages, sizes = self._compared(scores, batch.groups, batch.valid)
        shape = batch.mask.shape
        return CreditEstimate(advantages=advantages.unsqueeze(1).expand(shape), trained=sizes > 1)

    def _compared(self, scores: Tensor, groups: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
        """[M] advantages and [M] sizes of groups, 0 for those that are not compared."""
        advantages, sizes = torch.zeros_like(scores), torch.zeros_like(groups)
        advantages[among], sizes[among] = self._compare(scores[among], groups[among])
        return advantages, sizes

    def of_chunk_steps(self, trajectory: Trajectory) -> CreditEstimate:
        """See :meth:`Credit.of_chunk_steps`; a RunFailure where nothing can be compared."""
        active = ~idle_rows(trajectory) & trajectory.uninterrupted()
        episodes = self._episodes(trajectory, active)
        advantages, sizes = self._compared(episodes.scores, episodes.groups, episodes.complete)
        trained = sizes > 1
        if not bool(trained.any()):
            raise RunFailure(
                "no group of the rollout has two complete episodes to compare; the rollout must "
                "hold whole episodes: let its steps be a multiple of max_episode_steps and start "
                "the environments of a group from equal reset states"
            )
        trained &= self._within_bounds(episodes)
        rows = trained[episodes.of_row] & active
        return CreditEstimate(
            advantages=(advantages[episodes.of_row] * rows).float().unsqueeze(-1),
            trained=rows,
            metrics={"rollout/trained_episodes": float(trained.sum())},
        )

    def _within_bounds(self, episodes: _Episodes) -> Tensor:
        """[M] bool: the mean score of the episode's group is one to be trained on."""
        config, complete = self._config, episodes.complete
        within = torch.ones_like(complete)
        if not isinstance(config, RewardFilterConfig) or not config.filter_rewards:
            return within
        low, high = config.rewards_lower_bound, config.rewards_upper_bound
        assert low is not None
        assert high is not None
        _, means, _ = group_advantages(
            scores=episodes.scores[complete], groups=episodes.groups[complete]
        )
        within[complete] = (means >= low) & (means <= high)
        return within

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
        return _Episodes(of_row, scores, groups, self._complete(trajectory, of_row, count))

    def _complete(self, trajectory: Trajectory, of_row: Tensor, count: int) -> Tensor:
        """[M] bool; remembers which episodes the rollout leaves unfinished."""
        ended = torch.zeros(count, dtype=torch.bool, device=of_row.device)
        ended[of_row[trajectory.dones]] = True
        of_first = trajectory.of_first_row(of_row)
        complete = ended.clone()
        complete[of_first[of_first == of_row[-1]]] = True
        complete[of_row[~trajectory.uninterrupted()]] = False
        envs = trajectory.env_ids.tolist()
        first = trajectory.of_first_row(trajectory.episode_ids).tolist()
        for column, (env, episode) in enumerate(zip(envs, first, strict=True)):
            if self._open_episodes.get(env) == episode:
                complete[of_first[column]] = False
        last, over = trajectory.episode_ids[-1].tolist(), ended[of_row[-1]].tolist()
        self._open_episodes = {
            env: episode
            for env, episode, is_over in zip(envs, last, over, strict=True)
            if not is_over
        }
        return complete

    def state_dict(self) -> dict[str, Any]:
        """Episodes that the last rollout left unfinished; answers leave nothing."""
        if self._config.family == "tokens":
            return {}
        envs = sorted(self._open_episodes)
        return {
            "env_ids": torch.tensor(envs, dtype=torch.int64),
            "episode_ids": torch.tensor([self._open_episodes[e] for e in envs], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if self._config.family == "tokens":
            return
        envs, episodes = state["env_ids"].tolist(), state["episode_ids"].tolist()
        self._open_episodes = dict(zip(envs, episodes, strict=True))


class GRPO(ClippedObjective):
    """(R − mean of group) / (std of group + 1e-6), Shao et al. 2024, §4.1.2; clipped surrogate."""

    credit = GroupCredit


class _CentredCredit(GroupCredit):
    def _compare(self, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        advantages, _, sizes = group_advantages(scores=scores, groups=groups, divide_by_std=False)
        return advantages, sizes


class DrGRPO(GRPO):
    """R − mean of group; the loss is divided by a constant and not by the response's length (Liu et
    al. 2025, "Understanding R1-Zero-like training", §3.2)."""

    credit = _CentredCredit
