"""States of vector envs for another number of workers: the same envs, divided anew.

Everything that an env goes on from is a row of its own, so that a division loses nothing: numbers
of envs are those of the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

_PER_ENV = ("carried_invalid",)


def reshard(states: Sequence[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """Divide the envs of some workers among others.

    Args:
        states: :meth:`~rlinf.envs.vector.SupervisedVectorEnv.state_dict` of each worker, by rank.
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
    whole = _joined(states)
    return [_part(whole, rank * size, size, rank, workers) for rank in range(workers)]


def _joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = states[0]
    outcomes = [np.asarray(state["fault_watch"]["outcomes"], bool) for state in states]
    counts = sum((Counter(state["fault_watch"]["counts"]) for state in states), Counter())
    return {
        "episode": _rows([state["episode"] for state in states]),
        "observation": _rows([state["observation"] for state in states]),
        "log": _stacked([np.asarray(state["log"]) for state in states]),
        "simulator": {
            "state": _stacked([np.asarray(state["simulator"]["state"]) for state in states]),
            "size": np.concatenate([state["simulator"]["size"] for state in states]),
        },
        "first_env": first["first_env"],
        **{name: np.concatenate([state[name] for state in states]) for name in _PER_ENV},
        "fault_watch": {"outcomes": np.concatenate(outcomes), "counts": dict(counts)},
    }


def _part(whole: dict[str, Any], first: int, size: int, rank: int, workers: int) -> dict[str, Any]:
    rows = slice(first, first + size)
    episode = {name: array[rows] for name, array in whole["episode"].items()}
    sizes = whole["simulator"]["size"][rows]
    watch = whole["fault_watch"]
    return {
        "num_envs": size,
        "episode": episode,
        "observation": {key: array[rows] for key, array in whole["observation"].items()},
        "log": whole["log"][rows, : int(episode["steps"].max(initial=0))],
        "simulator": {
            "state": whole["simulator"]["state"][rows, : int(sizes.max(initial=0))],
            "size": sizes,
        },
        "first_env": whole["first_env"] + first,
        **{name: whole[name][rows] for name in _PER_ENV},
        # What is counted per worker is shared out, so that sums over workers stay.
        "fault_watch": {
            "outcomes": watch["outcomes"][rank::workers],
            "counts": watch["counts"] if rank == 0 else {},
        },
    }


def _rows(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays [n, L, ...] of different L as one, shorter ones padded with zeros."""
    longest = max(part.shape[1] for part in parts)
    return np.concatenate(
        [
            np.pad(part, [(0, 0), (0, longest - part.shape[1]), *[(0, 0)] * (part.ndim - 2)])
            for part in parts
        ]
    )
