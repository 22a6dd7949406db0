"""Collect the exchanges of one sub-batch of environments into a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlinf.data.exchange import ObservationBatch, PolicyBatch, RolloutValues
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import Observations, VectorStep


@dataclass
class _Row:
    observation: ObservationBatch
    policy: PolicyBatch
    step: VectorStep


class TrajectoryBuilder:
    """Rows of one sub-batch; closes the trajectories of environments that failed.

    Args:
        env_ids: [n] int64, global environment numbers.
        rows_wanted: Chunk steps of the rollout; rows are added past it until as many valid
            transitions were seen as a rollout without faults would have.
        keep_next_observations: Whether the trajectory holds what followed each row.
    """

    def __init__(
        self, env_ids: np.ndarray, rows_wanted: int, *, keep_next_observations: bool = False
    ) -> None:
        self._env_ids = env_ids
        self._keep_next_observations = keep_next_observations
        self._rows_wanted = rows_wanted
        self._rows: list[_Row] = []
        self._valid: list[np.ndarray] = []
        self._segment_start = np.zeros(len(env_ids), dtype=np.int64)

    @property
    def time(self) -> int:
        """Chunk steps collected so far."""
        return len(self._rows)

    @property
    def complete(self) -> bool:
        """Whether enough valid transitions were collected."""
        if self.time < self._rows_wanted:
            return False
        valid = sum(int(row.sum()) for row in self._valid)
        return valid >= self._rows_wanted * len(self._env_ids)

    @property
    def exhausted(self) -> bool:
        """Whether four times the planned rows did not yield enough valid transitions."""
        return self.time >= 4 * self._rows_wanted

    def add(self, observation: ObservationBatch, policy: PolicyBatch, step: VectorStep) -> None:
        """Add what one chunk step did.

        Args:
            observation: What the policy saw.
            policy: What it answered.
            step: What the environments did with the actions.
        """
        self._rows.append(_Row(observation, policy, step))
        self._valid.append(step.valid.copy())
        for row in np.flatnonzero(~step.valid):
            # The part of the broken episode that lies in this rollout is never trained on.
            for time in range(self._segment_start[row], self.time):
                self._valid[time][row] = False
        self._segment_start[step.final_mask | ~step.valid] = self.time

    def build(self, critic: RolloutValues) -> Trajectory:
        """The trajectory, with the values that the policy gave after the last row."""
        rows = self._rows
        observation_keys = rows[0].observation.observations
        forward_inputs = {
            key: torch.from_numpy(np.stack([r.observation.observations[key] for r in rows]))
            for key in observation_keys
        }
        for key in rows[0].policy.forward_inputs:
            forward_inputs[key] = torch.stack([r.policy.forward_inputs[key] for r in rows])
        next_observations: dict[str, torch.Tensor] = {}
        if self._keep_next_observations:
            following = [_next_observations(row.step) for row in rows]
            next_observations = {
                key: torch.from_numpy(np.stack([each[key] for each in following]))
                for key in observation_keys
            }
        versions = np.array([row.policy.version for row in rows], dtype=np.int64)
        return Trajectory(
            forward_inputs=forward_inputs,
            log_probs=torch.stack([row.policy.log_probs for row in rows]),
            values=critic.values,
            rewards=torch.from_numpy(np.stack([row.step.rewards for row in rows])),
            terminations=torch.from_numpy(np.stack([row.step.terminations for row in rows])),
            truncations=torch.from_numpy(np.stack([row.step.truncations for row in rows])),
            final_values=critic.final_values,
            bootstrap_values=critic.bootstrap_values,
            valid=torch.from_numpy(np.stack(self._valid)),
            versions=torch.from_numpy(np.repeat(versions[:, None], len(self._env_ids), axis=1)),
            env_ids=torch.from_numpy(self._env_ids),
            episode_ids=torch.from_numpy(np.stack([row.step.episode_ids for row in rows])),
            reset_seeds=torch.from_numpy(np.stack([row.step.reset_seeds for row in rows])),
            next_observations=next_observations,
        )


def _next_observations(step: VectorStep) -> Observations:
    """By key [n, ...]: what the actions led to, before the environments were reset."""
    if step.final_observations is None:
        return step.observations
    following = {key: value.copy() for key, value in step.observations.items()}
    for key, value in step.final_observations.items():
        following[key][step.final_mask] = value
    return following
