"""Indexes of torch's checkpoints: what an older Python writes is read, and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from rlinf.errors import CheckpointError
from rlinf.trainers.checkpoint import PlainReader


class Named:
    """Is pickled as a call of getattr, as enumerations are by Python up to 3.11.3."""

    def __init__(self, owner: Any, name: str) -> None:
        self._asked = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._asked


def index(directory: Path, content: object) -> PlainReader:
    (directory / ".metadata").write_bytes(pickle.dumps(content))
    return PlainReader(directory)


def test_members_of_the_enumeration_are_read(tmp_path: Path) -> None:
    name = "TORCH_CONTIGUOUS_FORMAT"
    written = Metadata({}, planner_data=Named(_MEM_FORMAT_ENCODING, name))
    found = index(tmp_path, written).read_metadata()
    assert found.planner_data is _MEM_FORMAT_ENCODING[name]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_as_any_version_of_python_writes_them(tmp_path: Path, module: str) -> None:
    reader, path = index(tmp_path, None), Path("part.distcp")
    written = pickle.dumps(Metadata({}, planner_data=path), protocol=2)
    own, other = (f"c{name}\nPosixPath".encode() for name in (type(path).__module__, module))
    assert written.count(own) == 1
    (tmp_path / ".metadata").write_bytes(written.replace(own, other))
    assert reader.read_metadata().planner_data == path


@pytest.mark.parametrize("asked", [(_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__")])
def test_other_attributes_are_refused(tmp_path: Path, asked: tuple[Any, str]) -> None:
    with pytest.raises(CheckpointError, match=r"may not hold a builtins\.getattr"):
        index(tmp_path, Metadata({}, planner_data=Named(*asked))).read_metadata()
