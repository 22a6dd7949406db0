"""The shared memory of one vector env: one row per env, mapped by every env process.

Also what of it a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf.envs.results import RECORD_DTYPE
from rlinf.envs.spec import EnvSpec
from rlinf.errors import CheckpointError
from rlinf.processes.shared_block import ALIGNMENT, Fields, SharedBlock


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


def read_state(block: SharedBlock, simulator: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Return counters, observations, action log and simulator states as few large arrays.

    Args:
        block: The shared block; nothing may be in flight.
        simulator: Encoded state by row, for simulators that can give one. Stored as one
            zero-padded array, because thousands of small ones make a checkpoint slow.
    """
    num_envs = len(block["status"])
    sizes = np.array([len(simulator.get(row, ())) for row in range(num_envs)], np.int64)
    states = np.zeros((num_envs, sizes.max(initial=0)), np.uint8)
    for row, state in simulator.items():
        states[row, : len(state)] = state
    longest = int(block["steps"].max(initial=0))
    return {
        "num_envs": num_envs,
        "episode": {name: block[name].copy() for name in EPISODE_FIELDS},
        "observation": {key: array.copy() for key, array in block.group("observation").items()},
        "log": block["log"][:, :longest].copy(),
        "simulator": {"state": states, "size": sizes},
    }


def write_state(
    block: SharedBlock, state: Mapping[str, Any], first_env: int
) -> dict[int, dict[str, Any]]:
    """Write ``state`` into the block and return by row how its env is restored.

    Raises:
        CheckpointError: The state is that of other envs.
    """
    saved = (int(state["first_env"]), int(state["num_envs"]))
    present = (first_env, len(block["status"]))
    if saved != present:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved[1]} envs from number {saved[0]} on, and "
            f"this worker has {present[1]} from number {present[0]} on; resume with the same envs"
        )
    observations = block.group("observation")
    arrays = {
        **{name: (block[name], state["episode"][name]) for name in EPISODE_FIELDS},
        **{key: (array, state["observation"].get(key)) for key, array in observations.items()},
        "actions": (block["log"][:, : np.shape(state["log"])[1]], state["log"]),
    }
    for name, (target, value) in arrays.items():
        if value is None or target.shape != np.shape(value):
            raise CheckpointError(
                f"the checkpoint is of another env: '{name}' has shape "
                f"{None if value is None else np.shape(value)} instead of {target.shape}"
            )
        target[...] = value
    states, sizes = state["simulator"]["state"], state["simulator"]["size"]
    return {
        row: {"state": np.asarray(states[row, : int(size)])}
        for row, size in enumerate(sizes)
        if size
    }
