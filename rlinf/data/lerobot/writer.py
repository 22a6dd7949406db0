"""Writes recorded episodes as a LeRobot set, which lerobot opens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlinf.checkpoint.files import new_directory
from rlinf.checkpoint.manifest import record_file
from rlinf.data.demonstrations import Demonstration, Demonstrations
from rlinf.data.lerobot.layout import (
    ACTION,
    CHUNK_SIZE,
    DATA,
    DATA_MB,
    DONE,
    EPISODES,
    IMAGES,
    INDICES,
    INFO,
    REWARD,
    SOURCE,
    STATE,
    STATS,
    SUCCESS,
    TASKS,
    VERSION,
    VIDEO,
    VIDEO_HASHES,
    VIDEO_MB,
    av,
    check_video_size,
    features_of,
    names_of,
    parquet,
)
from rlinf.data.pictures import png
from rlinf.data.vector_statistics import at_once, vector_statistics
from rlinf.envs.base import INSTRUCTION_KEY
from rlinf.envs.results import TASK_IDS

Kind = Literal["video", "image"]
_SAMPLED_PICTURES = 200
"""Pictures of a set that the statistics of its cameras are of, evenly spread."""


def write_lerobot(
    found: Demonstrations, directory: Path, *, fps: float, pictures: Kind = "video"
) -> None:
    """Write a set; it is renamed to its place when it is whole.

    Pictures are as they were recorded with ``image`` (PNG in Parquet); with ``video`` (H.264, a key
    frame every second frame, as in sets that lerobot records) they are within the error of the
    codec.

    Args:
        found: Episodes, with the ``spec`` of their environment in the source.
        directory: Must not exist.
        fps: Frames per second, that is the control rate of the environment.
        pictures: How pictures are kept.

    Raises:
        ConfigError: An observation has no place in such a set.
        FileExistsError: There is something.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists")
    parquet()
    with new_directory(directory) as unfinished:
        _Writer(found, unfinished, fps, pictures).write()


class _Writer:
    def __init__(self, found: Demonstrations, root: Path, fps: float, pictures: Kind) -> None:
        # Others read it, who know of no indices. What the source says of the start is kept, by
        # which a set that was written before actions were told so is known.
        if start := found.source.get("spec", {}).get("action_start"):
            found = replace(found, actions=found.actions + np.array(start, np.float32))
        self._found, self._root, self._fps, self._kind = found, root, fps, pictures
        self._cameras: dict[str, Callable[[Mapping[str, np.ndarray]], np.ndarray]] = {}
        self._vectors: dict[str, str] = {}
        for key, array in found.observations.items():
            if key in (TASK_IDS, INSTRUCTION_KEY):
                continue  # the text of each row says it
            names = features_of(key, array.shape[1:])
            if not names[0].startswith(IMAGES):
                self._vectors[names[0]] = key
            else:
                for place, name in enumerate(names):
                    self._cameras[name] = partial(_camera, key, None if len(names) == 1 else place)
        self._tasks, self._task_numbers = found.row_texts()

    def write(self) -> None:
        (self._root / "meta").mkdir(parents=True)
        rows = [self._row(number, each) for number, each in enumerate(self._found)]
        self._write_data(rows)
        if self._kind == "video":
            for name in self._cameras:
                self._write_video(name, rows)
        self._write_table(rows, self._root / EPISODES.format(chunk_index=0, file_index=0))
        self._write_tasks()
        self._write_json(STATS, self._statistics(self._found))
        self._write_json(INFO, self._info())
        source = {**self._found.source, "seeds": [each.seed for each in self._found.episodes]}
        videos = sorted(self._root.rglob("*.mp4"))  # Parquet has checksums of its own
        source[VIDEO_HASHES] = {
            str(each.relative_to(self._root)): record_file(each).sha256 for each in videos
        }
        self._write_json(SOURCE, source)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        (self._root / name).write_text(json.dumps(content, indent=1) + "\n")

    # -- what is said of the set ----------------------------------------------------------------

    def _info(self) -> dict[str, Any]:
        names = ["height", "width", "channels"]
        features: dict[str, Any] = {}
        for name, array in self._vector_arrays(self._found):
            shape = [array.shape[1]]
            parts = self._found.source.get("spec", {}).get("state_parts") if name == STATE else None
            called = names_of(parts) if parts else None
            features[name] = {"dtype": "float32", "shape": shape, "names": called}
        first = {key: array[:1] for key, array in self._found.observations.items()}
        for name, camera in self._cameras.items():
            shape = list(camera(first).shape[1:])
            features[name] = {"dtype": self._kind, "shape": shape, "names": names}
            if self._kind == "video":
                said = {"height": shape[0], "width": shape[1], "codec": "h264",
                        "pix_fmt": "yuv420p", "fps": self._rate, "channels": 3}  # fmt: skip
                info = {f"video.{key}": value for key, value in said.items()}
                features[name]["info"] = {**info, "is_depth_map": False, "has_audio": False}
        for name, dtype in {REWARD: "float32", DONE: "bool", SUCCESS: "bool"}.items():
            features[name] = {"dtype": dtype, "shape": [1], "names": None}
        for name in INDICES:
            dtype = "float32" if name == "timestamp" else "int64"
            features[name] = {"dtype": dtype, "shape": [1], "names": None}
        return {
            "codebase_version": VERSION,
            "robot_type": str(self._found.source.get("env", {}).get("type", "")) or None,
            "total_episodes": len(self._found.episodes),
            "total_frames": len(self._found),
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_SIZE,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self._rate,
            "splits": {"train": f"0:{len(self._found.episodes)}"},
            "data_path": DATA,
            "video_path": VIDEO if self._kind == "video" and self._cameras else None,
            "features": features,
        }

    @property
    def _rate(self) -> float | int:
        return int(self._fps) if self._fps == int(self._fps) else self._fps

    def _vector_arrays(self, of: Any) -> Iterator[tuple[str, np.ndarray]]:
        yield ACTION, of.actions
        for name, key in self._vectors.items():
            yield name, of.observations[key].reshape(len(of), -1)

    def _statistics(self, of: Any) -> dict[str, dict[str, list[Any]]]:
        """Of vectors all, of cameras those of some pictures, by channel, from 0 to 1."""
        found = {name: vector_statistics(at_once(array))
                 for name, array in self._vector_arrays(of)}  # fmt: skip
        said = {n: {k: v.tolist() for k, v in each.items()} for n, each in found.items()}
        rows = np.linspace(0, len(of) - 1, min(len(of), _SAMPLED_PICTURES)).astype(int)
        seen = {key: array[rows] for key, array in of.observations.items()}
        for name, camera in self._cameras.items():
            channels = camera(seen).reshape(-1, 3).astype(np.float32) / 255
            each = vector_statistics(at_once(channels))
            each["count"] = np.array([len(rows)])
            said[name] = {k: (v if k == "count" else v.reshape(3, 1, 1)).tolist()
                          for k, v in each.items()}  # fmt: skip
        return said

    def _row(self, number: int, episode: Demonstration) -> dict[str, Any]:
        first = self._found.episodes[number].first
        statistics = self._statistics(episode)
        tasks = dict.fromkeys(self._task_numbers[first:][: len(episode)].tolist())
        return {
            "episode_index": number,
            "tasks": [self._tasks[task] for task in tasks],
            "length": len(episode),
            "dataset_from_index": first,
            "dataset_to_index": first + len(episode),
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
            **{f"stats/{name}/{kind}": value for name, each in statistics.items()
               for kind, value in each.items()},
        }  # fmt: skip

    def _write_tasks(self) -> None:
        """As pandas writes a frame whose index are the texts; lerobot looks tasks up by it."""
        import pyarrow as pa

        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": type_,
             "metadata": None}
            for name, kind, type_ in (("task_index", "int64", "int64"),
                                      ("task", "unicode", "object"))
        ]  # fmt: skip
        said = {"index_columns": ["task"], "column_indexes": [], "columns": columns,
                "creator": {"library": "pyarrow", "version": pa.__version__},
                "pandas_version": "2.2.0"}  # fmt: skip
        table = pa.table({"task_index": list(range(len(self._tasks))), "task": list(self._tasks)})
        table = table.replace_schema_metadata({"pandas": json.dumps(said)})
        parquet().write_table(table, self._root / TASKS)

    # -- frames ---------------------------------------------------------------------------------

    def _place(self, number: int) -> tuple[int, int]:
        return divmod(number, CHUNK_SIZE)

    def _write_data(self, rows: list[dict[str, Any]]) -> None:
        """One row group per episode; notes in the rows of the episodes where they lie."""
        writer, number, path = None, -1, self._root
        for row, episode in zip(rows, self._found, strict=True):
            table = self._table(row, episode)
            if writer is None or path.stat().st_size > DATA_MB * 2**20:
                if writer is not None:
                    writer.close()
                number += 1
                chunk, file = self._place(number)
                path = self._root / DATA.format(chunk_index=chunk, file_index=file)
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = parquet().ParquetWriter(path, table.schema, write_page_checksum=True)
            writer.write_table(table)
            row["data/chunk_index"], row["data/file_index"] = self._place(number)
        if writer is not None:
            writer.close()

    def _table(self, row: Mapping[str, Any], episode: Demonstration) -> Any:
        import pyarrow as pa

        length, first = len(episode), row["dataset_from_index"]
        numbers = np.arange(length)
        columns: dict[str, Any] = {}
        for name, array in self._vector_arrays(episode):
            values, width = np.ascontiguousarray(array, np.float32), array.shape[1]
            flat = pa.array(values.reshape(-1))
            columns[name] = flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
        if self._kind == "image":
            for name, camera in self._cameras.items():
                kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                encoded = [{"bytes": png(picture), "path": None}
                           for picture in camera(episode.observations)]  # fmt: skip
                columns[name] = pa.array(encoded, kind)
        last = numbers == length - 1
        columns |= {
            REWARD: episode.rewards.astype(np.float32),
            DONE: last,
            SUCCESS: last & episode.success,
            "timestamp": (numbers / self._fps).astype(np.float32),
            "frame_index": numbers,
            "episode_index": np.full(length, row["episode_index"]),
            "index": first + numbers,
            "task_index": self._task_numbers[first:][:length],
        }
        return pa.table(columns)

    def _write_video(self, name: str, rows: list[dict[str, Any]]) -> None:
        """All episodes one behind the other; notes in their rows where they lie."""
        camera, number, frames = self._cameras[name], 0, 0
        video = self._video(name, number)
        for row, episode in zip(rows, self._found, strict=True):
            if video.written > VIDEO_MB * 2**20:
                video.close()
                number, frames = number + 1, 0
                video = self._video(name, number)
            for picture in camera(episode.observations):
                video.add(picture)
            chunk, file = self._place(number)
            where = {"chunk_index": chunk, "file_index": file, "from_timestamp": frames / self._fps}
            frames += len(episode)
            where["to_timestamp"] = frames / self._fps
            row |= {f"videos/{name}/{key}": value for key, value in where.items()}
        video.close()

    def _video(self, name: str, number: int) -> _VideoFile:
        chunk, file = self._place(number)
        path = self._root / VIDEO.format(video_key=name, chunk_index=chunk, file_index=file)
        return _VideoFile(path, self._fps)

    def _write_table(self, rows: list[dict[str, Any]], path: Path) -> None:
        import pyarrow as pa

        path.parent.mkdir(parents=True)
        parquet().write_table(pa.Table.from_pylist(rows), path)


class _VideoFile:
    """An MP4 file that is being written."""

    def __init__(self, path: Path, fps: float) -> None:
        from fractions import Fraction

        path.parent.mkdir(parents=True, exist_ok=True)
        self._package = av()
        self._container = self._package.open(str(path), "w")
        rate = Fraction(fps).limit_denominator(1000)
        options = {"g": "2", "crf": "16", "preset": "medium"}
        self._stream = self._container.add_stream("libx264", rate, options=options)
        self._stream.pix_fmt, self._stream.codec_context.thread_count = "yuv420p", 1
        self._sized, self.written = False, 0

    def add(self, picture: np.ndarray) -> None:
        """Append a picture [H, W, 3]."""
        height, width = picture.shape[:2]
        check_video_size(height, width)
        if not self._sized:
            self._stream.width, self._stream.height, self._sized = width, height, True
        frame = self._package.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
        self._mux(frame)

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self.written += packet.size
            self._container.mux(packet)

    def close(self) -> None:
        """Write what is left."""
        self._mux(None)
        self._container.close()


def _camera(key: str, place: int | None, seen: Mapping[str, np.ndarray]) -> np.ndarray:
    """The pictures [n, H, W, 3] of one camera among observations."""
    return seen[key] if place is None else seen[key][:, place]
