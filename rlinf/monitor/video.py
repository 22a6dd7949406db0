"""Videos of policies: frames of one or several environments to an mp4 file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np


def write_video(path: Path | str, frames: Sequence[np.ndarray], fps: float = 30) -> Path:
    """Write an H.264 mp4 that browsers play.

    Args:
        path: The file; its directory is made. An existing one is replaced.
        frames: Pictures, each uint8 [H, W, 3]; :func:`tile` makes one of several environments.
        fps: Frames per second.

    Raises:
        OSError: The encoder failed or the disk is full.
    """
    import imageio_ffmpeg

    pictures = _encodable(frames)
    first = next(pictures)  # what cannot be encoded is refused before there is a file
    height, width, _ = first.shape
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.writing.mp4")
    writer = imageio_ffmpeg.write_frames(
        str(temporary),
        (width, height),
        fps=fps,
        macro_block_size=2,
        output_params=["-threads", "1", "-movflags", "+faststart"],
    )
    try:
        with closing(writer):
            writer.send(None)
            for picture in chain([first], pictures):
                writer.send(picture)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _encodable(frames: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Frames of even height and width, each made when the encoder takes it."""
    for picture in _checked(frames):
        height, width, _ = picture.shape
        # The colour format halves both sizes: repeat the last row or column where needed.
        odd = ((0, height % 2), (0, width % 2), (0, 0))
        yield np.ascontiguousarray(np.pad(picture, odd, mode="edge"))


class _Made(Sequence[np.ndarray]):
    """Frames that are made when they are asked for: those of a whole run of episodes, a second
    time, may be more than the memory has."""

    def __init__(self, numbers: range, frame: Callable[[int], np.ndarray]) -> None:
        self._numbers, self._frame = numbers, frame

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(index, slice):
            return _Made(self._numbers[index], self._frame)
        return self._frame(self._numbers[index])


def framed(videos: Sequence[Sequence[np.ndarray]]) -> Sequence[Sequence[np.ndarray]]:
    """Videos whose frames have one size: smaller ones get black margins below and to the right."""
    shapes = [frame.shape for video in videos for frame in video]
    height, width = (max(shape[axis] for shape in shapes) for axis in (0, 1))

    def enlarged(frame: np.ndarray) -> np.ndarray:
        missing = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
        return np.pad(frame, missing)

    if len(set(shapes)) == 1:
        return videos

    def of(video: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return _Made(range(len(video)), lambda number: enlarged(video[number]))

    return [of(video) for video in videos]


def tile(videos: Sequence[Sequence[np.ndarray]]) -> Sequence[np.ndarray]:
    """The frames of several environments, uint8 [H, W, 3] of one size, in a near-square grid.

    Videos that end early stand still until the longest ends.
    """
    shapes = {frame.shape for video in videos for frame in _checked(video)}
    if len(shapes) != 1:
        raise ValueError("videos that are tiled must have frames of one size")
    columns = math.ceil(math.sqrt(len(videos)))
    rows = math.ceil(len(videos) / columns)
    ((height, width, channels),) = shapes

    def picture(number: int) -> np.ndarray:
        tiled = np.zeros((rows * height, columns * width, channels), dtype=np.uint8)
        for place, video in enumerate(videos):
            top, left = place // columns * height, place % columns * width
            frame = video[min(number, len(video) - 1)]
            tiled[top : top + height, left : left + width] = frame
        return tiled

    return _Made(range(max(map(len, videos))), picture)


def _checked(frames: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Frames one after the other; ValueError where there is none, or none of the first's kind."""
    if len(frames) == 0:
        raise ValueError("a video needs at least one frame")
    shape = None
    for frame in map(np.asarray, frames):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(
                f"a frame must be uint8 [height, width, 3], not {frame.dtype} {frame.shape}"
            )
        shape = shape or frame.shape
        if frame.shape != shape:
            raise ValueError(f"frames of different sizes: {shape} and {frame.shape}")
        yield frame
