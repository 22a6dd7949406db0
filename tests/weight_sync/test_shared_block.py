"""The shared block: readers beside a writer that never rests, and readers that hold it."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.processes.byte_layout import lay_out
from rlinf.weight_sync.double_buffer import BlockReader, BlockWriter
from rlinf.weight_sync.errors import TornReadError, WeightSyncError

NUMEL = 150_000
SECONDS = 1.0


WEIGHTS = {"first": torch.zeros(NUMEL), "last": torch.zeros(1000, dtype=torch.int32)}
LAYOUT = lay_out(WEIGHTS, {})


def new_writer(path: Path | None = None) -> BlockWriter:
    return BlockWriter(LAYOUT, path)


def write(writer: BlockWriter, version: int, seconds: float = 30.0) -> None:
    with writer.writing(version, seconds=seconds) as tensors:
        for tensor in tensors.values():
            tensor.fill_(version)


def read_until(path: Path, number: int, how: str, seconds: float, results) -> None:
    """Count reads, versions and tears; ends with the time."""
    torch.set_num_threads(1)
    reader = BlockReader(path, number, LAYOUT)
    reads, versions, torn = 0, set(), 0
    results.put("ready")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        weights, version, _ = reader.copy() if how == "copy" else reader.view()
        values = {v for t in weights.values() for v in np.unique(t.numpy()).tolist()}
        reader.release()
        torn += values != {version}
        reads += 1
        versions.add(version)
    results.put((reads, len(versions), torn))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("thread", "copy"),
        ("thread", "view"),
        pytest.param("process", "copy", marks=pytest.mark.slow),  # importing torch takes seconds
        pytest.param("process", "view", marks=pytest.mark.slow),
    ],
)
def test_no_reader_sees_half_an_update(tmp_path, kind, how):
    writer = new_writer(tmp_path / "weights")
    write(writer, 1)
    context = multiprocessing.get_context("spawn")
    start = threading.Thread if kind == "thread" else context.Process
    results = context.Queue()
    arguments = (writer.path, 0, how, SECONDS, results)
    reader = start(target=read_until, args=arguments)
    reader.start()
    assert results.get(timeout=60) == "ready"
    version = 1
    while reader.is_alive():
        version += 1
        write(writer, version)
    reads, versions, torn = results.get(timeout=30)
    reader.join()
    writer.close()
    assert torn == 0
    assert min(reads, versions, version) >= 5  # they did meet


def test_a_copy_during_two_updates_is_made_again(monkeypatch):
    writer = new_writer()
    write(writer, 1)
    reader = BlockReader(writer.path, 0, writer.layout)
    interruptions = iter(range(2, 6))

    original = torch.Tensor.copy_

    def torn_copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        half = source.numel() // 2
        original(target[:half], source[:half])
        for version in [next(interruptions, 0), next(interruptions, 0)]:
            if version:
                write(writer, version)
        return original(target[half:], source[half:])

    monkeypatch.setattr(torch.Tensor, "copy_", torn_copy)
    weights, version, update = reader.copy()
    monkeypatch.undo()
    assert (version, update) == (5, 5)
    assert weights["first"].unique().tolist() == [5.0]
    writer.close()


def test_the_writer_waits_for_who_holds_a_buffer():
    writer = new_writer()
    write(writer, 1)
    reader = BlockReader(writer.path, 3, writer.layout)
    weights, version, _ = reader.view()
    write(writer, 2)  # the other buffer
    with pytest.raises(WeightSyncError, match=r"readers \[3\] held the weights for 0.05 s"):
        write(writer, 3, seconds=0.05)
    assert weights["first"].unique().tolist() == [1.0] == [float(version)]
    assert writer.published == 2
    reader.release()
    write(writer, 3)
    assert reader.copy()[1:] == (3, 3)
    writer.close()


def test_a_dead_reader_does_not_stop_the_writer(monkeypatch):
    monkeypatch.setattr("rlinf.weight_sync.double_buffer._LIVENESS_SECONDS", 0.01)
    writer = new_writer()
    write(writer, 1)
    reader = BlockReader(writer.path, 0, writer.layout)
    reader.view()
    write(writer, 2)
    with writer.writing(3, seconds=5.0, alive=lambda number: False):
        pass
    with pytest.raises(TornReadError):
        reader.release()
    writer.close()


def test_an_update_that_fails_is_not_published():
    writer = new_writer()
    write(writer, 1)
    reader = BlockReader(writer.path, 0, writer.layout)

    def fail() -> None:
        with writer.writing(2, seconds=1.0) as tensors:
            tensors["first"].fill_(2)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    weights, version, _ = reader.copy()
    assert (version, weights["first"].unique().tolist()) == (1, [1.0])
    write(writer, 3)
    assert reader.copy()[1] == 3
    writer.close()


def test_nothing_to_read():
    writer = new_writer()
    reader = BlockReader(writer.path, 0, writer.layout)
    with pytest.raises(WeightSyncError, match="no weights were published yet"):
        reader.copy()
    path = writer.path
    writer.close()
    with pytest.raises(WeightSyncError, match="gone"):
        BlockReader(path, 0, LAYOUT)
