"""What ends an episode, and which one an env plays next.

The next one is a function of what is reset, never of who resets it or when.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_ATTEMPTS = 2
"""How often a listed episode is tried before its fault becomes its result."""

_KEY = struct.Struct("<qqqq")
_ENV_SHIFT = 40


@dataclass(frozen=True)
class EpisodeRules:
    """Ends of episodes, and ids and seeds of the next ones by global env number and counters alone.

    Without a list, an episode's seed is a hash of (run seed, purpose, group, epoch, index): envs of
    one group share it, and the split of envs over workers and processes does not matter. With a
    list, global env ``e`` of ``total_envs`` plays the entries ``e``, ``e + total_envs``, ... up to
    an empty one and then rests. The fields named as in :class:`~rlinf.envs.config.EnvConfig` are
    those of it.

    Args:
        run_seed: Seed of the run.
        purpose: ``train`` or ``eval``; the two never meet the same sequence.
        total_envs: Envs over all workers.
        episodes: (episode id, seed) to play exactly once, or None.
    """

    run_seed: int
    purpose: str
    total_envs: int
    episodes: Sequence[Sequence[int]] | None
    max_episode_steps: int
    auto_reset: bool
    ignore_terminations: bool
    reward_scale: float
    step_penalty: float
    group_size: int
    use_fixed_reset_states: bool
    leave_out_failing_tasks: bool

    def training_reward(self, reward: Any) -> Any:
        """What training sees of the simulator's reward of an executed action, or of several."""
        return reward * self.reward_scale - self.step_penalty

    def episode(self, env: int, epoch: int, index: int, serial: int) -> tuple[int, int] | None:
        """The (episode id, seed) that comes next, or None when the list holds no more.

        A hash rather than a sum, so that neighbouring runs, envs and episodes share no seed. 31
        bits, because some simulators keep seeds in a signed 32-bit integer.

        Args:
            env: Global number of the env.
            epoch: How many explicit resets came before.
            index: Episodes of the env since the last explicit reset.
            serial: Episodes of the env since the beginning.
        """
        if self.episodes is not None:
            position = env + index * self.total_envs
            if position >= len(self.episodes):
                return None
            entry = self.episodes[position]
            return (entry[0], entry[1]) if entry else None
        if self.use_fixed_reset_states:
            epoch = index = 0
        key = _KEY.pack(self.run_seed, env // self.group_size, epoch, index) + self.purpose.encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return (env << _ENV_SHIFT) | serial, int.from_bytes(digest, "little") >> 33
