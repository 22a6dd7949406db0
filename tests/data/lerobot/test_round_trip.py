"""What is written as a LeRobot set is read again, at random, and damage is said."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.data.imitation import DemonstrationsConfig, SetOptions
from rlinf.data.lerobot.reader import LeRobotSet
from rlinf.data.lerobot.set_check import check_lerobot_set
from rlinf.data.lerobot.writer import write_lerobot
from rlinf.envs.base import instruction_bytes
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError

from .sets import SPEC, recorded

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")
MAIN, WRIST = "observation.images.main", "observation.images.wrist_1"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with pictures as they are, and one with videos."""
    root = tmp_path_factory.mktemp("sets")
    for kind in ("image", "video"):
        write_lerobot(recorded(), root / kind, fps=20, pictures=kind)  # type: ignore[arg-type]
    return root


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_set_is_read_as_it_was_written(kind: str, written: Path) -> None:
    whole, found = recorded(), LeRobotSet(written / kind)
    assert (found.fps, len(found)) == (20.0, 20)
    assert found.tasks == ("open the window", "close the window")
    assert [each.length for each in found.episodes] == [9, 4, 7]
    assert [each.text for each in found.episodes] == [found.tasks[n] for n in (0, 1, 0)]
    assert found.success == (True, True, False)
    np.testing.assert_array_equal(found.vectors("action"), whole.actions)
    np.testing.assert_array_equal(found.vectors("observation.state"), whole.observations["states"])
    np.testing.assert_array_equal(found.rewards, whole.rewards)
    assert found.source["seeds"] == [0, 1, 2]
    # In any order, and the same one twice.
    rows = np.random.default_rng(0).permutation(np.r_[np.arange(20), 3, 3])
    main, wrist = found.pictures(MAIN)[rows], found.pictures(WRIST)[rows]
    wanted = whole.observations["main_images"][rows], whole.observations["wrist_images"][rows, 1]
    for seen, picture in zip((main, wrist), wanted, strict=True):
        if kind == "image":
            np.testing.assert_array_equal(seen, picture)
        else:
            error = np.abs(seen.astype(int) - picture)
            assert error.mean() < 5  # half of the colours are kept
            # The frame after it is further away: it is this one and no other.
            other = np.roll(picture[np.argsort(rows)], -1, axis=0)[np.argsort(np.argsort(rows))]
            assert error.mean() < 0.5 * np.abs(seen.astype(int) - other).mean()


def test_one_frame_decodes_few(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf.data.lerobot import pictures

    found = LeRobotSet(written / "video").pictures(MAIN)
    found[np.array([0])]
    (video,) = found._open.values()
    decoded = 0

    class Counting:
        def __init__(self, container):
            self._container = container

        def seek(self, *args, **named):
            self._container.seek(*args, **named)

        def decode(self, stream):
            nonlocal decoded
            for frame in self._container.decode(stream):
                decoded += 1
                yield frame

    video._container = Counting(video._container)
    found[np.array([17])]
    assert 1 <= decoded <= 2  # from the key frame before it
    monkeypatch.setattr(pictures, "_OPEN_VIDEOS", 1)
    found[np.array([2, 19])]
    assert len(found._open) == 1


def test_the_cache_of_encoded_pictures_is_bounded(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf.data.lerobot import pictures

    monkeypatch.setattr(pictures, "_CACHED_BYTES", 1)
    found = LeRobotSet(written / "image").pictures(MAIN)
    seen = found[np.arange(20)]
    assert len(found._cache) == len(found._sizes) == 1
    np.testing.assert_array_equal(seen, recorded().observations["main_images"])


def damaged(written: Path, target: Path, change: str) -> LeRobotSet:
    """A copy of the set with videos, changed."""
    shutil.copytree(written / "video", target)
    info = json.loads((target / "meta/info.json").read_text())
    video = target / f"videos/{MAIN}/chunk-000/file-000.mp4"
    if change in (versions := {"older": "v2.0", "old": "v2.1", "newer": "v4.0"}):
        info["codebase_version"] = versions[change]
    elif change == "frames":
        info["total_frames"] += 1
    elif change == "episodes":
        info["total_episodes"] += 1
    elif change == "dimension":
        info["features"]["action"]["shape"] = [3]
    elif change == "size":
        info["features"][MAIN]["shape"] = [32, 32, 3]
    elif change == "no data":
        (target / "data/chunk-000/file-000.parquet").unlink()
    elif change == "half data":
        path = target / "data/chunk-000/file-000.parquet"
        path.write_bytes(path.read_bytes()[:1000])
    elif change == "words":
        change_column(target / "data/chunk-000/file-000.parquet", "action",
                      lambda rows: [list(map(str, row)) for row in rows])  # fmt: skip
    elif change == "other rows":
        change_column(target / "data/chunk-000/file-000.parquet", "action",
                      lambda rows: [*rows[:-2], rows[-2][:1], rows[-2][1:] + rows[-1]])  # fmt: skip
    elif change == "no pictures":
        info["features"][MAIN]["dtype"] = "image"
    elif change == "half episodes":
        path = target / "meta/episodes/chunk-000/file-000.parquet"
        path.write_bytes(path.read_bytes()[:1000])
    elif change == "half video":
        video.write_bytes(video.read_bytes()[:1000])
    elif change == "short video":
        short = recorded((9, 4))
        write_lerobot(short, target.with_name("short"), fps=20)
        shutil.copy(target.with_name("short") / video.relative_to(target), video)
    elif change == "no video":
        video.unlink()
    (target / "meta/info.json").write_text(json.dumps(info))
    return LeRobotSet(target)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("old", r"version v2.1, expected v3.0; convert it with lerobot's convert_dataset_v21"),
        ("older", r"version v2.0, .*lerobot's convert_dataset_v20_to_v21 and convert_dataset_v21"),
        ("newer", r"version v4.0, expected v3.0; nearest: a set of version v3.0"),
        ("frames", "meta/episodes has 20 frames, meta/info.json says 21"),
        ("episodes", "meta/episodes has 3 episodes, meta/info.json says 4"),
        ("dimension", "`action` has 40 numbers in 20 rows, meta/info.json says 3 each"),
        ("size", r"a picture is \[32, 48, 3\], meta/info.json says \[32, 32, 3\]"),
        ("no data", "is no whole LeRobot set"),
        ("half data", r"is no whole LeRobot set: data/chunk-000/file-000.parquet: .*copy it again"),
        ("half episodes", "set: meta/episodes/chunk-000/file-000.parquet: .*copy it again"),
        ("words", "file-000.parquet: `action` holds no numbers"),
        ("other rows", "rows of `action` have 1 to 3 numbers, and not equally many; copy"),
        ("no pictures", f"file-000.parquet has no column `{MAIN}`; copy the set again"),
        ("half video", "is no whole video"),
        ("short video", "ends before 0.950 s"),
        ("no video", "is no whole video"),
    ],
)
def test_damage_is_said_in_one_line(change: str, told: str, written: Path, tmp_path: Path) -> None:
    def read() -> None:
        found = damaged(written, tmp_path / "set", change)
        found.check_videos([MAIN])
        found.vectors("action")
        found.pictures(MAIN)[np.array([0])]

    with pytest.raises(ConfigError, match=told) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_a_camera_without_its_files_is_refused_before_anything_starts(
    written: Path, tmp_path: Path
) -> None:
    section = {"path": tmp_path / "set", "observations": {"main_images": MAIN}}
    video = damaged(written, tmp_path / "set", "none").directory.joinpath(
        f"videos/{MAIN}/chunk-000/file-000.mp4"
    )
    config = DemonstrationsConfig.model_validate(section)
    config.check()
    video.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file-000\.mp4 is empty; copy it again") as caught:
        config.check()
    assert caught.value.key == "path"
    video.unlink()
    with pytest.raises(ConfigError, match=r"file-000\.mp4 is missing; copy it again"):
        config.check()


def change_column(path: Path, name: str, change: Any) -> None:
    """Write a column of a Parquet file again; without it where nothing is left."""
    table = parquet.read_table(path)
    values = change(table.column(name).to_pylist())
    number = table.column_names.index(name)
    if values is None:
        parquet.write_table(table.drop_columns([name]), path)
    else:
        parquet.write_table(table.set_column(number, name, pyarrow.array(values)), path)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("episode_index", lambda v: [*v[9:], *v[:9]], r"row 0 has episode_index 1, where .* 0 of"),
        ("frame_index", lambda v: v[::-1], r"row 0 has frame_index 6, where meta/episodes has"),
        ("frame_index", lambda v: [*v[:4], None, *v[5:]], r"row 4 has frame_index nan"),
        ("index", lambda v: [v[1], v[0], *v[2:]], r"row 0 has index 1, where .* that is 0;"),
        ("index", lambda _: None, r"has no column `index`; copy the set again"),
        ("timestamp", lambda v: ["a"] * len(v), r"`timestamp` holds no numbers"),
        (
            "task_index",
            lambda v: [99, *v[1:]],
            r"row 0 has task_index 99, .* 2 tasks from 0 to 1",
        ),
        ("task_index", lambda v: [-1, *v[1:]], r"row 0 has task_index -1"),
        ("task_index", lambda v: [None, *v[1:]], r"row 0 has task_index nan"),
        ("task_index", lambda v: [1 - n for n in v], r"rows of episode 0 are of 'close the"),
    ],
)
def test_rows_that_lie_elsewhere_are_refused(
    name: str, change: Any, told: str, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    change_column(tmp_path / "set/data/chunk-000/file-000.parquet", name, change)
    with pytest.raises(ConfigError, match=told) as caught:
        LeRobotSet(tmp_path / "set")
    assert "\n" not in str(caught.value)


def test_whole_rows_in_another_order_are_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    file = tmp_path / "set/data/chunk-000/file-000.parquet"
    table = parquet.read_table(file)
    parquet.write_table(table.take(list(reversed(range(len(table))))), file)
    with pytest.raises(ConfigError, match="row 0 has episode_index 2, where"):
        LeRobotSet(tmp_path / "set")


@pytest.mark.parametrize(
    ("begins", "told"),
    [
        ([0.45, 0.0, 0.65], "of episode 0 lasts from 0.45 to 0.45 s .* has 9 frames, that is 0.45"),
        ([0.0, 0.0, 0.0], "of episode 1 lasts from 0 to"),
        ([-1.0, 0.45, 0.65], "of episode 0 begins at -1.0 s"),
        ([float("nan"), 0.45, 0.65], "of episode 0 begins at nan s"),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_spans_of_videos_that_are_not_their_episodes_are_refused(
    begins: list[float], told: str, ends: bool, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written / "video", tmp_path / "set")
    file = tmp_path / "set/meta/episodes/chunk-000/file-000.parquet"
    change_column(file, f"videos/{MAIN}/from_timestamp", lambda _: begins)
    if not ends:
        change_column(file, f"videos/{MAIN}/to_timestamp", lambda _: None)
        told = told if "begins" in told else "of episode 1 begins at 0 s .* before the end of"
    with pytest.raises(ConfigError, match=told) as caught:
        LeRobotSet(tmp_path / "set")
    assert "\n" not in str(caught.value)


def test_each_row_has_the_text_of_its_step(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    file = tmp_path / "set/data/chunk-000/file-000.parquet"
    change_column(file, "task_index", lambda v: [0] * 5 + [1] * 4 + v[9:])
    episodes = tmp_path / "set/meta/episodes/chunk-000/file-000.parquet"
    both = ["open the window", "close the window"]
    change_column(episodes, "tasks", lambda v: [both, *v[1:]])
    found = LeRobotSet(tmp_path / "set")
    assert found.episodes[0].texts == tuple(both)
    told = [found.texts[n] for n in found.text_numbers[[4, 5, 9, 13]]]
    assert told == [both[0], both[1], both[1], both[0]]
    spec = EnvSpec.from_json(found.source["spec"])
    taken = SetOptions().read(tmp_path / "set", spec)
    np.testing.assert_array_equal(taken.columns["task_ids"][[4, 5, 9, 13]], [0, 1, 1, 0])


@pytest.mark.parametrize("key", ["task_ids", "instruction"])
def test_what_is_to_be_done_is_written_for_each_row(key: str, tmp_path: Path) -> None:
    """It changes within the first episode, as in a chain of tasks."""
    whole, numbers = recorded(), np.array([1] * 5 + [0] * 4 + [1] * 4 + [0] * 7)
    words = SPEC["task_descriptions"]
    seen = {name: each for name, each in whole.observations.items() if name != "task_ids"}
    told = np.stack([instruction_bytes(words[number]) for number in numbers])
    changing = replace(whole, observations={**seen, key: numbers if key == "task_ids" else told})
    write_lerobot(changing, tmp_path / "set", fps=20, pictures="image")
    found = LeRobotSet(tmp_path / "set")
    of_rows = [found.texts[number] for number in found.text_numbers]
    assert of_rows == [words[number] for number in numbers]
    assert [each.texts for each in found.episodes] == [
        (words[1], words[0]),
        (words[1],),
        (words[0],),
    ]
    shown = {**SPEC["observation_shapes"], "instruction": [256]}
    types = {**SPEC["observation_dtypes"], "instruction": "uint8"}
    spec = EnvSpec.from_json({**SPEC, "observation_shapes": shown, "observation_dtypes": types})
    columns = SetOptions(only_successful=False).read(tmp_path / "set", spec).columns
    np.testing.assert_array_equal(columns["task_ids"], numbers)
    np.testing.assert_array_equal(columns["instruction"], told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data_path": 3}, "data_path is 3, expected a text"),
        ({"fps": 0}, "fps is 0, expected a number above 0"),
        ({"fps": "20"}, "fps is '20'"),
        ({"features": {"action": {"dtype": 7, "shape": [2]}}}, "dtype is 7, expected the name"),
        ({"features": {"action": {"dtype": "float32", "shape": [0]}}}, r"shape is \[0\], expected"),
        ({"features": {"action": {"dtype": "float32", "shape": "2"}}}, "shape is '2', expected"),
        ({"features": 3}, "is no LeRobot set"),
    ],
)
def test_descriptions_of_other_types_are_refused(
    change: dict[str, Any], told: str, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    info = tmp_path / "set/meta/info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), **change}))
    with pytest.raises(ConfigError, match=told) as caught:
        LeRobotSet(tmp_path / "set")
    assert "\n" not in str(caught.value)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(written: Path, tmp_path: Path) -> None:
    for name in ("data/chunk-000/file-000.parquet", "meta/tasks.parquet",
                 "meta/episodes/chunk-000/file-000.parquet"):  # fmt: skip
        target = tmp_path / name.replace("/", "-")
        shutil.copytree(written / "image", target)
        (target / name).unlink()
        os.mkfifo(target / name)
        with pytest.raises(ConfigError, match="is no file"):
            LeRobotSet(target)


def test_texts_of_tasks_are_told_from_what_stands_beside_them(
    written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    file = tmp_path / "set/meta/tasks.parquet"
    texts = parquet.read_table(file).drop_columns(["task_index"]).column(0)
    numbers = pyarrow.array(range(len(texts)))
    more = {"skill": numbers, "task_index": numbers}
    parquet.write_table(pyarrow.table({**more, "task": texts}), file)
    assert LeRobotSet(tmp_path / "set").texts == ("open the window", "close the window")
    parquet.write_table(pyarrow.table({**more, "words": texts}), file)
    with pytest.raises(ConfigError, match="has skill, words beside task_index, expected a column"):
        LeRobotSet(tmp_path / "set")
    parquet.write_table(pyarrow.table({"task_index": numbers}), file)
    with pytest.raises(ConfigError, match="has nothing beside task_index, expected a column"):
        LeRobotSet(tmp_path / "set")


def test_without_its_file_of_tasks_a_set_is_not_whole(written: Path, tmp_path: Path) -> None:
    """Rows would be of the first text of their episode, whatever ``task_index`` they have."""
    shutil.copytree(written / "image", tmp_path / "set")
    (tmp_path / "set/meta/tasks.parquet").unlink()
    with pytest.raises(
        ConfigError, match=r"no whole LeRobot set: .*tasks\.parquet is missing; copy"
    ):
        LeRobotSet(tmp_path / "set")
    info = tmp_path / "set/meta/info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "total_tasks": 0}))
    assert LeRobotSet(tmp_path / "set").texts == ("open the window", "close the window")


def test_converted_sets_are_read_as_they_are(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers of tasks with gaps, more texts than rows are of, times of another rate without
    videos."""
    shutil.copytree(written / "image", tmp_path / "set")
    rows = tmp_path / "set/data/chunk-000/file-000.parquet"
    change_column(rows, "task_index", lambda v: [7 if n else 2 for n in v])
    change_column(rows, "timestamp", lambda v: [1.2 * each for each in v])
    change_column(tmp_path / "set/meta/tasks.parquet", "task_index", lambda _: [2, 7])
    both = ["open the window", "close the window"]
    episodes = tmp_path / "set/meta/episodes/chunk-000/file-000.parquet"
    change_column(episodes, "tasks", lambda v: [both, *v[1:]])
    found = LeRobotSet(tmp_path / "set")
    assert found.tasks == tuple(both)
    assert found.text_numbers.tolist() == [0] * 9 + [1] * 4 + [0] * 7
    assert "at the fps of meta/info.json, 20" in caplog.text
    change_column(rows, "task_index", lambda v: [3, *v[1:]])
    with pytest.raises(ConfigError, match=r"has task_index 3, .* has 2 tasks from 2 to 7"):
        LeRobotSet(tmp_path / "set")


def test_times_that_do_not_fit_a_video_are_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "video", tmp_path / "set")
    rows = tmp_path / "set/data/chunk-000/file-000.parquet"
    change_column(rows, "timestamp", lambda v: [each + 0.05 for each in v])
    with pytest.raises(ConfigError, match=r"timestamp 0\.05.*its videos could show other frames"):
        LeRobotSet(tmp_path / "set")


def test_large_row_groups_that_are_read_again_and_again_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rlinf.data.lerobot import pictures

    sizes = {"_CACHED_BYTES": 2 * 2**20, "_LARGE_GROUP": 2**20, "_USUAL_GROUP": 2**18}
    for name, size in sizes.items():
        monkeypatch.setattr(pictures, name, size)
    random, count = np.random.default_rng(0), 32
    shown = random.integers(0, 256, (3 * count, 128, 128, 3), dtype=np.uint8)

    def encoded(picture: np.ndarray) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "png")
        return {"bytes": file.getvalue(), "path": None}

    files = []
    for first in range(0, len(shown), count):
        path = tmp_path / f"{first}.parquet"
        rows = [encoded(each) for each in shown[first : first + count]]
        parquet.write_table(pyarrow.table({MAIN: rows}), path)
        files.append((first, path))

    def draw() -> None:
        camera = pictures.ImagePictures(MAIN, shown.shape[1:], files, len(shown))
        for _ in range(4):
            drawn = random.integers(0, len(shown), 16)
            np.testing.assert_array_equal(camera[drawn], shown[drawn])

    draw()
    (told,) = caplog.messages
    assert f"of `{MAIN}` a row group of 1 MiB is read" in told
    advised = int(told.partition("row_group_size=")[2].partition(")")[0])
    assert 1 < advised < count
    caplog.clear()
    for _, path in files:
        parquet.write_table(parquet.read_table(path), path, row_group_size=advised)
    draw()
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_flipped_bit_is_found(kind: str, written: Path, tmp_path: Path) -> None:
    """In whichever page of the data: each has a checksum."""
    shutil.copytree(written / kind, tmp_path / "set")
    file = tmp_path / "set/data/chunk-000/file-000.parquet"
    whole = file.read_bytes()
    names = ["action", "observation.state", "next.reward"]
    if kind == "image":
        names.append(MAIN)
    for name in names:
        group = parquet.ParquetFile(file).metadata.row_group(0)
        chunks = [group.column(number) for number in range(group.num_columns)]
        chunk = next(each for each in chunks if each.path_in_schema.startswith(name))
        end = chunk.dictionary_page_offset or chunk.data_page_offset
        place = end + chunk.total_compressed_size - 2
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match="copy it again"):
            _read_all(tmp_path / "set")
        file.write_bytes(whole)
    _read_all(tmp_path / "set")


def _read_all(path: Path) -> None:
    found = LeRobotSet(path)
    for name in ("action", "observation.state", "next.reward"):
        found.vectors(name)
    found.pictures(MAIN)[np.arange(len(found))]


def test_what_a_set_does_not_have_is_named(written: Path, tmp_path: Path) -> None:
    found = LeRobotSet(written / "image")
    with pytest.raises(ConfigError, match=r"did you mean `observation\.images\.main`"):
        found.pictures("observation.images.mian")
    with pytest.raises(ConfigError, match=r"is no camera; known: observation\.images\.main"):
        found.pictures("action")
    whole = recorded()
    states = replace(whole, observations={"states": whole.observations["states"]})
    write_lerobot(states, tmp_path / "blind", fps=20, pictures="image")
    with pytest.raises(ConfigError, match=r"`action` of .* is no camera; it has no pictures"):
        LeRobotSet(tmp_path / "blind").pictures("action")
    with pytest.raises(ConfigError, match="for the observation `main_images`; it has no pictures"):
        SetOptions().read(tmp_path / "blind", EnvSpec.from_json(SPEC))
    with pytest.raises(ConfigError, match="is no LeRobot set"):
        LeRobotSet(tmp_path)
    with pytest.raises(FileExistsError):
        write_lerobot(recorded(), written / "image", fps=20)


@pytest.mark.parametrize("pictures", ["image", "video"])
def test_a_set_is_checked_for_what_cannot_be_learnt_from(tmp_path: Path, pictures: Any) -> None:
    whole = recorded()
    write_lerobot(whole, tmp_path / "good", fps=20, pictures=pictures)
    found = check_lerobot_set(LeRobotSet(tmp_path / "good"))
    assert [each.passed for each in found] == [True] * 6, found
    dark = {"main_images": np.zeros_like(whole.observations["main_images"])}
    failed = [replace(each, success=False) for each in whole.episodes]
    bad = replace(whole, observations={**whole.observations, **dark}, episodes=tuple(failed))
    write_lerobot(bad, tmp_path / "bad", fps=20, pictures=pictures)
    (file,) = (tmp_path / "bad" / "data").rglob("*.parquet")
    table = parquet.read_table(file)
    rows = table.column("observation.state").to_pylist()
    rows[11][1] = float("nan")
    number = table.column_names.index("observation.state")
    field = table.schema.field(number)
    parquet.write_table(table.set_column(number, field, pyarrow.array(rows, field.type)), file)
    told = {each.name: each.detail for each in check_lerobot_set(LeRobotSet(tmp_path / "bad"))
            if not each.passed}  # fmt: skip
    assert told.keys() == {"numbers", "pictures", "success"}
    assert "first in step 2 of episode 1" in told["numbers"]
    assert "`observation.images.main` is black" in told["pictures"]


@pytest.mark.parametrize(
    ("name", "passed", "told"),
    [
        ("action", True, "`action` of 2 dimensions"),
        ("actions", True, "none called `action`; data.actions may name actions"),
        (None, False, "it has no feature `action`, nor another that could hold actions"),
    ],
)
def test_a_set_without_actions_is_not_passed(
    name: str | None, passed: bool, told: str, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    file, info = tmp_path / "set/data/chunk-000/file-000.parquet", tmp_path / "set/meta/info.json"
    content = json.loads(info.read_text())
    action = content["features"].pop("action")
    if name is not None:
        content["features"][name] = action
        table = parquet.read_table(file)
        parquet.write_table(table.rename_columns({"action": name}), file)
    info.write_text(json.dumps(content))
    checks = {each.name: each for each in check_lerobot_set(LeRobotSet(tmp_path / "set"))}
    assert (checks["actions"].passed, checks["actions"].detail) == (passed, told)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_grey_pictures_have_three_equal_colours_and_depth_is_refused(
    kind: type, written: Path, tmp_path: Path
) -> None:
    def encoded(rows: list[Any]) -> list[Any]:
        with io.BytesIO() as file:
            Image.fromarray(np.arange(32 * 48, dtype=kind).reshape(32, 48)).save(file, "PNG")
            return [{**row, "bytes": file.getvalue()} for row in rows]

    shutil.copytree(written / "image", tmp_path / "set")
    change_column(tmp_path / "set/data/chunk-000/file-000.parquet", MAIN, encoded)
    info = tmp_path / "set/meta/info.json"
    content = json.loads(info.read_text())
    content["features"][MAIN]["shape"] = [32, 48, 1]
    info.write_text(json.dumps(content))
    pictures = LeRobotSet(tmp_path / "set").pictures(MAIN)
    assert pictures.shape[1:] == (32, 48, 3)
    if kind is np.uint16:
        with pytest.raises(ConfigError, match=f"`{MAIN}` holds numbers of mode I.*, no colours"):
            pictures[np.array([0])]
        return
    (seen,) = pictures[np.array([3])]
    assert (seen == (np.arange(32 * 48) % 256).reshape(32, 48, 1)).all()


def _enormous() -> bytes:
    data = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize("kind", ["half", "broken", "enormous", "nothing"])
def test_what_is_no_picture_is_named(kind: str, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "image", tmp_path / "set")
    path = tmp_path / "set/data/chunk-000/file-000.parquet"

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        whole = rows[3]["bytes"]
        other = {"half": whole[:99], "broken": whole[:33] + bytes(9) + whole[42:], "nothing": None}
        return [*rows[:3], {"bytes": _enormous() if kind == "enormous" else other[kind]}, *rows[4:]]

    change_column(path, MAIN, change)
    pictures = LeRobotSet(tmp_path / "set").pictures(MAIN)
    with pytest.raises(ConfigError, match=f"file-000.parquet: {MAIN} of row 3 is no picture"):
        pictures[np.array([3])]


def test_a_changed_video_is_found(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "video", tmp_path / "set")
    file = next((tmp_path / "set").rglob("*.mp4"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # which a decoder may pass over
    file.write_bytes(content)
    (told,) = [each.detail for each in check_lerobot_set(LeRobotSet(tmp_path / "set"))
               if not each.passed]  # fmt: skip
    assert "copy it again" in told


def test_the_texts_of_all_rows_are_counted(written: Path, tmp_path: Path) -> None:
    def told() -> str:
        checked = check_lerobot_set(LeRobotSet(tmp_path / "set"))
        return next(each.detail for each in checked if each.name == "tasks")

    shutil.copytree(written / "image", tmp_path / "set")
    tasks = tmp_path / "set/meta/tasks.parquet"
    change_column(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet", "tasks",
                  lambda v: [[]] * len(v))  # fmt: skip
    change_column(tmp_path / "set/data/chunk-000/file-000.parquet", "task_index",
                  lambda v: [0, 0, 0, 1, *[0] * (len(v) - 4)])  # fmt: skip
    assert told() == "2 in words"
    table = parquet.read_table(tasks)
    change_column(tasks, table.column_names[1], lambda v: [v[0], " "])
    assert told() == "step 3 of episode 0 is of no task"
    change_column(tasks, table.column_names[1], lambda v: ["", " "])
    # As a set of an environment without instructions.
    assert told().startswith("none in words: taken for the environment's only one")
