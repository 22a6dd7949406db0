"""Videos of policies: frames of one or several environments to an mp4 file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

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

    pictures = _checked(frames)
    height, width, _ = pictures[0].shape
    # The colour format halves both sizes: repeat the last row or column where needed.
    odd = ((0, height % 2), (0, width % 2), (0, 0))
    pictures = [np.ascontiguousarray(np.pad(picture, odd, mode="edge")) for picture in pictures]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width, _ = pictures[0].shape
    temporary = path.with_name(f".{path.stem}.writing.mp4")
    writer = imageio_ffmpeg.write_frames(
        str(temporary),
        (width, height),
        fps=fps,
        macro_block_size=2,
        output_params=["-threads", "1", "-movflags", "+faststart"],
    )
    try:
        writer.send(None)
        for picture in pictures:
            writer.send(picture)
    finally:
        writer.close()
    temporary.replace(path)
    return path


def framed(videos: Sequence[Sequence[np.ndarray]]) -> Sequence[Sequence[np.ndarray]]:
    """Videos whose frames have one size: smaller ones get black margins below and to the right."""
    shapes = [frame.shape for video in videos for frame in video]
    height, width = (max(shape[axis] for shape in shapes) for axis in (0, 1))

    def enlarged(frame: np.ndarray) -> np.ndarray:
        missing = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
        return np.pad(frame, missing)

    if len(set(shapes)) == 1:
        return videos
    return [[enlarged(frame) for frame in video] for video in videos]


def tile(videos: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The frames of several environments, uint8 [H, W, 3] of one size, in a near-square grid.

    Videos that end early stand still until the longest ends.
    """
    checked = [_checked(video) for video in videos]
    shape = checked[0][0].shape
    if any(video[0].shape != shape for video in checked):
        raise ValueError("videos that are tiled must have frames of one size")
    columns = math.ceil(math.sqrt(len(checked)))
    rows = math.ceil(len(checked) / columns)
    height, width, channels = shape
    pictures = []
    for index in range(max(map(len, checked))):
        picture = np.zeros((rows * height, columns * width, channels), dtype=np.uint8)
        for place, video in enumerate(checked):
            top, left = place // columns * height, place % columns * width
            frame = video[min(index, len(video) - 1)]
            picture[top : top + height, left : left + width] = frame
        pictures.append(picture)
    return pictures


def _checked(frames: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len(frames) == 0:
        raise ValueError("a video needs at least one frame")
    checked = [np.asarray(frame) for frame in frames]
    for frame in checked:
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(
                f"a frame must be uint8 [height, width, 3], not {frame.dtype} {frame.shape}"
            )
        if frame.shape != checked[0].shape:
            raise ValueError(f"frames of different sizes: {checked[0].shape} and {frame.shape}")
    return checked
