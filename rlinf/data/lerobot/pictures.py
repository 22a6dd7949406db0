"""Pictures of a LeRobot set, decoded when they are asked for, in bounded memory."""

from __future__ import annotations

import io
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.lerobot.layout import av, parquet, regular_file
from rlinf.errors import ConfigError

log = logging.getLogger(__name__)

_OPEN_VIDEOS = 16
_CACHED_BYTES = 256 * 2**20
_LARGE_GROUP, _USUAL_GROUP = 16 * 2**20, 2**20
"""Bytes of a row group that is worth a word where it is read again, and of one that is not."""
_SKIPPED_FRAMES = 8
"""Up to so many frames ahead are decoded and thrown away, rather than looked for."""


class Stacked:
    """Several cameras as one observation [N, n, H, W, 3]."""

    def __init__(self, cameras: Sequence[VideoPictures | ImagePictures]) -> None:
        self._cameras = cameras
        self.shape = (len(cameras[0]), len(cameras), *cameras[0].shape[1:])

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([camera[rows] for camera in self._cameras], axis=1)


class _Pictures:
    """[N, H, W, 3] uint8 of one camera; indexed with an array of rows."""

    def __init__(self, name: str, length: int, shape: tuple[int, ...]) -> None:
        self._name = name
        self.shape = (length, *shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        wanted = np.asarray(rows)
        found = np.empty((len(wanted), *self.shape[1:]), np.uint8)
        order = np.argsort(wanted, kind="stable")
        for place, picture in zip(order, self._in_order(wanted[order]), strict=True):
            if picture.shape != self.shape[1:]:
                raise ConfigError(
                    f"{self._name}: a picture is {list(picture.shape)}, meta/info.json says "
                    f"{list(self.shape[1:])}"
                )
            found[place] = picture
        return found

    def _in_order(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        raise NotImplementedError


class VideoPictures(_Pictures):
    """Frames of MP4 files; what lies between two that are asked for is not decoded.

    Args:
        name: Of the feature.
        shape: [H, W, 3].
        episodes: (first row, file, seconds at which the episode begins in it) of each.
        length: N.
        fps: Frames per second.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        episodes: Sequence[tuple[int, Path, float]],
        length: int,
        fps: float,
    ) -> None:
        super().__init__(name, length, shape)
        self._episodes, self._fps = episodes, fps
        self._firsts = [first for first, _, _ in episodes]
        self._open: OrderedDict[Path, _Video] = OrderedDict()

    def check(self) -> None:
        """Refuse a file that is missing, cannot be opened, or ends before its last frame."""
        ends = [*self._firsts[1:], len(self)]
        last: dict[Path, float] = {}
        for (first, path, begin), end in zip(self._episodes, ends, strict=True):
            last[path] = max(last.get(path, 0.0), begin + (end - first - 1) / self._fps)
        for path, seconds in last.items():
            _Video(path, self._fps).frame(seconds)

    def require_files(self) -> None:
        """Refuse a file that is missing or empty; none is opened, as there may be thousands."""
        for path in dict.fromkeys(path for _, path, _ in self._episodes):
            if not (path.is_file() and path.stat().st_size):
                found = "is empty" if path.is_file() else "is missing"
                raise ConfigError(f"{path} {found}; copy it again")

    def _in_order(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        for row in rows.tolist():
            first, path, begin = self._episodes[bisect_right(self._firsts, row) - 1]
            yield self._video(path).frame(begin + (row - first) / self._fps)

    def _video(self, path: Path) -> _Video:
        if path not in self._open:
            while len(self._open) >= _OPEN_VIDEOS:
                self._open.popitem(last=False)[1].close()
            self._open[path] = _Video(path, self._fps)
        self._open.move_to_end(path)
        return self._open[path]


class _Video:
    """One open file, and the frame that was decoded last."""

    def __init__(self, path: Path, fps: float) -> None:
        package = av()
        self._path, self._half, self._failure = path, 0.5 / fps, package.FFmpegError
        try:
            self._container = package.open(str(regular_file(path)))
            self._stream = self._container.streams.video[0]
        except (OSError, IndexError, package.FFmpegError) as error:
            raise ConfigError(f"{path} is no whole video: {error}; copy it again") from error
        # Frames are then given as soon as they are decoded.
        self._stream.thread_type = "NONE"
        self._frames: Iterator[Any] = iter(())
        self._time, self._picture = float("inf"), np.zeros(0, np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def frame(self, seconds: float) -> np.ndarray:
        """[H, W, 3] uint8, the frame at a time, to half of its duration; ConfigError."""
        ahead = seconds - self._time
        if abs(ahead) < self._half:
            return self._picture
        try:
            if not 0 < ahead < 2 * self._half * _SKIPPED_FRAMES:
                at = int(seconds / self._stream.time_base)
                self._container.seek(at, stream=self._stream)  # to the key frame before it
                self._frames = self._container.decode(self._stream)
            for frame in self._frames:
                if frame.time > seconds - self._half:
                    break
            else:
                raise ConfigError(
                    f"{self._path} ends before {seconds:.3f} s, where an episode has a frame; "
                    "copy it again"
                )
        except (OSError, self._failure) as error:
            raise ConfigError(f"{self._path} is no whole video: {error}; copy it again") from error
        if frame.time > seconds + self._half:
            raise ConfigError(f"{self._path} has no frame at {seconds:.3f} s")
        self._time, self._picture = frame.time, frame.to_ndarray(format="rgb24")
        return self._picture


class ImagePictures(_Pictures):
    """Encoded pictures in the rows of Parquet files.

    Args:
        name: Of the feature, which is the name of the column.
        shape: [H, W, 3].
        files: (first row, file) of each, one behind the other.
        length: N.

    Raises:
        ConfigError: A file has no such column.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], files: Sequence[tuple[int, Path]], length: int
    ) -> None:
        super().__init__(name, length, shape)
        self._groups: list[tuple[int, Path, int]] = []
        for begin, path in files:
            first, metadata = begin, parquet().read_metadata(path)
            if name not in metadata.schema.to_arrow_schema().names:
                raise ConfigError(f"{path} has no column `{name}`; copy the set again")
            for number in range(metadata.num_row_groups):
                self._groups.append((first, path, number))
                first += metadata.row_group(number).num_rows
        self._firsts = [first for first, _, _ in self._groups]
        self._cache: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._warned = False

    def _in_order(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        from PIL import Image

        for row in rows.tolist():
            group = bisect_right(self._firsts, row) - 1
            encoded = self._encoded(group)[row - self._firsts[group]]
            try:
                with Image.open(io.BytesIO(encoded["bytes"])) as picture:
                    if picture.mode.startswith(("I", "F")):  # as of depth: more than bytes
                        raise ConfigError(f"`{self._name}` holds numbers of mode {picture.mode}, "
                                          "no colours; nearest: another camera")  # fmt: skip
                    yield np.asarray(picture.convert("RGB"))
            except (
                TypeError,
                LookupError,
                OSError,
                SyntaxError,
                Image.DecompressionBombError,
            ) as error:
                path = self._groups[group][1]
                raise ConfigError(f"{path}: {self._name} of row {row} is no picture") from error

    def _read(self, path: Path, number: int) -> Any:
        """A row group's pictures; ConfigError where the file is damaged."""
        try:
            file = parquet().ParquetFile(path, page_checksum_verification=True)
            return file.read_row_group(number, columns=[self._name])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error

    def _encoded(self, group: int) -> list[dict[str, Any]]:
        """The encoded pictures of a row group; those asked for last are kept."""
        if group not in self._cache:
            _, path, number = self._groups[group]
            column = self._read(path, number)
            if group in self._given_up:
                self._warn_of_large_group(path, column)
            self._sizes[group] = column.nbytes
            while self._cache and sum(self._sizes.values()) > _CACHED_BYTES:
                oldest, _ = self._cache.popitem(last=False)
                del self._sizes[oldest]
                self._given_up.add(oldest)
            self._cache[group] = column.column(self._name).to_pylist()
        self._cache.move_to_end(group)
        return self._cache[group]

    def _warn_of_large_group(self, path: Path, column: Any) -> None:
        """Say, once, what makes random draws slow: for each picture a large row group is read."""
        if self._warned or column.nbytes < _LARGE_GROUP:
            return
        self._warned = True
        rows = max(1, column.num_rows * _USUAL_GROUP // column.nbytes)
        log.warning(
            "%s: for a picture of `%s` a row group of %d MiB is read, and they are too many to be "
            "kept (%d MiB): training waits for the disk. Write the files of the set again with "
            "smaller ones: pyarrow.parquet.write_table(pyarrow.parquet.read_table(file), copy, "
            "row_group_size=%d).",
            path, self._name, column.nbytes >> 20, _CACHED_BYTES >> 20, rows,
        )  # fmt: skip
