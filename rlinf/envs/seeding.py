"""Seeds of resets: a function of what is reset, never of who resets it or when."""

from __future__ import annotations

import hashlib
import struct

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
