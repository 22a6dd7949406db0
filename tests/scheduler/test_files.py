"""Directories that go to another node and back: two processes' parts, as if on two nodes."""

import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.process import Process, current_process, set_process
from rlinf.scheduler.services import shared_directory as files
from rlinf.scheduler.services.shared_directory import SharedDirectory, WrittenFiles, destination
from rlinf.scheduler.transport.blocks import BlockPool
from rlinf.scheduler.transport.cluster_files import ClusterFiles
from rlinf.scheduler.transport.payload import Codec
from rlinf.scheduler.transport.sockets import SocketEndpoint


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Iterator[list[Process]]:
    """Two processes of one cluster that share nothing but a network."""
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1000)
    owned = ClusterFiles.create()
    processes = []
    for rank in (0, 1):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        own = ClusterFiles(owned.token)
        codec = Codec(BlockPool(own))
        endpoint = SocketEndpoint(own, codec, rank, "127.0.0.1")
        endpoint.directory = tmp_path / f"private-{rank}"
        endpoint.directory.mkdir()
        processes.append(
            Process(
                runtime="ray",
                endpoint=endpoint,
                codec=codec,
                driver=processes[0].endpoint.address if rank else endpoint.address,
                node_rank=rank,
                deadline_seconds=20,
            )
        )
    before = current_process()  # of a cluster that several tests share
    yield processes
    set_process(before)
    for process in processes:
        process.endpoint.close()
    owned.close()


@pytest.fixture
def model(tmp_path) -> Path:
    directory = tmp_path / "home" / "model"
    (directory / "inner").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "empty").touch()
    (directory / "inner" / "weights").write_bytes(bytes(range(256)) * 20)
    (directory / "link").symlink_to(directory / "config.json")
    return directory


def send(value: object, sender: Process, receiver: Process) -> object:
    set_process(sender)
    frames = pickle.dumps(value)
    set_process(receiver)
    return pickle.loads(frames)


def contents(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def test_another_node_gets_a_copy_of_every_file(nodes, model):
    copy = send(SharedDirectory(model), *nodes)
    assert type(copy) is type(Path())
    assert copy != model
    assert copy.name == "model"
    assert contents(copy) == contents(model)
    assert copy.parent.parent.stat().st_mode & 0o077 == 0


def test_a_node_copies_once(nodes, model):
    first = send(SharedDirectory(model), *nodes)
    before = contents(model)
    (model / "config.json").write_text("other")
    assert send(SharedDirectory(model), *nodes) == first
    assert contents(first) == before


def test_the_same_node_gets_the_directory_itself(nodes, model):
    there = send(SharedDirectory(model), nodes[0], nodes[0])
    assert there == model
    # ... and may pass it on to another node.
    assert contents(send(there, *nodes)) == contents(model)


def test_a_file_that_changes_meanwhile_is_refused(nodes, model, monkeypatch):
    listed = files._files

    def changing(directory: Path):
        found = list(listed(directory))
        (model / "inner" / "weights").write_bytes(bytes(5120))
        return found

    monkeypatch.setattr(files, "_files", changing)
    with pytest.raises(SchedulerError, match="inner/weights changed while it was copied to node 1"):
        send(SharedDirectory(model), *nodes)
    assert not list(nodes[1].endpoint.directory.glob("files/*/"))


def test_nothing_but_what_was_shared_can_be_read(nodes, model):
    send(SharedDirectory(model), *nodes)
    ask = nodes[1].endpoint.request
    origin = nodes[0].endpoint.address
    for kind, arguments in (
        ("files.list", [str(model.parent)]),
        ("files.read", [str(model), "../secret", 0]),
    ):
        with pytest.raises(SchedulerError, match="not offered"):
            ask(origin, kind, *arguments).result(10)


def test_what_a_worker_wrote_is_brought_where_it_is_wanted(nodes, tmp_path):
    wanted = tmp_path / "run" / "model"
    with destination(wanted) as told:
        elsewhere = replace(told, mark=".of another machine")  # which has a directory `run`, too
        set_process(nodes[1])
        place = send(elsewhere, nodes[0], nodes[1]).place()
        assert place.is_relative_to(nodes[1].endpoint.directory)
        place.mkdir(parents=True)
        (place / "weights").write_bytes(b"w" * 3000)
        written = send(WrittenFiles.at(place), nodes[1], nodes[0])
        written.bring(wanted)
    assert contents(wanted) == {"weights": b"w" * 3000}
    assert list(wanted.parent.iterdir()) == [wanted]


def test_where_files_are_shared_nothing_is_copied(nodes, tmp_path):
    wanted = tmp_path / "model"
    with destination(wanted) as told:
        set_process(nodes[1])
        assert send(told, nodes[0], nodes[1]).place() == wanted
        send(WrittenFiles.at(wanted), nodes[1], nodes[0]).bring(wanted)
    assert not wanted.exists()  # nobody asked for a file


def test_old_sessions_of_ray_are_removed(tmp_path):
    ray_start = pytest.importorskip("rlinf.scheduler.runtime.ray_start")
    now = time.time()
    for number in range(14):
        driver = os.getpid() if number == 13 else 2**22 + number
        session = tmp_path / f"session_2026-01-{number + 1:02d}_10-00-00_1_{driver}"
        (session / "logs").mkdir(parents=True)
        os.utime(session, (now - (number + 1) * 86_400,) * 2)
    (tmp_path / "session_latest").symlink_to(session)
    ray_start.remove_old_sessions(tmp_path)
    left = sorted(path.name[8:18] for path in tmp_path.glob("session_2*"))
    assert left == [*(f"2026-01-{number:02d}" for number in range(1, 11)), "2026-01-14"]


def test_ray_starts_where_the_temporary_directory_has_a_long_path(tmp_path, monkeypatch):
    ray_start = pytest.importorskip("rlinf.scheduler.runtime.ray_start")
    long = tmp_path / "jobs-of-a-cluster" / "1234567"
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    place = ray_start._private_directory()
    assert place.parent == Path("/tmp")
    session = "session_2026-11-29_02-16-21_600948_1234567"
    assert len(f"{place}/ray/{session}/sockets/plasma_store") <= 107  # what Ray takes
    assert not list(long.iterdir())
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert ray_start._private_directory().parent == Path(short)
