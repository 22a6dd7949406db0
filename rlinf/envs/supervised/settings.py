"""What each process of a vector env is told: its envs, its cores, its episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError


def check_division(num_envs: int, stages: int, group_size: int) -> None:
    """Refuse a number of envs that its stages and groups do not divide.

    Raises:
        ConfigError: With the nearest number that they do.
    """
    if num_envs < 1 or num_envs % stages:
        raise ConfigError(f"{num_envs} envs do not divide into {stages} stages")
    if (num_envs // stages) % group_size:
        raise ConfigError(
            f"{num_envs // stages} envs per stage do not divide into groups of {group_size}; "
            f"nearest: {max(num_envs // stages // group_size, 1) * group_size}"
        )


def process_settings(
    config: EnvConfig,
    seed: int,
    purpose: str,
    total_envs: int,
    episodes: Sequence[tuple[int, int]] | None,
) -> dict[str, Any]:
    """What all processes have in common, as plain values.

    Args:
        config: What to build.
        seed: Seed of the run.
        purpose: ``train`` or ``eval``.
        total_envs: Envs over all workers.
        episodes: (episode id, seed) list to walk, if any.
    """
    return {
        "type": config.type,
        "options": dataclasses.asdict(config.adapter_options),
        "rules": {
            "max_episode_steps": config.max_episode_steps,
            "auto_reset": config.auto_reset,
            "ignore_terminations": config.ignore_terminations,
            "reward_scale": config.reward_scale,
        },
        "schedule": {
            "run_seed": seed,
            "purpose": purpose,
            "group_size": config.group_size,
            "fixed": config.use_fixed_reset_states,
            "episodes": None if episodes is None else listed(episodes),
            "total_envs": total_envs,
        },
    }


def listed(episodes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The (episode id, seed) list as plain values."""
    return [[int(number), int(seed)] for number, seed in episodes]


def in_a_round_from(cores: list[int], first: int) -> list[int]:
    """The cores in a round from the ``first`` on, so that workers begin at different ones."""
    first %= len(cores)
    return cores[first:] + cores[:first]


def rows_of_processes(num_envs: int, stages: int, processes: int) -> list[list[list[int]]]:
    """Return the rows by process and stage: each stage is spread over all processes."""
    slices = np.arange(num_envs).reshape(stages, -1)
    parts = [np.array_split(rows, processes) for rows in slices]
    return [[part[process].tolist() for part in parts] for process in range(processes)]
