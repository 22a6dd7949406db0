"""The shared memory of one vector env: one row per env, mapped by every env process."""

from __future__ import annotations

import numpy as np

from rlinf.envs.records import RECORD_DTYPE
from rlinf.envs.spec import EnvSpec
from rlinf.processes.shared_block import ALIGNMENT, Fields


class Status:
    """What an env is doing, as written in its ``status`` cell."""

    IDLE = 0
    RUNNING = 1
    ENDED = 2
    EXHAUSTED = 3


# Everything that a checkpoint must hold besides observations, action log and simulator state.
EPISODE_FIELDS: dict[str, str] = {
    "epoch": "<i8",  # explicit resets so far, minus one
    "index": "<i8",  # episodes since the last explicit reset
    "serial": "<i8",  # episodes since the beginning
    "attempt": "<i8",  # repeats of a listed episode after a fault
    "status": "<i8",
    "episode_id": "<i8",
    "seed": "<i8",
    "steps": "<i8",
    "episode_return": "<f8",
    "success_once": "?",
    "success_now": "?",
    "fail_once": "?",
}


def block_fields(spec: EnvSpec, num_envs: int, max_chunk: int, processes: int) -> Fields:
    """Return name, shape and type of every array of the block."""
    per_env = {
        **{name: ((), kind) for name, kind in EPISODE_FIELDS.items()},
        "done_sequence": ((), "<i8"),  # the last command that this row has completed
        "acted_episode": ((), "<i8"),
        "acted_seed": ((), "<i8"),
        "terminated": ((), "?"),
        "truncated": ((), "?"),
        "final": ((), "?"),
        "valid": ((), "?"),
        "active": ((), "?"),
        "recorded": ((), "?"),
        "rewards": ((max_chunk,), "<f4"),
        "actions": ((max_chunk, spec.action_dim), "<f4"),
        "log": ((spec.max_episode_steps, spec.action_dim), "<f4"),
    }
    fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        name: ((num_envs, *shape), np.dtype(kind)) for name, (shape, kind) in per_env.items()
    }
    fields["records"] = ((num_envs,), RECORD_DTYPE)
    for key, shape in spec.observation_shapes.items():
        dtype = np.dtype(spec.observation_dtypes[key])
        fields[f"observation/{key}"] = ((num_envs, *shape), dtype)
        fields[f"final/{key}"] = ((num_envs, *shape), dtype)
    # Per process: the row being stepped (-1: none) and a count that grows with every step.
    fields["progress"] = ((processes, ALIGNMENT // 8), np.dtype("<i8"))
    return fields
