"""Payloads, shared-memory blocks and files, without a cluster."""

import errno
import gc
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.scheduler.address import WorkerAddress
from rlinf.scheduler.errors import SchedulerError, SchedulerTypeError, WorkerDiedError
from rlinf.scheduler.process import AsyncWork, Process, current_process, set_process
from rlinf.scheduler.runtime.execution import run_method
from rlinf.scheduler.transport import blocks, cluster_files, sockets
from rlinf.scheduler.transport.blocks import (
    AttachedBlocks,
    Block,
    BlockPool,
    EndedProcesses,
    process_number,
    remove_free_blocks,
)
from rlinf.scheduler.transport.cluster_files import (
    ClusterFiles,
    remove_stale_files,
    shared_memory_directory,
)
from rlinf.scheduler.transport.endpoint import Reply
from rlinf.scheduler.transport.links import SECRET_BYTES, IncomingLink, OutgoingLink
from rlinf.scheduler.transport.payload import LARGE_BYTES, Codec, dumps
from rlinf.scheduler.transport.sockets import SocketEndpoint

LARGE = LARGE_BYTES // 4 + 1


@pytest.fixture
def files():
    made = ClusterFiles.create()
    yield made
    made.close()


@pytest.fixture
def pool(files):
    return BlockPool(files)


@pytest.fixture
def codec(pool):
    return Codec(pool)


def test_large_tensors_use_a_block_and_small_ones_do_not(codec, pool):
    assert not codec.encode(torch.ones(10)).blocks
    payload = codec.encode({"a": torch.ones(LARGE), "b": np.zeros(LARGE)})
    assert payload.blocks
    assert len(pool.blocks) == 2
    assert sum(map(len, payload.frames)) < 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_one_element_or_none_travels_whatever_its_stride(codec, dtype):
    wide = torch.ones(2, 4).to(dtype)
    cut = [wide[:1, 0], wide[:1, 1:2], wide[::2][:, 3], wide[0, 2], wide[:0, 0], wide.T[1:1]]
    for value, got in zip(cut, codec.decode(codec.encode(cut)), strict=True):
        assert got.dtype == dtype
        assert got.shape == value.shape
        assert torch.equal(got, value)


def test_blocks_are_reused_once_the_receiver_is_done(codec, pool):
    for value in range(5):
        received = codec.decode(codec.encode(torch.full((LARGE,), float(value))))
        view = received[10:20]
        del received
        gc.collect()
        assert float(view.sum()) == 10 * value
        del view
        gc.collect()
    assert len(pool.blocks) == 1
    kept = codec.decode(codec.encode(torch.zeros(LARGE)))
    other = codec.decode(codec.encode(torch.ones(LARGE)))
    assert len(pool.blocks) == 2
    assert float(kept.sum()) == 0.0
    assert float(other.sum()) == LARGE


def test_an_allocation_looks_at_few_of_the_blocks_that_are_outstanding(pool, monkeypatch):
    """What a channel holds may be thousands of large items."""
    looks, busy = [], Block.busy.fget
    monkeypatch.setattr(Block, "busy", property(lambda block: looks.append(1) or busy(block)))
    outstanding = [pool.allocate(LARGE_BYTES) for _ in range(200)]
    assert len({block.name for block in outstanding}) == 200
    assert len(looks) <= 20 * 200
    outstanding[100].claim(0)
    assert outstanding[100] in [pool.allocate(LARGE_BYTES) for _ in range(20)]


def test_where_shared_memory_is_full_every_block_is_looked_at(pool, monkeypatch):
    outstanding = [pool.allocate(LARGE_BYTES) for _ in range(100)]
    monkeypatch.setattr(os, "posix_fallocate", _refuse)
    free = outstanding[50]
    free.claim(0)
    assert pool.allocate(LARGE_BYTES) is free
    with pytest.warns(RuntimeWarning, match="no shared memory left"):
        assert pool.allocate(LARGE_BYTES) is None


def test_free_memory_is_given_back_beyond_a_bound(pool, monkeypatch):
    """Those that are free for longest first; a free block is used where it fits."""
    monkeypatch.setattr(blocks, "_MOST_FREE_BYTES", 3 * LARGE_BYTES)
    small = [pool.allocate(LARGE_BYTES) for _ in range(5)]
    for block in small:
        block.claim(0)
    large = pool.allocate(20 * LARGE_BYTES)
    assert set(pool.blocks) == {*small[2:], large}
    assert pool.allocate(LARGE_BYTES // 2) is small[2]


def test_array_views_keep_their_block(codec, pool):
    received = codec.decode(codec.encode(np.arange(float(LARGE))))
    view = received.reshape(-1, 1)[5:7][::-1]
    del received
    gc.collect()
    codec.encode(np.zeros(LARGE))
    assert view.ravel().tolist() == [6.0, 5.0]


def test_what_a_forked_child_drops_stays_its_parents(codec, pool):
    received = [codec.decode(codec.encode(torch.ones(LARGE)))]
    withdrawn = multiprocessing.get_context("fork").Event()
    received.append(AsyncWork(Future(), "an item", abandon=withdrawn.set))

    def drop() -> None:
        received.clear()
        gc.collect()
        time.sleep(0.2)  # what is dropped is taken back by a thread

    child = multiprocessing.get_context("fork").Process(target=drop)
    child.start()
    child.join(30)
    assert (child.exitcode, withdrawn.is_set()) == (0, False)
    codec.encode(torch.zeros(LARGE))
    assert len(pool.blocks) == 2
    assert float(received[0].sum()) == LARGE


def test_every_receiver_frees_its_share(codec, pool):
    payload = codec.encode(torch.ones(LARGE), receivers=3)
    for receiver in range(3):
        got = codec.decode(payload, receiver=receiver, receivers=3)
        got += receiver
        assert float(got[0]) == 1.0 + receiver
    codec.encode(torch.zeros(LARGE))
    assert len(pool.blocks) == 1


def test_peeking_leaves_the_block_claimed(codec, pool):
    payload = codec.encode(torch.ones(LARGE))
    assert float(codec.decode(payload, peek=True).sum()) == LARGE
    codec.encode(torch.zeros(LARGE))
    assert len(pool.blocks) == 2
    assert float(codec.decode(payload).sum()) == LARGE


def test_same_content_inline(codec, pool):
    value = [torch.randn(LARGE), np.asfortranarray(np.ones((300, 200))), torch.ones(3)]
    payload = codec.encode(value, inline=True)
    assert not payload.blocks
    assert len(payload.frames) > 1
    got = codec.decode(payload)
    assert torch.equal(got[0], value[0])
    assert np.array_equal(got[1], value[1])
    got[0] += 1  # writable
    again = codec.without_blocks(codec.encode(value))
    assert not again.blocks
    assert torch.equal(codec.decode(again)[0], value[0])


def _refuse(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_shared_memory_falls_back(codec, pool, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", _refuse)
    with pytest.warns(RuntimeWarning, match="no shared memory left"):
        payload = codec.encode(torch.ones(LARGE))
    assert float(codec.decode(payload).sum()) == LARGE
    assert len(pool.blocks) == 0


def test_failed_encode_gives_its_blocks_back(codec, pool):
    with pytest.raises(TypeError):
        codec.encode([torch.ones(LARGE), (i for i in range(3))])
    codec.encode(torch.ones(LARGE))
    codec.encode(torch.ones(LARGE))
    assert len(pool.blocks) == 2


def test_what_cannot_be_pickled_is_told_in_a_line(codec):
    for value, culprit in (
        ({"a": [threading.Lock()]}, "_thread.lock"),
        ((i for i in "a"), "generator"),
    ):
        with pytest.raises(SchedulerTypeError, match=f"has to be picklable.*'{culprit}' object"):
            codec.encode(value)


@pytest.mark.parametrize("beside", [None, lambda: None], ids=["by reference", "by value"])
def test_what_is_nested_too_deeply_is_told_and_gives_its_blocks_back(codec, pool, beside):
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    for _ in range(2):
        with pytest.raises(SchedulerTypeError, match="nested too deeply to be sent"):
            codec.encode([torch.ones(LARGE), beside, deep])
    assert [block.busy for block in pool.blocks] == [False]


def test_whatever_an_object_raises_its_blocks_are_given_back(codec, pool):
    class Broken:
        def __reduce__(self):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        codec.encode([torch.ones(LARGE), Broken()])
    assert [block.busy for block in pool.blocks] == [False]


def test_local_classes_and_functions_travel_by_value(codec):
    class Inner:
        value = 3

    function = codec.decode(codec.encode(lambda x: x + Inner.value))
    assert function(1) == 4


def test_shared_references_stay_shared(codec):
    tensor = torch.ones(LARGE)
    got = codec.decode(codec.encode([tensor, tensor]))
    assert got[0] is got[1]


def test_a_vanished_block_is_an_error(codec, files):
    payload = codec.encode(torch.ones(LARGE))
    files.remove()
    with pytest.raises(SchedulerError, match="is gone"):
        Codec(BlockPool(files)).decode(payload)


def test_files_of_a_cluster_are_removed(files, codec):
    codec.encode(torch.ones(LARGE))
    prefix = files.block_prefix
    assert list(shared_memory_directory().glob(f"{prefix}*"))
    remove_stale_files()  # its driver, this process, lives
    assert list(shared_memory_directory().glob(f"{prefix}*"))
    files.close()
    assert not list(shared_memory_directory().glob(f"rlinf-{files.name}*"))


def test_files_of_a_dead_driver_are_removed(files, codec):
    codec.encode(torch.ones(LARGE))
    os.close(files._lock)  # what the kernel does when a process dies
    files._lock = None
    remove_stale_files()
    assert not list(shared_memory_directory().glob(f"rlinf-{files.name}*"))


def test_only_free_blocks_of_a_dead_worker_are_removed(files, codec):
    payload = codec.encode(torch.ones(LARGE))
    free = codec.decode(codec.encode(torch.ones(LARGE)))
    del free
    gc.collect()
    remove_free_blocks(files, os.getpid())
    assert len(list(shared_memory_directory().glob(f"{files.block_prefix}*"))) == 1
    assert float(codec.decode(payload).sum()) == LARGE


def test_what_a_process_needed_that_ended_is_given_back(files, pool, codec):
    """What it was sent, and what it looked at; the others of a broadcast still need theirs."""
    ended, lives = process_number(0, 77), process_number(0, 78)
    reader = Codec(BlockPool(files))
    reader._attached = AttachedBlocks(ended)
    sent = codec.encode(torch.ones(LARGE), owners=[ended])
    held = reader.decode(codec.encode(torch.ones(LARGE)))
    both = codec.encode(torch.full((LARGE,), 3.0), receivers=2, owners=[ended, lives])
    unknown = codec.encode(torch.full((LARGE,), 4.0))
    blocks = pool.blocks
    remove_free_blocks(files, 77, node_rank=1)  # a namesake
    assert [block.busy for block in blocks] == [True] * 4
    remove_free_blocks(files, 77)
    assert [block.busy for block in blocks] == [False, False, True, True]
    assert codec.decode(both, receiver=1, receivers=2)[0] == 3.0
    assert [block.busy for block in blocks] == [False, False, False, True]
    assert codec.decode(unknown)[0] == 4.0
    del sent, held


def test_what_a_writer_leaves_in_use_is_removed_when_the_next_process_ends(files, codec):
    payload, ended = codec.encode(torch.ones(LARGE)), EndedProcesses(files, 0)
    reader = Codec(BlockPool(files), node_rank=1)  # not this process, which is said to have ended

    def left():
        return len(list(shared_memory_directory().glob(f"{files.block_prefix}*")))

    ended.add(os.getpid())
    held = reader.decode(payload)
    ended.add(77)
    assert left() == 1
    del held
    gc.collect()
    ended.discard(78)
    ended.add(78)
    assert left() == 0


@pytest.fixture
def connect(files):
    endpoints = []

    def make(node: int = 0, ip: str | None = None) -> SocketEndpoint:
        own = Codec(BlockPool(files))
        endpoints.append(SocketEndpoint(files, own, node, ip))
        endpoints[-1].register("echo", lambda value, payloads=(): Reply(value, payloads))
        return endpoints[-1]

    yield make
    for endpoint in endpoints:
        endpoint.close()


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)])
def test_messages_larger_than_the_sockets_cross_both_ways(connect, codec, nodes):
    here, there = (connect(node, "127.0.0.1") for node in nodes)
    data = np.random.default_rng(0).random(3_000_000)
    answers = []
    for _ in range(4):
        for source, target in ((here, there), (there, here)):
            payload = codec.encode(data, inline=True)
            answers.append(source.request(target.address, "echo", "back", payloads=[payload]))
    for answer in answers:
        reply = answer.result(30)
        assert reply.value == "back"
        assert np.array_equal(codec.decode(reply.payloads[0]), data)


def test_blocks_are_sent_as_bytes_to_another_node(connect, codec):
    here, there = connect(0, "127.0.0.1"), connect(1, "127.0.0.1")
    payload = codec.encode(torch.ones(LARGE))
    assert payload.blocks
    reply = here.request(there.address, "echo", 1, payloads=[payload]).result(30)
    assert not reply.payloads[0].blocks
    assert float(codec.decode(reply.payloads[0]).sum()) == LARGE


def test_order_is_kept_under_load(connect):
    here, there = connect(), connect()
    seen = []
    there.register("note", seen.append)
    for index in range(5000):
        here.tell(there.address, "note", (index, b"x" * 3000))
    assert here.request(there.address, "echo", "last").result(30).value == "last"
    assert [index for index, _ in seen] == list(range(5000))


def test_errors_and_unknown_kinds_come_back(connect):
    here, there = connect(), connect()

    def fail():
        raise KeyError("gone")

    there.register("fail", fail)
    with pytest.raises(KeyError, match="gone"):
        here.request(there.address, "fail").result(30)
    with pytest.raises(SchedulerError, match="no service answers 'nothing'"):
        here.request(there.address, "nothing").result(30)


def test_a_process_that_is_gone_is_an_error(connect, monkeypatch):
    monkeypatch.setattr(sockets, "_SECONDS_TO_LEARN", 0.05)  # of what is no worker nobody tells
    here, there = connect(), connect()
    here.request(there.address, "echo", 1).result(30)
    there.close()

    def keep_telling() -> None:
        for _ in range(100):
            here.tell(there.address, "echo", 1)

    with pytest.raises(WorkerDiedError, match="is gone"):
        keep_telling()
    waiting = here.request(here.address, "echo", 1)
    assert waiting.result(30).value == 1


def test_a_request_to_a_process_that_is_gone_fails_as_the_registry_tells(connect, monkeypatch):
    here, there, unknown = connect(), connect(), connect()
    for peer in (there, unknown):
        here.request(peer.address, "echo", 1).result(30)
        peer.close()
    asked = [here.request(there.address, "echo", 1) for _ in range(20)]
    assert not asked[-1].done()
    died = WorkerDiedError("worker 'env:0' died: its process 7 ended")
    here.forget(there.address, died)
    assert {answer.exception(5) for answer in asked} == {died}
    # What is asked later need not wait, and hears the same.
    assert here.request(there.address, "echo", 1).exception(0) is died
    with pytest.raises(WorkerDiedError, match="worker 'env:0' died"):
        here.tell(there.address, "echo", 1)
    # Of a process that is no worker nobody tells.
    monkeypatch.setattr(sockets, "_SECONDS_TO_LEARN", 0.05)
    late = [here.request(unknown.address, "echo", 1) for _ in range(20)]
    with pytest.raises(WorkerDiedError, match="is gone"):
        late[-1].result(30)


def test_what_is_told_to_a_process_that_is_gone_fails_as_the_registry_tells(connect):
    here, there = connect(), connect()
    here.request(there.address, "echo", 1).result(30)
    there.close()
    died = WorkerDiedError("worker 'rollout:0' died: its process 7 ended")
    late = threading.Timer(0.2, here.forget, (there.address, died))
    late.start()

    def keep_telling() -> None:
        for _ in range(100):
            here.tell(there.address, "echo", 1)

    with pytest.raises(WorkerDiedError, match=r"worker 'rollout:0' died"):
        keep_telling()
    late.join()


def test_a_long_backlog_is_written_out_without_being_copied(tmp_path):
    class Counted(deque):
        def __iter__(self):
            for item in super().__iter__():
                seen.append(1)
                yield item

    seen, sent = [], b"".join(bytes([number % 256]) * 1000 for number in range(5000))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        secret = bytes(SECRET_BYTES)
        link = OutgoingLink(str(tmp_path / "socket"), "", secret, lambda link: None)
        peer, _ = listener.accept()
    for number in range(5000):
        link.send([sent[1000 * number : 1000 * (number + 1)]])
    link._backlog = Counted(link._backlog)
    waiting = len(link._backlog)
    assert waiting > 1000
    for _ in range(10):
        link.flush()  # nobody reads
    assert len(seen) <= 10 * 64
    incoming, received = IncomingLink(peer, secret), b""
    while not link.flush() or len(received) < len(sent):
        messages, still_open = incoming.read()
        assert still_open
        received += b"".join(frame for frames in messages for frame in frames)
    assert received == sent
    incoming.close()
    link.close()


def test_waiting_threads_read_for_themselves(connect):
    here, there = connect(), connect()
    gate: Future = Future()
    there.register("gate", lambda: gate)
    late = here.request(there.address, "gate")
    results = []

    def ask(value: int) -> None:
        for _ in range(200):
            answer = here.request(there.address, "echo", value)
            here.wait(answer, 30)
            results.append(answer.result(0).value)

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    here.wait(late, 0.05)
    assert not late.done()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0] * 200 + [1] * 200 + [2] * 200
    gate.set_result("open")
    here.wait(late, 30)
    assert late.result(0).value == "open"


def test_who_does_not_know_the_secret_is_not_heard(connect):
    there = connect(0, "127.0.0.1")
    heard = []
    there.register("note", heard.append)
    _, path, network = there.address.split("|")
    stranger = OutgoingLink(path, network, b"0" * SECRET_BYTES, lambda link: None)

    def keep_sending() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if stranger.flush():  # what waits in a backlog is written by nobody else here
                stranger.send([b"x" * 1000])

    with pytest.raises(OSError):  # noqa: PT011 - refused while writing, whichever error that is
        keep_sending()
    assert heard == []


def test_a_waiter_hears_of_what_this_process_fulfils_itself(connect):
    here = connect()
    own: Future = Future()
    returned = threading.Event()

    def wait() -> None:
        here.wait(own, 200)  # on a quiet socket: no message will ever come
        returned.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not returned.wait(0.2)
    own.set_result("done here")
    assert returned.wait(30)


def test_what_another_node_reads_has_no_blocks(codec, connect):
    process = Process(
        runtime="ray",
        endpoint=connect(),
        codec=codec,
        driver="",
        node_rank=0,
        deadline_seconds=10,
    )
    value = torch.arange(float(LARGE))
    assert process.encode(value, reader_node=0).blocks
    far = process.encode(value, reader_node=1)
    assert not far.blocks
    assert torch.equal(process.decode(far), value)


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_method_gives_to_another_node_has_no_blocks(codec, connect, raises):
    class Giver:
        worker_address = WorkerAddress("giver", 0)

        def give(self):
            if raises:
                raise ValueError(torch.arange(float(LARGE)))
            return torch.arange(float(LARGE))

    process = Process(
        runtime="ray", endpoint=connect(), codec=codec, driver="", node_rank=0, deadline_seconds=10
    )
    before = current_process()
    set_process(process)
    try:
        given = [run_method(Giver(), "give", process.encode(((), {})), node) for node in (0, 1)]
    finally:
        set_process(before)
    assert [bool(outcome.payload.blocks) for outcome in given] == [True, False]
    assert [outcome.failed for outcome in given] == [raises] * 2
    if not raises:
        assert torch.equal(process.decode(given[1].payload), torch.arange(float(LARGE)))


WORKER = """
import pickle, sys
from rlinf.scheduler.transport.payload import dumps
value = pickle.loads(sys.stdin.buffer.read())
value.x = 5
sys.stdout.buffer.write(dumps(value))
"""


def test_what_has_slots_and_a_class_of_the_program_comes_back_from_a_worker():
    pytest.importorskip("ray")

    @dataclass(slots=True)
    class Point:
        x: int
        y: float = 1.0

    class Named(Point):
        name = "here"

    for kind in (Point, Named):
        value = kind(1)
        if kind is Named:
            value.name = "there"
        answer = subprocess.run(
            [sys.executable, "-c", WORKER], input=dumps(value), capture_output=True, check=True
        )
        back = pickle.loads(answer.stdout)
        assert type(back) is kind
        assert (back.x, back.y) == (5, 1.0)
        assert getattr(back, "name", "there") == "there"


def test_shared_memory_that_cannot_be_written_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cluster_files, "SHARED_MEMORY", tmp_path)
    assert shared_memory_directory() == tmp_path
    ClusterFiles.create().close()
    assert not caplog.messages
    # An administrator may write to whatever is not mounted for reading.
    monkeypatch.setattr(cluster_files.os, "access", lambda path, mode: False)
    assert shared_memory_directory() == Path(tempfile.gettempdir())
    ClusterFiles.create().close()
    [told] = caplog.messages
    assert told.startswith(f"{tmp_path} cannot be written: what processes share lies in ")
