"""Refuses rows and spans of video that lie elsewhere than ``meta/episodes`` says."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlinf.data.lerobot.layout import INDICES, numbers_of, parquet
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.data.lerobot.reader import LeRobotEpisode

log = logging.getLogger(__name__)

_AGAIN = "copy the set again"


def read_row_tasks(
    rows: Mapping[Path, int],
    episodes: Sequence[LeRobotEpisode],
    fps: float,
    tasks: np.ndarray,
    *,
    filmed: bool,
) -> np.ndarray:
    """Which of the tasks each row is of, [N] int64, once every row is where its episode has it.

    Training takes row ``first + k`` as step k of its episode, and a video's frame by that number,
    so rows in another order would be learnt from as if nothing were wrong.

    Args:
        rows: Number of rows by file, in the order in which they are read.
        episodes: One behind the other.
        fps: Frames per second.
        tasks: Numbers that rows may have, ascending; none: they are not looked at.
        filmed: Whether there are videos, whose frames are told by time. Without, times that do not
            fit the rate, as some converted sets have them, are no more than a warning.

    Raises:
        ConfigError: A row is another one than expected, or of no task; with both.
    """
    lengths = [each.length for each in episodes]
    episode = np.repeat(np.arange(len(episodes)), lengths)
    frame = np.arange(len(episode)) - np.repeat([each.first for each in episodes], lengths)
    wanted = {"episode_index": episode, "frame_index": frame, "index": np.arange(len(episode)),
              "timestamp": frame / fps}  # fmt: skip
    found, first = np.zeros(len(episode), np.int64), 0
    for path, count in rows.items():
        names = parquet().read_schema(path).names
        for name in INDICES:
            if name not in names:
                raise ConfigError(f"{path} has no column `{name}`; {_AGAIN}")
        for name, values in wanted.items():
            here = values[first : first + count]
            # Half a frame off in time is another frame; a null is NaN, and equal to nothing.
            near = np.abs(_as_numbers(path, name, count) - here) < (
                0.5 / fps if name == "timestamp" else 0.5)  # fmt: skip
            if not near.all():
                row = int(np.argmin(near))
                why = (
                    f"{path}: row {row} has {name} {numbers_of(path, name)[row]}, where "
                    f"meta/episodes has step {frame[first + row]} of episode "
                    f"{episode[first + row]}, that is {here[row]:g}"
                )
                if name != "timestamp":
                    raise ConfigError(f"{why}; {_AGAIN}")
                why += f" at the fps of meta/info.json, {fps:g}"
                if filmed:
                    raise ConfigError(f"{why}; its videos could show other frames: convert it anew")
                log.warning("%s", why)
        if len(tasks):
            numbers = _as_numbers(path, "task_index", count)
            known = np.isin(numbers, tasks)
            if not known.all():
                row = int(np.argmin(known))
                raise ConfigError(
                    f"{path}: row {row} has task_index {numbers[row]:g}, and meta/tasks.parquet "
                    f"has {len(tasks)} tasks from {tasks[0]} to {tasks[-1]}; {_AGAIN}"
                )
            found[first : first + count] = np.searchsorted(tasks, numbers.astype(np.int64))
        first += count
    return found


def _as_numbers(path: Path, name: str, count: int) -> np.ndarray:
    """A column as [n] float64; ConfigError."""
    values = numbers_of(path, name)
    try:
        found = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: `{name}` holds no numbers; {_AGAIN}") from error
    if len(found) != count:
        raise ConfigError(f"{path}: `{name}` has {len(found)} numbers in {count} rows; {_AGAIN}")
    return found


def check_video_spans(
    name: str, spans: Sequence[tuple[Path, float, float | None]], lengths: Sequence[int], fps: float
) -> None:
    """Refuse spans of a video that are not as long as their episodes, or overlap.

    Args:
        name: Of the camera.
        spans: File, begin and end in seconds of each episode; no end where the set has none.
        lengths: Frames of each episode.
        fps: Frames per second.

    Raises:
        ConfigError: With the episode.
    """
    ends: dict[Path, float] = {}
    for number, ((path, begin, told), length) in enumerate(zip(spans, lengths, strict=True)):
        where = f"meta/episodes: `{name}` of episode {number}"
        if not (math.isfinite(begin) and begin >= 0):
            raise ConfigError(f"{where} begins at {begin} s of {path}; {_AGAIN}")
        end = begin + length / fps
        if told is not None and not abs(told - end) < 0.5 / fps:
            raise ConfigError(
                f"{where} lasts from {begin:g} to {told:g} s of {path}, and has {length} frames, "
                f"that is {length / fps:g} s; {_AGAIN}"
            )
        if begin < ends.get(path, 0.0) - 0.5 / fps:
            raise ConfigError(
                f"{where} begins at {begin:g} s of {path}, before the end of the episode before it "
                f"at {ends[path]:g} s; {_AGAIN}"
            )
        ends[path] = end
