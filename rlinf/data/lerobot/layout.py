"""Where a LeRobot set of version 3 has what, and how its features are called.

Frames of all episodes lie one behind the other, in the rows of Parquet files and in MP4 videos;
``meta/episodes`` says which are of which episode. https://huggingface.co/docs/lerobot
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.errors import ConfigError, MissingPackageError

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
SOURCE = "meta/rlinf.json"
"""What rlinf says of a set that it recorded; lerobot ignores it."""
VIDEO_HASHES = "video_sha256"
"""Entry of that file: of each video that was written."""
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
ACTION, STATE, IMAGES = "action", "observation.state", "observation.images."
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
INDICES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
CHUNK_SIZE, DATA_MB, VIDEO_MB = 1000, 100, 200
"""Files in a folder, and what a file may grow to."""
NEEDED_FOR = "a LeRobot set"


@dataclass(frozen=True)
class Feature:
    """One entry of every frame.

    Args:
        dtype: ``image``, ``video``, or a numpy type name.
        shape: Of one frame; of pictures [H, W, 3].
        names: Of a vector what each of its numbers is, where the set says so.
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def pictured(self) -> bool:
        """Whether it is a camera."""
        return self.dtype in ("image", "video")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Feature:
        """From its entry in ``meta/info.json``, where channels may come first, and a grey picture
        has one, which is read as three; ValueError."""
        dtype, shape, names = given["dtype"], given["shape"], given.get("names")
        if not isinstance(dtype, str):
            raise ValueError(f"dtype is {dtype!r}, expected the name of a type")
        sized = isinstance(shape, list) and all(type(each) is int and each > 0 for each in shape)
        if not sized:
            raise ValueError(f"shape is {shape!r}, expected a list of whole numbers above 0")
        shape = tuple(shape)
        if dtype in ("image", "video") and len(shape) == 3:
            listed = names if isinstance(names, list) else []
            first = str(listed[0]).startswith("c") if listed else shape[0] in (1, 3)
            shape = (*shape[1:], shape[0]) if first else shape
            shape = (*shape[:2], 3) if shape[2] == 1 else shape
            return cls(dtype, shape)
        told = isinstance(names, list) and len(shape) == 1 and len(names) == shape[0]
        return cls(dtype, shape, tuple(map(str, names or ())) if told else ())


def is_lerobot(directory: Path) -> bool:
    """Whether a directory looks like a LeRobot set, of whatever version."""
    return (directory / INFO).is_file()


def regular_file(path: Path) -> Path:
    """The same path; OSError where there is nothing, or something else than a file, whose reading
    may wait."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    if not path.is_file():
        raise OSError(f"{path} is no file")
    return path


def read_info(directory: Path) -> dict[str, Any]:
    """``meta/info.json``; ConfigError unless it is one of version 3."""
    try:
        info = json.loads(regular_file(directory / INFO).read_text(encoding="utf-8"))
        version, _ = str(info["codebase_version"]), info["features"].items()
        for key in ("data_path", "video_path"):
            if not isinstance(info.get(key) or "", str):
                raise TypeError(f"{key} is {info[key]!r}, expected a text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{directory} is no LeRobot set: {INFO}: {type(error).__name__}: {error}"
        ) from error
    if not version.startswith("v3."):
        # What lerobot has for each step from one version to the next.
        steps = {"v2.0": "convert_dataset_v20_to_v21 and convert_dataset_v21_to_v30",
                 "v2.1": "convert_dataset_v21_to_v30"}  # fmt: skip
        way = f"convert it with lerobot's {steps[version]}" if version in steps else (
            f"nearest: a set of version {VERSION}")  # fmt: skip
        raise ConfigError(
            f"{directory} is of LeRobot's version {version}, expected {VERSION}; {way}"
        )
    found: dict[str, Any] = info
    return found


def features_of(observation_key: str, shape: tuple[int, ...]) -> list[str]:
    """What an observation of an environment is called there; several cameras are one each.

    Args:
        observation_key: ``states``, ``main_images``, ``images.NAME`` …
        shape: Of one observation.

    Raises:
        ConfigError: There is no such feature for it.
    """
    if observation_key == "states":
        return [STATE]
    if observation_key == "proprioception":
        return ["observation.proprioception"]
    named = re.fullmatch(r"(?:(main|wrist|extra_view)_images|images\.(\w+))", observation_key)
    if named is None:
        raise ConfigError(
            f"a LeRobot set has no place for `{observation_key}`; nearest: options of the "
            "environment that leave it out, or --format rlinf"
        )
    name = IMAGES + (named[1] or named[2])
    return [name] if len(shape) == 3 else [f"{name}_{number}" for number in range(shape[0])]


def names_of(parts: Sequence[Sequence[Any]]) -> list[str]:
    """What each number of a vector is called there, of whose (name, size) parts it is made: by the
    name of its part, with its place in it where this has several."""
    return [
        f"{name}_{place}" if size > 1 else str(name)
        for name, size in parts
        for place in range(size)
    ]


def check_video_size(height: int, width: int) -> None:
    """Refuse pictures that cannot be a video, by a ConfigError."""
    if height % 2 or width % 2:
        raise ConfigError(
            f"pictures of {width}×{height} cannot be a video, whose sizes are even; nearest: "
            "--pictures image"
        )


def parquet() -> Any:
    """The package that reads Parquet; MissingPackageError."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackageError("pyarrow", "lerobot", NEEDED_FOR) from error
    return pyarrow.parquet


def numbers_of(path: Path, name: str) -> np.ndarray:
    """All numbers of a column of Parquet in one row; a null is NaN. pyarrow's errors, and a
    ConfigError where rows have different numbers of them."""
    table = parquet().read_table(path, columns=[name], page_checksum_verification=True)
    column = table.column(name).combine_chunks()
    while hasattr(column, "flatten") and column.type.num_fields:
        lengths = np.diff(column.offsets) if hasattr(column, "offsets") else np.zeros(0)
        if len(lengths) and lengths.min() != lengths.max():
            raise ConfigError(
                f"{path}: rows of `{name}` have {lengths.min()} to {lengths.max()} numbers, and "
                "not equally many; copy the set again"
            )
        column = column.flatten()
    found: np.ndarray = column.to_numpy(zero_copy_only=False)
    return found


def av() -> Any:
    """The package that reads and writes videos; MissingPackageError."""
    try:
        import av as found
    except ImportError as error:
        raise MissingPackageError("av", "lerobot", f"{NEEDED_FOR} with videos") from error
    return found
