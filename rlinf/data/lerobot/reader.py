"""Reads a LeRobot set: vectors as arrays, pictures as they are asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.config.nearest import did_you_mean
from rlinf.data.json_files import read_settings
from rlinf.data.lerobot.layout import (
    DATA,
    REWARD,
    SOURCE,
    SUCCESS,
    TASKS,
    VIDEO,
    Feature,
    numbers_of,
    parquet,
    read_info,
    regular_file,
)
from rlinf.data.lerobot.pictures import ImagePictures, VideoPictures
from rlinf.data.lerobot.placement_check import check_video_spans, read_row_tasks
from rlinf.errors import ConfigError


@dataclass(frozen=True)
class LeRobotEpisode:
    """Where an episode lies, and what it was about.

    Args:
        first: Row at which it begins, among all rows of the set.
        length: Frames.
        texts: What was to be done, in words, in one step or another; none where the set does
            not say.
        data: File of its rows.
        videos: By feature, file and the seconds at which it begins and, where the set says so,
            ends there.
    """

    first: int
    length: int
    texts: tuple[str, ...]
    data: Path
    videos: Mapping[str, tuple[Path, float, float | None]]

    @property
    def text(self) -> str:
        """The first of its texts, or nothing."""
        return next(iter(self.texts), "")


class LeRobotSet:
    """A set on this machine. Nothing in it is executed.

    Args:
        directory: Holds ``meta``, ``data`` and perhaps ``videos``.

    Raises:
        ConfigError: It is not whole, or of another version.
        MissingPackageError: pyarrow is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = read_info(directory)
        try:
            self.fps = _rate_of(self.info["fps"])
            self.features = {k: Feature.of(v) for k, v in self.info["features"].items()}
            self.task_numbers, self.tasks = self._guarded(self._read_tasks)
            self.episodes: tuple[LeRobotEpisode, ...] = self._guarded(self._read_episodes)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{directory} is no whole LeRobot set: {type(error).__name__}: {error}"
            ) from error
        if not self.episodes:
            raise ConfigError(f"{directory} holds no episodes")
        self._check_rows()

    def __len__(self) -> int:
        """Frames."""
        last = self.episodes[-1]
        return last.first + last.length

    def feature(self, name: str) -> Feature:
        """A feature by name; ConfigError with the nearest one."""
        if name not in self.features:
            known = [each for each in self.features if each not in ("index", "task_index")]
            raise ConfigError(
                f"{self.directory} has no feature `{name}`; {did_you_mean(name, known)}"
            )
        return self.features[name]

    def vectors(self, name: str) -> np.ndarray:
        """All rows of a feature that is no camera, [N, D] float32; ConfigError."""
        return np.concatenate(list(self.vector_parts(name)()))

    def vector_parts(self, name: str) -> Callable[[], Any]:
        """Reads the same file by file, each [n, D] float32, whenever it is called."""
        feature = self.feature(name)
        width = int(np.prod(feature.shape)) if feature.shape else 1
        if feature.pictured or feature.dtype == "string":
            raise ConfigError(f"`{name}` of {self.directory} is no vector, but {feature.dtype}")

        def read(path: Path) -> np.ndarray:
            values = numbers_of(path, name)
            if values.size % width or values.size // width != self._lengths[path]:
                raise ConfigError(
                    f"{path}: `{name}` has {values.size} numbers in {self._lengths[path]} rows, "
                    f"meta/info.json says {width} each"
                )
            if values.dtype.kind not in "biuf":
                raise ConfigError(f"{path}: `{name}` holds no numbers; copy the set again")
            rows: np.ndarray = values.reshape(-1, width).astype(np.float32)
            return rows

        return lambda: (self._guarded(read, path) for path in self._lengths)

    def pictures(self, name: str) -> VideoPictures | ImagePictures:
        """A camera; ConfigError where the feature is none."""
        feature = self.feature(name)
        if not feature.pictured:
            cameras = [each for each, found in self.features.items() if found.pictured]
            raise ConfigError(
                f"`{name}` of {self.directory} is no camera; "
                f"{did_you_mean(name, cameras) or 'it has no pictures'}"
            )
        if feature.dtype == "video":
            begins = [(each.first, *each.videos[name][:2]) for each in self.episodes]
            return VideoPictures(name, feature.shape, begins, len(self), self.fps)
        files: dict[Path, int] = {}
        for each in self.episodes:
            files.setdefault(each.data, each.first)
        ordered = [(first, path) for path, first in files.items()]
        return ImagePictures(name, feature.shape, ordered, len(self))

    @cached_property
    def success(self) -> tuple[bool, ...]:
        """Of each episode; all, in a set that does not say."""
        if SUCCESS not in self.features:
            return (True,) * len(self.episodes)
        said = self.vectors(SUCCESS)[:, 0] > 0
        return tuple(bool(said[each.first :][: each.length].any()) for each in self.episodes)

    @cached_property
    def rewards(self) -> np.ndarray:
        """[N] float32; zeros in a set without."""
        has = REWARD in self.features
        return self.vectors(REWARD)[:, 0] if has else np.zeros(len(self), np.float32)

    @cached_property
    def source(self) -> dict[str, Any]:
        """What `rlinf record` wrote beside it; empty for sets of others."""
        path = self.directory / SOURCE
        return read_settings(path) if path.exists() else {}

    # -- files ----------------------------------------------------------------------------------

    def _guarded(self, read: Callable[..., Any], *file: Path) -> Any:
        """What a file holds, or several do; ConfigError where it is missing or damaged."""
        try:
            return read(*file)
        except (OSError, ValueError) as error:  # the former are most errors of pyarrow about files
            if not isinstance(error, OSError) and not type(error).__module__.startswith("pyarrow"):
                raise
            why = str(error).partition("\n")[0]
            which = "".join(f"{os.path.relpath(each, self.directory)}: " for each in file
                            if str(each) not in why)  # fmt: skip
            raise ConfigError(
                f"{self.directory} is no whole LeRobot set: {which}{why}; copy it again"
            ) from error

    def _read_tasks(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Numbers, ascending, and texts; the column of the texts is pandas' index, of whatever
        name where it is the only one."""
        if not (self.directory / TASKS).exists() and self.info.get("total_tasks") == 0:
            return np.zeros(0, np.int64), ()  # otherwise rows are of tasks that only it tells apart
        columns = parquet().read_table(regular_file(self.directory / TASKS)).to_pydict()
        numbers = columns.pop("task_index")
        named = [each for each in ("task", "__index_level_0__") if each in columns] or [*columns]
        if len(columns) != 1 and named == [*columns]:
            others = ", ".join(columns) or "nothing"
            raise ValueError(f"{TASKS} has {others} beside task_index, expected a column `task`")
        texts = columns[named[0]]
        known = dict(sorted(zip(numbers, texts, strict=True)))
        return np.array([*known], np.int64), tuple(map(str, known.values()))

    def _read_episodes(self) -> tuple[LeRobotEpisode, ...]:
        rows: list[dict[str, Any]] = []
        for path in sorted(self.directory.glob("meta/episodes/*/*.parquet")):
            rows += self._guarded(_rows_of_episodes, path)
        rows.sort(key=lambda row: row["episode_index"])
        return tuple(self._episode(row) for row in rows)

    def _episode(self, row: Mapping[str, Any]) -> LeRobotEpisode:
        def path(pattern: str, kind: str, **more: str) -> Path:
            chunk, file = (row[f"{kind}/{each}_index"] for each in ("chunk", "file"))
            return self.directory / pattern.format(chunk_index=chunk, file_index=file, **more)

        videos = {
            name: (
                path(self.info.get("video_path") or VIDEO, f"videos/{name}", video_key=name),
                float(row[f"videos/{name}/from_timestamp"]),
                None if (end := row.get(f"videos/{name}/to_timestamp")) is None else float(end),
            )
            for name, feature in self.features.items()
            if feature.dtype == "video"
        }
        return LeRobotEpisode(
            first=int(row["dataset_from_index"]),
            length=int(row["length"]),
            texts=tuple(str(text) for text in row.get("tasks") or ()),
            data=path(self.info.get("data_path") or DATA, "data"),
            videos=videos,
        )

    def _check_rows(self) -> None:
        """Refuse files that do not hold the rows of their episodes."""
        self._compare_total("episodes", len(self.episodes))
        expected = 0
        wanted: dict[Path, int] = {}
        for number, episode in enumerate(self.episodes):
            if episode.length < 1:
                raise ConfigError(
                    f"{self.directory}: episode {number} has {episode.length} steps; nearest: a "
                    "set without it, made with lerobot-edit-dataset"
                )
            if episode.first != expected:
                raise ConfigError(
                    f"{self.directory}: episode {number} begins at row {episode.first}, expected "
                    f"{expected}"
                )
            expected += episode.length
            wanted[episode.data] = wanted.get(episode.data, 0) + episode.length
        for path, rows in wanted.items():
            self._guarded(regular_file, path)
            found = self._guarded(parquet().read_metadata, path).num_rows
            if found != rows:
                raise ConfigError(
                    f"{path} holds {found} rows, the episodes in it {rows}; copy the set again"
                )
        self._lengths = wanted
        for name, feature in self.features.items():
            if feature.dtype == "video":
                spans = [each.videos[name] for each in self.episodes]
                check_video_spans(name, spans, [e.length for e in self.episodes], self.fps)
        filmed = any(each.dtype == "video" for each in self.features.values())
        read = partial(
            read_row_tasks, wanted, self.episodes, self.fps, self.task_numbers, filmed=filmed
        )
        numbers = self._guarded(read)
        self.texts, self.text_numbers = self._texts_of_rows(numbers)
        self._compare_total("frames", expected)

    def _compare_total(self, what: str, count: int) -> None:
        """Refuse another number than ``meta/info.json`` says."""
        if (told := self.info.get(f"total_{what}", count)) != count:
            raise ConfigError(
                f"{self.directory}: meta/episodes has {count} {what}, meta/info.json says {told}; "
                "copy the set again"
            )

    def _texts_of_rows(self, numbers: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
        """The texts, and which of them each row is of; what lerobot says of an episode agrees."""
        if not self.tasks:
            texts = tuple(dict.fromkeys(each.text for each in self.episodes))
            of = [texts.index(each.text) for each in self.episodes]
            return texts, np.repeat(of, [each.length for each in self.episodes])
        for number, each in enumerate(self.episodes):
            seen = {self.tasks[n] for n in set(numbers[each.first :][: each.length].tolist())}
            if each.texts and not seen <= set(each.texts):
                raise ConfigError(
                    f"{self.directory}: the rows of episode {number} are of "
                    f"{', '.join(sorted(map(repr, seen)))}, meta/episodes says "
                    f"{', '.join(sorted(map(repr, each.texts)))}; copy the set again"
                )
        return self.tasks, numbers

    def require_videos(self, name: str) -> None:
        """Refuse, without looking into any, videos of a camera that are missing or empty."""
        if isinstance(pictures := self.pictures(name), VideoPictures):
            pictures.require_files()

    def check_videos(self, names: Sequence[str]) -> None:
        """Refuse videos that are missing, broken, or shorter than their episodes."""
        for name in names:
            pictures = self.pictures(name)
            if isinstance(pictures, VideoPictures):
                pictures.check()


def _rows_of_episodes(path: Path) -> list[dict[str, Any]]:
    """What a file says of its episodes, but for their statistics."""
    names = parquet().read_schema(regular_file(path)).names
    kept = [name for name in names if not name.startswith("stats/")]
    rows: list[dict[str, Any]] = parquet().read_table(path, columns=kept).to_pylist()
    return rows


def _rate_of(given: Any) -> float:
    """Frames per second; ValueError unless it is a number above zero."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ValueError(f"fps is {given!r}, expected a number above 0")
    return float(given)
