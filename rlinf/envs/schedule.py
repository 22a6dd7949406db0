"""Which episode an env plays next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.envs.seeding import episode_number, reset_seed

MAX_ATTEMPTS = 2
"""How often a listed episode is tried before its fault becomes its result."""


@dataclass(frozen=True)
class EpisodeSchedule:
    """Ids and seeds of episodes as a function of the global env number and the counters alone.

    Without a list, an episode's seed is a hash of (run seed, purpose, group, epoch, index): envs of
    one group share it, and the split of envs over workers and processes does not matter. With
    ``fixed`` every reset of a group leads to the same state. With a list, global env ``e`` of
    ``total_envs`` plays the entries ``e``, ``e + total_envs``, ... and then rests.

    Args:
        run_seed: Seed of the run.
        purpose: ``train`` or ``eval``.
        group_size: Consecutive envs that share reset states.
        fixed: Whether every reset of a group is the same.
        episodes: (episode id, seed) to play exactly once, or None.
        total_envs: Envs over all workers.
    """

    run_seed: int
    purpose: str
    group_size: int
    fixed: bool
    episodes: Sequence[tuple[int, int]] | None
    total_envs: int

    def episode(self, env: int, epoch: int, index: int, serial: int) -> tuple[int, int] | None:
        """Return (episode id, seed), or None when the list holds no more for this env."""
        if self.episodes is not None:
            position = env + index * self.total_envs
            if position >= len(self.episodes):
                return None
            number, seed = self.episodes[position]
            return number, seed
        seed = reset_seed(
            run_seed=self.run_seed,
            purpose=self.purpose,
            group=env // self.group_size,
            epoch=0 if self.fixed else epoch,
            index=0 if self.fixed else index,
        )
        return episode_number(env, serial), seed
