"""Rollouts with random content for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch

from rlinf.data.trajectory import Trajectory


def random_trajectory(
    *,
    steps: int = 6,
    envs: int = 4,
    chunk: int = 1,
    action_dim: int = 2,
    value_dim: int = 1,
    seed: int = 0,
    auto_reset: bool = True,
    **replaced: Any,
) -> Trajectory:
    """A rollout with random numbers and no episode end, unless replaced by keyword.

    With automatic reset the row after an end belongs to another episode.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = (steps, envs)
    tensors: dict[str, Any] = {
        "forward_inputs": {
            "states": normal(*rows, 3),
            "raw_actions": normal(*rows, chunk, action_dim),
        },
        "log_probs": normal(*rows, chunk, action_dim),
        "values": normal(*rows, value_dim),
        "rewards": normal(*rows, chunk),
        "terminations": torch.zeros(*rows, chunk, dtype=torch.bool),
        "truncations": torch.zeros(*rows, chunk, dtype=torch.bool),
        "final_values": torch.zeros(*rows, value_dim),
        "bootstrap_values": normal(envs, value_dim),
        "valid": torch.ones(*rows, dtype=torch.bool),
        "versions": torch.zeros(*rows, dtype=torch.int64),
        "env_ids": torch.arange(envs),
        "episode_ids": torch.arange(envs).expand(rows).clone(),
        "reset_seeds": torch.zeros(*rows, dtype=torch.int64),
    }
    tensors |= replaced
    if auto_reset and "episode_ids" not in replaced:
        ended = (tensors["terminations"] | tensors["truncations"]).any(-1).long()
        tensors["episode_ids"] = tensors["episode_ids"] + 100 * (ended.cumsum(0) - ended)
    return Trajectory(**tensors)


def flags(steps: int, envs: int, where: list[tuple[int, int]], chunk: int = 1) -> torch.Tensor:
    """[T, B, C] bool, true in the last column of the given (row, environment) pairs."""
    result = torch.zeros(steps, envs, chunk, dtype=torch.bool)
    for row, env in where:
        result[row, env, -1] = True
    return result
