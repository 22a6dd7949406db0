"""Which episode an env plays next: a function of what is reset, never of who resets it or when."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

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


_KEY = struct.Struct("<qqqq")


def reset_seed(*, run_seed: int, purpose: str, group: int, epoch: int, index: int) -> int:
    """Return the seed of one episode, in [0, 2**31).

    A hash rather than a sum, so that neighbouring runs, envs and episodes share no seed. 31 bits,
    because some simulators keep seeds in a signed 32-bit integer.

    Args:
        run_seed: Seed of the run.
        purpose: ``train`` or ``eval``; the two never meet the same sequence.
        group: Number of the group of envs that share reset states.
        epoch: How many explicit resets came before.
        index: Episodes of the env since the last explicit reset.
    """
    key = _KEY.pack(run_seed, group, epoch, index) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 33


_ENV_SHIFT = 40


def episode_number(env: int, serial: int) -> int:
    """Return the id of the ``serial``-th episode of a global env, unique in a run."""
    return (env << _ENV_SHIFT) | serial
