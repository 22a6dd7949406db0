"""The shared memory of one vector env, one row per env, and what of it a checkpoint holds.

Everything that an env goes on from is a row of its own, and numbers of envs are those of the whole
run: the envs of a checkpoint can be divided anew among another number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    "task": "<i8",
    "begun": "?",  # whether the reset of the present episode went well
}
# For every env and task: resets that failed, that went well, episodes given to the next task.
_TASK_RESETS = "task_resets"


def block_fields(spec: EnvSpec, num_envs: int, max_chunk: int, processes: int) -> Fields:
    """Name, shape and type of every array of the block."""
    per_env: dict[str, tuple[tuple[int, ...], Any]] = {
        **{name: ((), kind) for name, kind in EPISODE_FIELDS.items()},
        _TASK_RESETS: ((max(1, len(spec.task_descriptions)), 3), "<i8"),
        "seed_shift": ((), "<i8"),  # by how much a batch moved on from the seed
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
        "records": ((), RECORD_DTYPE),
    }
    for key, shape in spec.observation_shapes.items():
        per_env[f"observation/{key}"] = (shape, spec.observation_dtypes[key])
        per_env[f"final/{key}"] = (shape, spec.observation_dtypes[key])
    return {
        **{name: ((num_envs, *shape), np.dtype(kind)) for name, (shape, kind) in per_env.items()},
        # Per process: the row being stepped (-1: none) and a count that grows with every step.
        "progress": ((processes, ALIGNMENT // 8), np.dtype("<i8")),
    }


def write_record(block: SharedBlock, row: int, record: np.void, *, valid: bool) -> None:
    """Write the episode of a row, as it is now, into a record of :data:`RECORD_DTYPE`."""
    for name in ("episode_id", "seed", "episode_return", "success_once", "fail_once", "task"):
        record[name] = block[name][row]
    record["episode_len"] = block["steps"][row]
    record["success_at_end"] = block["success_now"][row]
    record["seed_shift"] = block["seed_shift"][row]
    record["valid"] = valid


def read_state(block: SharedBlock, simulator: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Counters, observations, action log and simulator states as few large arrays.

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
        "episode": {name: block[name].copy() for name in (*EPISODE_FIELDS, _TASK_RESETS)},
        "observation": {key: array.copy() for key, array in block.group("observation").items()},
        "log": block["log"][:, :longest].copy(),
        "simulator": {"state": states, "size": sizes},
    }


def write_state(
    block: SharedBlock, state: Mapping[str, Any], first_env: int
) -> dict[int, np.ndarray]:
    """Write ``state`` into the block and return by row the encoded states of simulators.

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
        **{
            name: (block[name], state["episode"].get(name))
            for name in (*EPISODE_FIELDS, _TASK_RESETS)
        },
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
    return {row: np.asarray(states[row, : int(size)]) for row, size in enumerate(sizes) if size}


def reshard(states: Sequence[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """Divide the envs of some workers among others.

    Args:
        states: :meth:`~rlinf.envs.vector.VectorEnv.state_dict` of each worker, by rank.
        workers: How many there are to be.

    Returns:
        A state for each rank.

    Raises:
        ValueError: The envs do not divide.
    """
    if len(states) == workers:
        return list(states)
    total = sum(int(state["num_envs"]) for state in states)
    if total % workers:
        raise ValueError(f"{total} envs do not divide over {workers} workers")
    size = total // workers
    episode, observation, simulator = (
        {name: _stacked([state[part][name] for state in states]) for name in states[0][part]}
        for part in ("episode", "observation", "simulator")
    )
    log, invalid = (
        _stacked([state[name] for state in states]) for name in ("log", "carried_invalid")
    )
    outcomes = _stacked([state["fault_watch"]["outcomes"] for state in states])
    counts = sum((Counter(state["fault_watch"]["counts"]) for state in states), Counter())

    def part(rank: int) -> dict[str, Any]:
        first = rank * size
        rows = slice(first, first + size)
        sizes, steps = simulator["size"][rows], episode["steps"][rows]
        return {
            "num_envs": size,
            "episode": {name: array[rows] for name, array in episode.items()},
            "observation": {key: array[rows] for key, array in observation.items()},
            "log": log[rows, : int(steps.max(initial=0))],
            "simulator": {
                "state": simulator["state"][rows, : int(sizes.max(initial=0))],
                "size": sizes,
            },
            "first_env": states[0]["first_env"] + first,
            "carried_invalid": invalid[rows],
            # What is counted per worker is shared out, so that sums over workers stay.
            "fault_watch": {
                "outcomes": outcomes[rank::workers],
                "counts": dict(counts) if rank == 0 else {},
            },
        }

    return [part(rank) for rank in range(workers)]


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays [n, ...], or [n, L, ...] of different L, as one; shorter ones padded with zeros."""
    arrays = [np.asarray(part) for part in parts]
    if arrays[0].ndim > 1:
        longest = max(array.shape[1] for array in arrays)
        arrays = [
            np.pad(array, [(0, 0), (0, longest - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])
            for array in arrays
        ]
    return np.concatenate(arrays)
