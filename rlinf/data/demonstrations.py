"""Recorded episodes to learn from: what was seen, and what was done about it.

On disk a set is a directory: ``frames.safetensors`` holds the arrays of all episodes one behind
the other, ``info.json`` says where each episode begins and where it comes from. Nothing in it is
executed when it is read. It is written beside its place and renamed, so that half a set is never
found.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlinf.errors import ConfigError

FORMAT = "rlinf-demonstrations/1"
_FRAMES, _INFO = "frames.safetensors", "info.json"
_OBSERVATION = "observations."


@dataclass(frozen=True)
class Demonstration:
    """One recorded episode of H primitive steps.

    Args:
        observations: By key [H, ...], what was seen before each action.
        actions: [H, A] float32, what was done.
        rewards: [H] float32.
        seed: Of the reset that began the episode.
        success: Whether it succeeded.
    """

    observations: Mapping[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    seed: int
    success: bool

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class EpisodeInfo:
    """Where an episode lies in a set, and how it went."""

    first: int
    """Its first step among those of all episodes."""
    length: int
    """Primitive steps."""
    seed: int
    """Of the reset that began it."""
    success: bool
    """Whether it succeeded."""
    episode_return: float
    """Sum of its rewards."""


@dataclass(frozen=True)
class Demonstrations:
    """A set of episodes, one behind the other.

    Args:
        observations: By key [N, ...] over the N primitive steps of all episodes.
        actions: [N, A] float32.
        rewards: [N] float32.
        episodes: Where each episode lies.
        source: Where the set comes from, as JSON values: environment, who acted.
    """

    observations: Mapping[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    episodes: tuple[EpisodeInfo, ...]
    source: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.actions)

    def __str__(self) -> str:
        good = sum(episode.success for episode in self.episodes)
        return (
            f"{len(self.episodes)} episodes ({good} successful), {len(self)} primitive steps, "
            f"actions [{self.actions.shape[1]}]"
        )

    @staticmethod
    def of(episodes: Sequence[Demonstration], source: Mapping[str, Any]) -> Demonstrations:
        """Join episodes.

        Raises:
            ValueError: There is none, or they do not hold the same arrays.
        """
        if not episodes:
            raise ValueError("a set of demonstrations needs at least one episode")
        firsts = np.cumsum([0, *(len(episode) for episode in episodes)])
        return Demonstrations(
            observations={
                key: np.concatenate([episode.observations[key] for episode in episodes])
                for key in episodes[0].observations
            },
            actions=np.concatenate([episode.actions for episode in episodes]),
            rewards=np.concatenate([episode.rewards for episode in episodes]),
            episodes=tuple(
                EpisodeInfo(
                    first=int(first),
                    length=len(episode),
                    seed=episode.seed,
                    success=episode.success,
                    episode_return=float(episode.rewards.sum()),
                )
                for first, episode in zip(firsts, episodes, strict=False)
            ),
            source=source,
        )

    def split(self, held_out: int) -> tuple[Demonstrations, Demonstrations]:
        """All but the last ``held_out`` episodes, and those.

        Raises:
            ValueError: Fewer than one episode is left on a side.
        """
        if not 0 < held_out < len(self.episodes):
            raise ValueError(
                f"{held_out} of {len(self.episodes)} episodes cannot be held out; from 1 to "
                f"{len(self.episodes) - 1}"
            )
        kept = len(self.episodes) - held_out
        return self._range(0, kept), self._range(kept, len(self.episodes))

    def _range(self, begin: int, end: int) -> Demonstrations:
        return Demonstrations.of(list(self)[begin:end], self.source)

    def __iter__(self) -> Iterator[Demonstration]:
        for episode in self.episodes:
            part = slice(episode.first, episode.first + episode.length)
            yield Demonstration(
                observations={key: array[part] for key, array in self.observations.items()},
                actions=self.actions[part],
                rewards=self.rewards[part],
                seed=episode.seed,
                success=episode.success,
            )

    def chunks(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The action chunk that begins at every step.

        A chunk that reaches beyond the end of its episode repeats the last action there, and says
        so.

        Args:
            size: C, primitive actions of a chunk.

        Returns:
            actions: [N, C, A] float32.
            acted: [N, C] bool, False beyond the end of the episode.
        """
        ends = np.repeat(
            [episode.first + episode.length for episode in self.episodes],
            [episode.length for episode in self.episodes],
        )
        steps = np.arange(len(self))[:, None] + np.arange(size)
        acted = steps < ends[:, None]
        return self.actions[np.minimum(steps, ends[:, None] - 1)], acted

    # -- files ----------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the set to a directory that does not exist.

        Raises:
            FileExistsError: There is something at that place.
        """
        if directory.exists():
            raise FileExistsError(f"{directory} exists")
        unfinished = directory.with_name(f".{directory.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        try:
            observations = {_OBSERVATION + key: a for key, a in self.observations.items()}
            arrays = {**observations, "actions": self.actions, "rewards": self.rewards}
            save_file(
                {key: np.ascontiguousarray(array) for key, array in arrays.items()},
                unfinished / _FRAMES,
            )
            info = {
                "format": FORMAT,
                "source": dict(self.source),
                "episodes": [asdict(episode) for episode in self.episodes],
            }
            (unfinished / _INFO).write_text(json.dumps(info, indent=1) + "\n")
            os.replace(unfinished, directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    @staticmethod
    def load(directory: Path) -> Demonstrations:
        """Read a set.

        Raises:
            ConfigError: There is none, or it is not whole.
        """
        try:
            info = json.loads((directory / _INFO).read_text())
            if info["format"] != FORMAT:
                raise ConfigError(
                    f"{directory} is of the format {info['format']!r}, expected {FORMAT!r}"
                )
            arrays = load_file(directory / _FRAMES)
            episodes = tuple(EpisodeInfo(**episode) for episode in info["episodes"])
            found = Demonstrations(
                observations={
                    key.removeprefix(_OBSERVATION): array
                    for key, array in arrays.items()
                    if key.startswith(_OBSERVATION)
                },
                actions=arrays["actions"],
                rewards=arrays["rewards"],
                episodes=episodes,
                source=info["source"],
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"{directory} holds no demonstrations ({type(error).__name__}: {error}); record "
                "some with: rlinf record"
            ) from error
        lengths = {len(array) for array in arrays.values()}
        if lengths != {sum(episode.length for episode in episodes)}:
            raise ConfigError(f"{directory}: the arrays are not as long as the episodes together")
        return found
