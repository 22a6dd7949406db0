"""Payloads, shared-memory blocks and sessions, without a cluster."""

import errno
import gc
import os

import numpy as np
import pytest
import torch

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.transport.blocks import AttachedBlocks, BlockPool, remove_free_blocks
from rlinf.scheduler.transport.payload import LARGE_BYTES, Codec
from rlinf.scheduler.transport.session import (
    OwnedSession,
    remove_stale_sessions,
    shared_memory_directory,
)

LARGE = LARGE_BYTES // 4 + 1


@pytest.fixture
def owned():
    session = OwnedSession()
    yield session
    session.close()


@pytest.fixture
def pool(owned):
    return BlockPool(owned.session)


@pytest.fixture
def codec(pool):
    return Codec(pool, AttachedBlocks())


def test_large_tensors_use_a_block_and_small_ones_do_not(codec, pool):
    assert not codec.encode(torch.ones(10)).uses_blocks
    payload = codec.encode({"a": torch.ones(LARGE), "b": np.zeros(LARGE)})
    assert payload.uses_blocks
    assert pool.count == 2
    assert sum(map(len, payload.frames)) < 2000


def test_blocks_are_reused_once_the_receiver_is_done(codec, pool):
    for value in range(5):
        received = codec.decode(codec.encode(torch.full((LARGE,), float(value))))
        view = received[10:20]
        del received
        gc.collect()
        assert float(view.sum()) == 10 * value
        del view
        gc.collect()
    assert pool.count == 1
    kept = codec.decode(codec.encode(torch.zeros(LARGE)))
    other = codec.decode(codec.encode(torch.ones(LARGE)))
    assert pool.count == 2
    assert float(kept.sum()) == 0.0
    assert float(other.sum()) == LARGE


def test_array_views_keep_their_block(codec, pool):
    received = codec.decode(codec.encode(np.arange(float(LARGE))))
    view = received.reshape(-1, 1)[5:7][::-1]
    del received
    gc.collect()
    codec.encode(np.zeros(LARGE))
    assert view.ravel().tolist() == [6.0, 5.0]


def test_every_receiver_frees_its_share(codec, pool):
    payload = codec.encode(torch.ones(LARGE), receivers=3)
    for receiver in range(3):
        got = codec.decode(payload, receiver=receiver, receivers=3)
        got += receiver
        assert float(got[0]) == 1.0 + receiver
    codec.encode(torch.zeros(LARGE))
    assert pool.count == 1


def test_peeking_leaves_the_block_claimed(codec, pool):
    payload = codec.encode(torch.ones(LARGE))
    assert float(codec.decode(payload, peek=True).sum()) == LARGE
    codec.encode(torch.zeros(LARGE))
    assert pool.count == 2
    assert float(codec.decode(payload).sum()) == LARGE


def test_same_content_inline(codec, pool):
    value = [torch.randn(LARGE), np.asfortranarray(np.ones((300, 200))), torch.ones(3)]
    payload = codec.encode(value, inline=True)
    assert not payload.uses_blocks
    assert len(payload.frames) > 1
    got = codec.decode(payload)
    assert torch.equal(got[0], value[0])
    assert np.array_equal(got[1], value[1])
    got[0] += 1  # writable
    again = codec.without_blocks(codec.encode(value))
    assert not again.uses_blocks
    assert torch.equal(codec.decode(again)[0], value[0])


def test_full_shared_memory_falls_back(codec, pool, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.warns(RuntimeWarning, match="no shared memory left"):
        payload = codec.encode(torch.ones(LARGE))
    assert float(codec.decode(payload).sum()) == LARGE
    assert pool.count == 0


def test_failed_encode_gives_its_blocks_back(codec, pool):
    with pytest.raises(TypeError):
        codec.encode([torch.ones(LARGE), (i for i in range(3))])
    codec.encode(torch.ones(LARGE))
    codec.encode(torch.ones(LARGE))
    assert pool.count == 2


def test_local_classes_and_functions_travel_by_value(codec):
    class Inner:
        value = 3

    function = codec.decode(codec.encode(lambda x: x + Inner.value))
    assert function(1) == 4


def test_shared_references_stay_shared(codec):
    tensor = torch.ones(LARGE)
    got = codec.decode(codec.encode([tensor, tensor]))
    assert got[0] is got[1]


def test_a_vanished_block_is_an_error(codec, owned):
    payload = codec.encode(torch.ones(LARGE))
    owned.session.remove_files()
    with pytest.raises(SchedulerError, match="is gone"):
        Codec(BlockPool(owned.session), AttachedBlocks()).decode(payload)


def test_files_of_a_session_are_removed(owned, codec):
    codec.encode(torch.ones(LARGE))
    prefix = owned.session.block_prefix
    assert list(shared_memory_directory().glob(f"{prefix}*"))
    remove_stale_sessions()  # its driver, this process, lives
    assert list(shared_memory_directory().glob(f"{prefix}*"))
    owned.close()
    assert not list(shared_memory_directory().glob(f"rlinf-{owned.session.token}*"))


def test_files_of_a_dead_driver_are_removed(owned, codec):
    codec.encode(torch.ones(LARGE))
    os.close(owned._lock)  # what the kernel does when a process dies
    owned._lock = None
    remove_stale_sessions()
    assert not list(shared_memory_directory().glob(f"rlinf-{owned.session.token}*"))


def test_only_free_blocks_of_a_dead_worker_are_removed(owned, codec):
    payload = codec.encode(torch.ones(LARGE))
    free = codec.decode(codec.encode(torch.ones(LARGE)))
    del free
    gc.collect()
    remove_free_blocks(owned.session, os.getpid())
    assert len(list(shared_memory_directory().glob(f"{owned.session.block_prefix}*"))) == 1
    assert float(codec.decode(payload).sum()) == LARGE
