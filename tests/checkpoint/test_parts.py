"""Checkpoints of which workers write a part themselves."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlinf.checkpoint.config import CheckpointConfig
from rlinf.checkpoint.contents import Parts, load_checkpoint
from rlinf.checkpoint.manifest import record_file
from rlinf.checkpoint.store import CheckpointStore
from rlinf.errors import CheckpointError

NAMES = ("actor/first", "actor/second", "critic/first")


def write(directory: Path, text: str) -> Parts:
    for name in NAMES:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name} {text}")
    return Parts(directory, {name: record_file(directory / name) for name in NAMES})


def begin(store: CheckpointStore, step: int) -> Path:
    directory = store.begin(step)
    assert directory is not None
    return directory


def save(store: CheckpointStore, step: int) -> None:
    parts = write(begin(store, step), f"of {step}")
    store.save(step, {"step": step}, parts=parts, blocking=True)


@pytest.fixture
def store(tmp_path: Path):
    with CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep_last=2)) as opened:
        yield opened


def test_parts_are_committed_with_the_rest(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    save(store, 3)  # written again, it takes the place of the former
    assert store.steps() == [2, 3]
    found = store.load()
    assert found.tree == {"step": 3}
    for name in NAMES:
        assert (found.path / name).read_text() == f"{name} of 3"
    assert set(NAMES) < set(found.files)
    assert sorted(p.name for p in store.directory.iterdir()) == [
        "latest", "step_00000002", "step_00000003",
    ]  # fmt: skip


def test_nothing_is_there_before_the_commit_and_a_killed_run_leaves_nothing(
    store: CheckpointStore,
) -> None:
    save(store, 1)
    write(begin(store, 2), "of 2")
    assert store.steps() == [1]
    assert store.load().step == 1
    with CheckpointStore(store.directory) as after:
        assert after.steps() == [1]
        assert sorted(p.name for p in after.directory.iterdir()) == ["latest", "step_00000001"]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_part_is_refused_and_the_checkpoint_before_used(
    store: CheckpointStore, damage: str
) -> None:
    save(store, 1)
    save(store, 2)
    path = store.path(2) / NAMES[1]
    text = path.read_text()
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(text[:-1] + ("" if damage == "truncated" else "x"))
    with pytest.raises(CheckpointError, match=NAMES[1]):
        load_checkpoint(store.path(2))
    found = store.load()
    assert found.step == 1
    assert NAMES[1] in found.refused[0].reason


def test_parts_that_are_not_seen_here_are_no_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    parts = write(begin(store, 2), "of 2")
    (parts.directory / NAMES[0]).unlink()
    with pytest.raises(CheckpointError, match="all nodes share"):
        store.save(2, {}, parts=parts, blocking=True)
    assert store.steps() == [1]
    assert not parts.directory.exists()


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_full_disk_of_a_worker_is_one_of_the_run(tmp_path: Path, policy: str) -> None:
    config = CheckpointConfig.model_validate({"on_full_disk": policy})
    store = CheckpointStore(tmp_path, config)
    directory = begin(store, 4)
    write(directory, "half")
    error = OSError(errno.ENOSPC, "No space left on device")
    if policy == "stop":
        with pytest.raises(CheckpointError, match="No space left"):
            store.give_up(directory, 4, error)
    else:
        store.give_up(directory, 4, error)
        assert [failure.step for failure in store.failures] == [4]
    assert not directory.exists()
    with pytest.raises(CheckpointError, match="step 5 was not written"):
        store.give_up(begin(store, 5), 5, OSError(errno.EIO, "Input/output error"))
