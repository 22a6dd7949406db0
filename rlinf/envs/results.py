"""What comes back from envs: observations, rewards, faults and ended episodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Dict, Optional  # noqa: UP035 - the env side runs under 3.8 as well

import numpy as np

from rlinf.errors import own_line

TASK_IDS = "task_ids"
"""The entry of an observation that says which of several tasks an env is in: int64, an index into
the table of descriptions. The host adds it, not the adapter."""

ACTION_MASK = "action_mask"
"""The entry of an observation that says which action dimensions [A] an env has, bool; only where
envs that take different actions are joined to one batch."""


class FaultReason(str, Enum):  # noqa: UP042 - the env side runs under 3.8 as well
    """Why the data of an env cannot be used."""

    CRASH = "crash"
    """The env process ended."""
    HANG = "hang"
    """No primitive step or reset ended within the deadline."""
    NOT_FINITE = "not_finite"
    """A NaN or infinite reward or observation."""
    MALFORMED = "malformed"
    """An observation or reward of another shape, type or set of keys than declared."""
    BLACK = "black"
    """A picture without a lit pixel, of a camera that always sees something: the renderer is
    lost."""
    EXCEPTION = "exception"
    """The simulator raised."""
    MEMORY = "memory"
    """The env process held more memory than ``memory_limit_mb``, and was replaced."""
    NOT_REPLAYABLE = "not_replayable"
    """The env was lost through no fault of its own, and cannot be brought back to where it was."""


@dataclass(frozen=True)
class EnvFault:
    """One closed episode that must not be trained on."""

    env: int
    """Global env number, or -1 when an idle process ended and no episode was lost."""
    reason: FaultReason
    detail: str
    """Message or stack of the env side."""
    episode_id: int
    """The episode that was lost, -1 when none was."""
    section: Optional[int] = None  # noqa: UP045 - the env side runs under 3.8 as well
    """In which of several simulators, by its place in ``env.train``."""

    @property
    def summary(self) -> str:
        """See :func:`fault_in_a_line`."""
        return fault_in_a_line(self.reason, self.detail)


def fault_in_a_line(reason: FaultReason, detail: str) -> str:
    """What the simulator said, in one line: what it raised, how it ended, what is wrong."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()] or [""]
    if reason is FaultReason.CRASH and len(lines) > 1:
        return f"{lines[0].partition(';')[0]}; it printed last: {lines[-1]}"
    return f"{lines[-1]}{own_line(lines)}" if reason is FaultReason.EXCEPTION else lines[0]


@dataclass(frozen=True)
class EpisodeRecord:
    """One ended episode."""

    env: int
    """Global env number."""
    episode_id: int
    """Unique number of the episode in the run, or the id given by the episode list."""
    seed: int
    """Seed of its reset."""
    success_once: bool
    success_at_end: bool
    fail_once: bool
    episode_return: float
    """Sum of the simulator's rewards (before ``reward_scale`` and ``step_penalty``)."""
    episode_len: int
    """Primitive steps."""
    reward: float
    """``episode_return / episode_len``."""
    valid: bool
    """False when a fault closed the episode."""
    task: int = 0
    """Which of the env's tasks it ended in."""
    seed_shift: int = 0
    """By how much the simulator moved on from the seed, where it could not start that one."""


RECORD_DTYPE = np.dtype(
    [
        ("episode_id", "<i8"),
        ("seed", "<i8"),
        ("episode_return", "<f8"),
        ("episode_len", "<i8"),
        ("success_once", "?"),
        ("success_at_end", "?"),
        ("fail_once", "?"),
        ("valid", "?"),
        ("task", "<i8"),
        ("seed_shift", "<i8"),
    ]
)
"""How one ended episode lies in shared memory."""


def read_record(env: int, row: np.void) -> EpisodeRecord:
    """The record that an env process wrote into shared memory."""
    values = {name: row[name].item() for name in RECORD_DTYPE.names or ()}
    mean = values["episode_return"] / max(values["episode_len"], 1)
    return EpisodeRecord(env=env, reward=mean, **values)


def unplayed_record(env: int, episode_id: int, seed: int, task: int) -> EpisodeRecord:
    """The record of an episode that could not be begun."""
    nothing = np.zeros(1, RECORD_DTYPE)[0]
    for name, value in (("episode_id", episode_id), ("seed", seed), ("task", task)):
        nothing[name] = value
    return read_record(env, nothing)


Observations = Dict[str, np.ndarray]  # noqa: UP006


@dataclass(frozen=True)
class VectorStep:
    """What followed one action chunk of the n envs of a stage.

    Args:
        observations: By key [n, ...], after auto-reset.
        rewards: [n, C] float32; 0 for the columns that follow the end of an episode, whose actions
            were not executed.
        terminations: [n, C] bool; only the last column is ever set.
        truncations: [n, C] bool; only the last column is ever set.
        final_observations: By key [m, ...] for the m rows of ``final_mask``, before auto-reset;
            None when m is 0.
        final_mask: [n] bool, envs whose episode ended and that were reset.
        valid: [n] bool, False where a fault closed the episode: the env was rebuilt and its
            observation is that of a fresh episode.
        active: [n] bool, False where nothing was executed: the episode had ended before (no
            auto-reset), or the episode list holds no more for this env.
        episode_ids: [n] int64, the episode that the chunk belonged to.
        reset_seeds: [n] int64, the seed that this episode really has.
        faults: What went wrong.
        episodes: The episodes that ended.
    """

    observations: Observations
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    final_observations: Observations | None
    final_mask: np.ndarray
    valid: np.ndarray
    active: np.ndarray
    episode_ids: np.ndarray
    reset_seeds: np.ndarray
    faults: tuple[EnvFault, ...]
    episodes: tuple[EpisodeRecord, ...]
