"""Recorded episodes to learn from: a directory with ``frames.safetensors`` and ``info.json``.

Nothing in it is executed when it is read. It is renamed to its place: half a set is never found.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlinf.checkpoint.files import new_directory
from rlinf.config.nearest import nearest_names
from rlinf.conformance import CheckResult, outcome, require
from rlinf.data.lerobot.layout import is_lerobot, regular_file
from rlinf.envs.base import INSTRUCTION_KEY, instruction_text
from rlinf.envs.results import TASK_IDS
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
    """Where an episode lies among the primitive steps of a set, and how it went."""

    first: int
    length: int
    seed: int
    success: bool
    episode_return: float


@dataclass(frozen=True)
class Demonstrations:
    """A set of episodes, one behind the other.

    Args:
        observations: By key [N, ...] over the N primitive steps of all episodes.
        actions: [N, A] float32.
        rewards: [N] float32.
        episodes: Where each episode lies.
        source: Where the set comes from, as JSON values: ``env`` and the ``spec`` of its
            observations and actions, who acted, with what noise.
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
        """Join episodes, at least one, that hold the same arrays; ValueError for others."""
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

    def row_texts(self) -> tuple[tuple[str, ...], np.ndarray]:
        """What was to be done, in words, which may change within an episode.

        Returns:
            texts: Each once, in the order in which they occur; one is empty where nothing is said.
            numbers: [N] int64, which of them each row is of.
        """
        if INSTRUCTION_KEY in self.observations:
            of_rows = [instruction_text(each) for each in self.observations[INSTRUCTION_KEY]]
        else:
            known = self.source.get("spec", {}).get("task_descriptions") or [""]
            ids = self.observations.get(TASK_IDS, np.zeros(len(self), np.int64))
            of_rows = [str(known[int(number)]) for number in ids]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(of_rows))}
        return tuple(numbers), np.array([numbers[text] for text in of_rows], np.int64)

    # -- files ----------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the set to a directory; FileExistsError where there is something."""
        if directory.exists():
            raise FileExistsError(f"{directory} exists")
        with new_directory(directory) as unfinished:
            arrays = {_OBSERVATION + key: array for key, array in self.observations.items()}
            arrays |= {"actions": self.actions, "rewards": self.rewards}
            frames = save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
            (unfinished / _FRAMES).write_bytes(frames)
            info = {
                "format": FORMAT,
                "sha256": hashlib.sha256(frames).hexdigest(),
                "source": dict(self.source),
                "episodes": [asdict(episode) for episode in self.episodes],
            }
            (unfinished / _INFO).write_text(json.dumps(info, indent=1) + "\n")

    @staticmethod
    def load(directory: Path) -> Demonstrations:
        """Read a set; ConfigError unless it is whole and the one that was written."""
        if not is_recorded(directory):
            raise no_set(directory)
        try:
            info = json.loads((directory / _INFO).read_text())
            if "format" not in info:
                raise no_set(directory)
            if info["format"] != FORMAT:
                raise ConfigError(
                    f"{directory} is of the format {info['format']!r}, expected {FORMAT!r}"
                )
            frames = regular_file(directory / _FRAMES).read_bytes()
            if hashlib.sha256(frames).hexdigest() != info["sha256"]:
                raise ConfigError(
                    f"{directory}: {_FRAMES} is not what was written (its SHA-256 is another than "
                    f"in {_INFO}); restore it, or record the episodes again"
                )
            arrays = load(frames)
            found = Demonstrations(
                observations={
                    key.removeprefix(_OBSERVATION): array
                    for key, array in arrays.items()
                    if key.startswith(_OBSERVATION)
                },
                actions=arrays["actions"],
                rewards=arrays["rewards"],
                episodes=tuple(EpisodeInfo(**episode) for episode in info["episodes"]),
                source=info["source"],
            )
        except FileNotFoundError as error:
            raise ConfigError(f"{directory} holds no whole set: {error}; copy it again") from error
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"{directory} holds no whole set ({type(error).__name__}: {error}); copy it again"
            ) from error
        lengths = {len(array) for array in arrays.values()}
        if lengths != {sum(episode.length for episode in found.episodes)}:
            raise ConfigError(f"{directory}: the arrays are not as long as the episodes together")
        return found


def is_recorded(directory: Path) -> bool:
    """Whether a directory looks like a set."""
    return (directory / _INFO).is_file()


def no_set(path: Path) -> ConfigError:
    """What to say where a set is expected: what is there instead, and which sets are near."""
    if is_lerobot(path):
        return ConfigError(
            f"{path} is a LeRobot set, expected one of the format {FORMAT!r}; look at it with: "
            f"rlinf data show {path}"
        )
    found = f"there are no demonstrations in {path}"
    ways = "record some with: rlinf record RECIPE --out DIRECTORY"
    if path.is_file():
        found += ", which is a file"
    elif not path.exists():
        found += ", which does not exist"
        # As sets are called on the Hugging Face hub, OWNER/NAME, where here is no such OWNER.
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) and not path.parent.exists():
            ways += (
                ", or, where that is the name of a set on the Hugging Face hub: hf download "
                f"{path} --repo-type dataset --local-dir DIRECTORY"
            )
    around = [*path.glob("*"), *path.parents[:2], *path.parent.glob("*")]
    near = [str(each) for each in around if is_recorded(each) or is_lerobot(each)]
    names = nearest_names(str(path), near) or near
    nearest = f"nearest: {', '.join(names[:3])}; or " if near else ""
    return ConfigError(f"{found}; {nearest}{ways}")


# -- whether a set can be learnt from -----------------------------------------------------------


def check_set(demonstrations: Demonstrations) -> list[CheckResult]:
    """What `rlinf check demonstrations` looks at, beside the hash that reading compares."""
    checks = (_check_shapes, _check_numbers, _check_bounds, _check_episodes, _check_success)
    return [outcome(f.__name__.removeprefix("_check_"), f, demonstrations) for f in checks]


def _check_shapes(found: Demonstrations) -> str:
    spec = found.source.get("spec")
    require(spec, "the source says nothing of the spec of observations and actions")
    assert spec is not None
    wanted = {key: tuple(shape) for key, shape in spec["observation_shapes"].items()}
    given = {key: array.shape[1:] for key, array in found.observations.items()}
    require(given == wanted, f"observations {given}, the spec says {wanted}")
    dim = spec["action_dim"]
    require(found.actions.shape[1] == dim, f"actions {found.actions.shape}, the spec has {dim}")
    return f"actions [{dim}], observations {given}"


def _check_numbers(found: Demonstrations) -> str:
    arrays = {**found.observations, "actions": found.actions, "rewards": found.rewards}
    broken = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    require(not broken, f"{', '.join(broken)} hold what is no finite number")
    return "all finite"


def _check_bounds(found: Demonstrations) -> str:
    actions, spec = found.actions, found.source.get("spec") or {}
    low, high = spec.get("action_low", -np.inf), spec.get("action_high", np.inf)
    outside = np.any((actions < np.float32(low)) | (actions > np.float32(high)), axis=1)
    require(not outside.any(), f"{outside.sum()} of {len(outside)} actions are out of bounds")
    return f"actions from {actions.min():.3g} to {actions.max():.3g}"


def _check_episodes(found: Demonstrations) -> str:
    lengths = [episode.length for episode in found.episodes]
    firsts = [episode.first for episode in found.episodes]
    follow = firsts == [0, *np.cumsum(lengths)[:-1]]
    require(follow, "the episodes do not lie one behind the other")
    seeds = len({episode.seed for episode in found.episodes})
    require(seeds == len(firsts), f"{len(firsts)} episodes have {seeds} different seeds")
    return f"{len(lengths)} of {min(lengths)} to {max(lengths)} steps, all seeds different"


def _check_success(found: Demonstrations) -> str:
    good = sum(episode.success for episode in found.episodes)
    require(good, "no episode succeeded")
    return f"{good} of {len(found.episodes)} episodes succeeded"
