"""Layouts and buckets: every byte goes to its place, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.processes.byte_layout import Entry, lay_out
from rlinf.weight_sync.bucket import HostPool, Packer, plan_buckets, unpack
from rlinf.weight_sync.errors import WeightSyncError
from rlinf.weight_sync.link import Parties, Place, Request, agreed_dtypes

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]


@settings(max_examples=80)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES)), max_size=8
    ),
    bucket_size=st.sampled_from([1, 3, 64, 1000, 1 << 20]),
    alone=st.sampled_from([1, 500, 1 << 20]),
    cast=st.booleans(),
)
def test_what_is_packed_comes_out(shapes, bucket_size, alone, cast):
    shapes = [(shape, dtype) for shape, dtype in shapes if torch.Size(shape).numel() < 3000]
    if bucket_size < 64:
        shapes = shapes[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlinf.weight_sync.bucket._ALONE_BYTES", alone)
        weights = {
            str(i): (torch.randn(shape) * 100).to(dtype) for i, (shape, dtype) in enumerate(shapes)
        }
        layout = lay_out(weights, dict.fromkeys(weights, torch.float16) if cast else {})
        ranges = plan_buckets(layout, bucket_size)
        assert all(0 < end - begin <= bucket_size for begin, end in ranges)
        packer = Packer(layout, weights)
        parts = []
        for bucket in ranges:
            whole = packer.alone(bucket)
            if whole is None:
                whole = torch.empty(bucket[1] - bucket[0], dtype=torch.uint8)
            else:
                whole = whole.clone()
            packer.fill(bucket, whole)
            parts.append(whole)
        found = unpack(layout, ranges, parts, HostPool())
    for name, tensor in weights.items():
        expected = tensor.half() if cast else tensor
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)


def test_a_bucket_looks_at_its_own_tensors_only(monkeypatch):
    """A model of many experts has tens of thousands of tensors in hundreds of buckets."""
    weights = {str(number): torch.full((64,), number) for number in range(500)}
    layout = lay_out(weights, {})
    ranges = plan_buckets(layout, 10 * layout.entries[1].offset)
    assert len(ranges) == 50
    packer, asked = Packer(layout, weights), []
    end_of = Entry.end.fget
    monkeypatch.setattr(Entry, "end", property(lambda entry: asked.append(1) or end_of(entry)))
    for bucket in ranges:
        assert packer.alone(bucket) is None
        packer.fill(bucket, torch.empty(bucket[1] - bucket[0], dtype=torch.uint8))
    assert len(asked) <= 10 * len(weights)


def test_what_shares_memory_lies_in_one_place():
    table = torch.zeros(3, 4)
    layout = lay_out({"a": table, "b": torch.zeros(()), "c": table, "d": torch.zeros(0)}, {})
    assert [entry.tied for entry in layout.entries] == [False, False, True, False]
    assert sum(entry.numel for entry in layout.owners) == 13


def test_views_of_one_storage_are_not_tied():
    table = torch.arange(12.0)
    weights = {"whole": table, "half": table[:6], "matrix": table.view(3, 4)}
    layout = lay_out(weights, {})
    assert not any(entry.tied for entry in layout.entries)
    tied = {"a": table, "b": table}
    assert not any(e.tied for e in lay_out(tied, {"b": torch.float16}).entries)


def test_memory_of_a_pool_is_used_again_when_nobody_looks():
    pool = HostPool()
    first = pool.take(1000)
    place = first.data_ptr()
    inner = first[10:20].view(torch.int16)
    del first
    second = pool.take(1000)
    assert second.data_ptr() != place
    del inner
    assert pool.take(1000).data_ptr() == place


def test_a_bucket_of_another_length_is_refused():
    layout = lay_out({"a": torch.zeros(10)}, {})
    with pytest.raises(WeightSyncError, match="a bucket of 40 bytes came with 39"):
        unpack(layout, [(0, 40)], [torch.zeros(39, dtype=torch.uint8)], HostPool())


def test_receivers_have_to_agree_on_a_type():
    place = Place(node=0, process=1, in_process=False)
    requests = [
        Request(rank=rank, ticket=("t", 0), place=place, base=None, targets={"a": ((3,), dtype)})
        for rank, dtype in enumerate([torch.float16, torch.bfloat16])
    ]
    with pytest.raises(WeightSyncError, match=r"receiver 1 wants a as torch\.bfloat16"):
        agreed_dtypes({"a": torch.zeros(3)}, requests)


def test_who_serves_whom():
    parties = Parties(sender="a", receiver="b", receivers=5, senders=2)
    assert [parties.served_by(rank) for rank in range(3)] == [[0, 2, 4], [1, 3], []]
    assert [parties.sender_of(rank) for rank in range(5)] == [0, 1, 0, 1, 0]
