"""What one exchange with a vector env returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.envs.records import EnvFault, EpisodeRecord

Observations = dict[str, np.ndarray]


@dataclass(frozen=True)
class VectorStep:
    """What followed one action chunk of the n envs of a stage.

    Args:
        observations: By key [n, ...], after auto-reset.
        rewards: [n, C] float32; 0 for the columns that follow the end of an episode, whose actions
            were not executed.
        terminations: [n, C] bool; only the last column is ever set.
        truncations: [n, C] bool; only the last column is ever set.
        final_observations: By key [m, ...] for the m rows of ``final_mask``, before auto-reset;
            None when m is 0.
        final_mask: [n] bool, envs whose episode ended and that were reset.
        valid: [n] bool, False where a fault closed the episode: the env was rebuilt and its
            observation is that of a fresh episode.
        active: [n] bool, False where nothing was executed: the episode had ended before (no
            auto-reset), or the episode list holds no more for this env.
        episode_ids: [n] int64, the episode that the chunk belonged to.
        reset_seeds: [n] int64, the seed of that episode.
        faults: What went wrong.
        episodes: The episodes that ended.
    """

    observations: Observations
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    final_observations: Observations | None
    final_mask: np.ndarray
    valid: np.ndarray
    active: np.ndarray
    episode_ids: np.ndarray
    reset_seeds: np.ndarray
    faults: tuple[EnvFault, ...]
    episodes: tuple[EpisodeRecord, ...]
