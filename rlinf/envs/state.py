"""The state of a vector env, between its shared block and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf.envs.block import EPISODE_FIELDS
from rlinf.errors import CheckpointError
from rlinf.processes.shared_block import SharedBlock


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
