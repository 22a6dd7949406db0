"""Paths of a configuration are made absolute, and what lies there is told from something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.named_files import at_absolute_paths, fingerprint, named_files


class Part(StrictModel):
    """A section."""

    not_read: ClassVar[frozenset[str]] = frozenset({"out"})

    files: tuple[Path, ...] = ()
    """Some."""
    named: dict[str, Path] = Field(default_factory=dict)
    """Some, by name."""
    out: Path = Path("runs")
    """Written."""


class Code(StrictModel):
    """A section that names something in a file."""

    code_files: ClassVar[frozenset[str]] = frozenset({"function"})

    function: str = "a:b"
    """Of a file or a module."""


class Whole(StrictModel):
    """A configuration."""

    code: dict[str, Code] = Field(default_factory=dict)
    """Sections by name."""
    path: Path | None = None
    """One."""
    part: Part = Part()
    """A section."""
    parts: tuple[Part, ...] = ()
    """Sections."""


def test_what_is_read_has_keys_and_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    part = Part(files=(Path("a"), Path("b/../c")), named={"x": Path("/d")})
    config = Whole(path=Path("~/m"), part=part, parts=(Part(), Part(files=(Path("e"),))))
    absolute = at_absolute_paths(config)
    assert dict(named_files(absolute)) == {
        "path": Path("/home/someone/m"),
        "part.files.0": tmp_path / "a",
        "part.files.1": tmp_path / "c",
        "part.named.x": Path("/d"),
        "parts.1.files.0": tmp_path / "e",
    }
    assert absolute.part.out == Path("runs")
    assert absolute.parts[0] is config.parts[0]
    assert at_absolute_paths(absolute) is absolute


def test_the_file_of_a_function_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, module = Code(function="rewards/mine.py:score"), Code(function="package.module:score")
    absolute = at_absolute_paths(Whole(code={"file": file, "module": module}))
    assert absolute.code["file"].function == f"{tmp_path}/rewards/mine.py:score"
    assert absolute.code["module"] is module
    named = dict(named_files(absolute))
    assert named == {"code.file.function": tmp_path / "rewards" / "mine.py"}
    assert at_absolute_paths(absolute) is absolute


def test_latest_becomes_the_run_that_it_points_to_and_other_links_stay(tmp_path: Path) -> None:
    (tmp_path / "run_1" / "model").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("run_1")
    (tmp_path / "other").symlink_to("run_1")
    latest = at_absolute_paths(Whole(path=tmp_path / "latest" / "model"))
    assert latest.path == tmp_path / "run_1" / "model"
    other = Whole(path=tmp_path / "other" / "model")
    assert at_absolute_paths(other) is other


def test_a_directory_is_told_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("a.json", "below/b.bin", "README.md", ".hidden"):
        (tmp_path / name).write_text(name)
    before = fingerprint(tmp_path)
    assert set(before) == {"a.json", "below/b.bin"}
    (tmp_path / "README.md").write_text("another text")
    assert fingerprint(tmp_path) == before
    (tmp_path / "below/b.bin").write_text("below/c.bin")
    assert fingerprint(tmp_path) != before
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "gone")


def test_a_large_file_is_told_by_its_length_its_beginning_its_end_and_between(
    tmp_path: Path,
) -> None:
    file, size = tmp_path / "weights", 20 * 2**20

    def written(place: int | None, length: int = size) -> object:
        with open(file, "wb") as opened:
            opened.truncate(length)
            if place is not None:
                os.pwrite(opened.fileno(), b"x" * 2**17, place)
        return fingerprint(file)

    found = [written(None), written(0), written(size // 2), written(size - 2**17)]
    found += [written(None, size + 1), written(None, size - 1)]
    assert len({str(each) for each in found}) == len(found)
    assert written(None) == found[0]
