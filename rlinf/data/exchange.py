"""What environment and policy hand each other in an embodied rollout, and what becomes of it.

All of it are arrays of numpy: who has the simulators alone, a process or a robot's machine, loads
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.envs.results import Observations, VectorStep


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
        forward_inputs: What else is needed to recompute the log-probs, by key [n, ...]; the
            observations are not sent back.
        version: Weight version that acted.
    """

    actions: np.ndarray
    log_probs: np.ndarray
    forward_inputs: dict[str, np.ndarray]
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

    values: np.ndarray
    final_values: np.ndarray
    bootstrap_values: np.ndarray


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
        self._rows: list[tuple[ObservationBatch, PolicyBatch, VectorStep]] = []
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
        """Add what the policy saw, what it answered, and what the environments did with that."""
        self._rows.append((observation, policy, step))
        self._valid.append(step.valid.copy())
        for row in np.flatnonzero(~step.valid):
            # The part of the broken episode that lies in this rollout is never trained on.
            for time in range(self._segment_start[row], self.time):
                self._valid[time][row] = False
        self._segment_start[step.final_mask | ~step.valid] = self.time

    def build(self, critic: RolloutValues) -> dict[str, np.ndarray]:
        """What :meth:`~rlinf.data.trajectory.Trajectory.from_arrays` takes, with the values that
        the policy gave after the last row."""
        seen, answers, steps = zip(*self._rows, strict=True)
        given = [each.observations for each in seen]
        following = [_next_observations(s) for s in steps] if self._keep_next_observations else []
        versions = np.array([answer.version for answer in answers], dtype=np.int64)
        return {
            **_stacked("forward_inputs", given),
            **_stacked("forward_inputs", [answer.forward_inputs for answer in answers]),
            **_stacked("next_observations", following),
            "log_probs": np.stack([answer.log_probs for answer in answers]),
            "values": critic.values,
            "rewards": np.stack([step.rewards for step in steps]),
            "terminations": np.stack([step.terminations for step in steps]),
            "truncations": np.stack([step.truncations for step in steps]),
            "final_values": critic.final_values,
            "bootstrap_values": critic.bootstrap_values,
            "valid": np.stack(self._valid),
            "versions": np.repeat(versions[:, None], len(self._env_ids), axis=1),
            "env_ids": self._env_ids,
            "episode_ids": np.stack([step.episode_ids for step in steps]),
            "reset_seeds": np.stack([step.reset_seeds for step in steps]),
            "final_mask": np.stack([step.final_mask for step in steps]),
        }


def _stacked(name: str, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Entries of a mapping of a trajectory, [T, n, ...], from those of its T rows."""
    return {
        f"{name}.{key}": np.stack([row[key] for row in rows]) for key in (rows[0] if rows else ())
    }


def _next_observations(step: VectorStep) -> Observations:
    """By key [n, ...]: what the actions led to, before the environments were reset."""
    if step.final_observations is None:
        return step.observations
    following = {key: value.copy() for key, value in step.observations.items()}
    for key, value in step.final_observations.items():
        following[key][step.final_mask] = value
    return following
