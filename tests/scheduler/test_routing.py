from math import lcm
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from rlinf.errors import UserError
from rlinf.scheduler.channel.channel import (
    WeightedItem,
)
from rlinf.scheduler.compat.batches import (
    get_batch_size,
    infer_batch_size,
    merge_batches,
    split_batch,
    validate_batch_size,
)
from rlinf.scheduler.compat.routing import (
    CommMapper,
    build_channel_message,
    build_recv_plan,
    build_route_channel_key,
    build_send_key,
    build_send_plan,
    decoupled_build_recv_plan,
    decoupled_build_send_plan,
    get_group_world_size,
    split_channel_message,
)

WORLDS = st.tuples(st.integers(1, 12), st.integers(1, 12))


def sizes(plan):
    return [(entry.peer_rank, entry.batch_size) for entry in plan.entries]


def test_the_documented_example():
    common = {
        "src_group_name": "env",
        "dst_group_name": "rollout",
        "src_world_size": 2,
        "dst_world_size": 3,
        "batch_size": 12,
    }
    assert sizes(build_send_plan(src_rank=0, **common)) == [(0, 4), (1, 2)]
    assert sizes(build_send_plan(src_rank=1, **common)) == [(1, 2), (2, 4)]
    assert sizes(build_recv_plan(dst_rank=1, **common)) == [(0, 2), (1, 2)]
    plan = build_send_plan(src_rank=1, tag="obs", route_key=3, **common)
    assert plan.entries[0].key == ("scheduler_route", "env", "rollout", "obs", "3", 1, 1)
    assert (plan.src_rank, plan.dst_rank, plan.tag) == (1, None, "obs")


def test_keys():
    key = build_route_channel_key("a", "b", 0, 1, "t")
    assert key == ("scheduler_route", "a", "b", "t", "", 0, 1)
    assert build_route_channel_key("a", "b", 0, 1, None, "k")[3:5] == ("default", "k")
    named = build_send_key(
        src_group_name="a", dst_group_name="b", src_rank=0, dst_rank=1, tag="t", route_key=None
    )
    assert named == key
    assert CommMapper.build_channel_key(0, 1, "x") == "0_1_x"


@given(WORLDS, st.integers(1, 4), st.booleans())
def test_plans_of_all_ranks_agree_and_move_every_sample_once(worlds, factor, known):
    senders, receivers = worlds
    batch = lcm(senders, receivers) * factor
    common = {
        "src_group_name": "s",
        "dst_group_name": "d",
        "src_world_size": senders,
        "dst_world_size": receivers,
        "batch_size": batch if known else None,
    }
    sent = [build_send_plan(src_rank=rank, **common) for rank in range(senders)]
    taken = [build_recv_plan(dst_rank=rank, **common) for rank in range(receivers)]
    by_sender = [e.key for plan in sent for e in plan.entries]
    by_receiver = [e.key for plan in taken for e in plan.entries]
    assert len(set(by_sender)) == len(by_sender)
    assert sorted(by_sender) == sorted(by_receiver)
    if not known:
        assert {e.batch_size for plan in sent + taken for e in plan.entries} == {None}
        return
    samples = torch.arange(batch)
    channel = {}
    for plan, part in zip(sent, samples.chunk(senders), strict=True):
        shards = split_batch(part, [e.batch_size for e in plan.entries])
        channel.update(zip([e.key for e in plan.entries], shards, strict=True))
    arrived = [merge_batches([channel[e.key] for e in plan.entries]) for plan in taken]
    for plan, received in zip(taken, arrived, strict=True):
        assert len(received) == sum(e.batch_size for e in plan.entries) == batch // receivers
    assert torch.equal(torch.cat(arrived), samples)


@given(WORLDS)
def test_destinations_and_sources_are_each_others_inverse(worlds):
    senders, receivers = worlds
    batch = lcm(senders, receivers)
    pairs = {
        (src, dst, size)
        for src in range(senders)
        for dst, size in CommMapper.get_dst_ranks(batch, senders, receivers, src)
    }
    inverse = {
        (src, dst, size)
        for dst in range(receivers)
        for src, size in CommMapper.get_src_ranks(batch, senders, receivers, dst)
    }
    assert pairs == inverse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 3, 5, 0), r"batch_size \(10\).*divisible by src_world_size \(3\).*legal: 15"),
        ((10, 5, 3, 0), r"divisible by dst_world_size \(3\)"),
        ((0, 1, 1, 0), r"must be positive"),
        ((6, 2, 3, 2), r"_rank \(2\) must be in \[0, 2\).*legal: 1|src_rank"),
        ((6, 0, 3, 0), r"World sizes must be 1 or more"),
    ],
)
def test_what_cannot_be_routed(arguments, message):
    with pytest.raises(AssertionError, match=message) as caught:
        CommMapper.get_dst_ranks(*arguments)
    assert isinstance(caught.value, UserError)


@given(WORLDS, st.integers(1, 3))
def test_decoupled_shards(worlds, factor):
    own, others = worlds
    batch = max(own, others) * factor
    shards = CommMapper.decoupled_get_batch_size(batch, own, others)
    assert set(shards) == {factor}
    assert len(shards) == -(-others // own)
    if own < others:
        assert CommMapper.decoupled_get_batch_size(batch, own, others, queue_size=1) == [factor]


def test_decoupled_exchange_leads_answers_back():
    """4 env ranks send a shard each, 2 rollout ranks serve two each, in any order."""
    env = {"src_world_size": 4, "dst_world_size": 2, "batch_size": 32, "tag": "obs"}
    serve = {"src_world_size": 2, "dst_world_size": 4, "batch_size": 32}
    waiting = []
    for rank in range(4):
        plan = decoupled_build_send_plan(
            src_group_name="env", dst_group_name="rollout", src_rank=rank, mode="train", **env
        )
        waiting += [(entry.key, entry.batch_index) for entry in plan.entries]
    request = decoupled_build_recv_plan(
        src_group_name="env", dst_group_name="rollout", recv_rank=None, tag="obs", **serve
    )
    assert [entry.batch_size for entry in request.entries] == [8, 8]
    assert {entry.key for entry in request.entries} == {key for key, _ in waiting}
    labels = [label for _, label in waiting]
    assert labels == [f"{rank}_0_train_obs" for rank in range(4)]
    answer = decoupled_build_send_plan(
        src_group_name="rollout",
        dst_group_name="env",
        src_rank=None,
        tag_batch_router=[labels[3], labels[1]],
        **serve,
    )
    expected = [
        decoupled_build_recv_plan(
            src_group_name="rollout", dst_group_name="env", recv_rank=rank, **env
        )
        .entries[0]
        .key
        for rank in (3, 1)
    ]
    assert [entry.key for entry in answer.entries] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 10}, r"divisible by the larger group \(4 workers\).*legal: 8"),
        ({"send_queue_size": 3}, r"queue_size 3 is more than.*legal: 2"),
        ({"dst_world_size": 3, "batch_size": 6}, r"a rank would send 4 samples but holds 3"),
        ({"tag_batch_router": ["0_0_m_t"]}, r"1 labels.*2 shards"),
    ],
)
def test_what_cannot_be_sent_decoupled(arguments, message):
    legal = {
        "src_group_name": "a",
        "dst_group_name": "b",
        "src_rank": 0,
        "src_world_size": 2,
        "dst_world_size": 4,
        "batch_size": 8,
    }
    decoupled_build_send_plan(**legal)
    with pytest.raises(AssertionError, match=message):
        decoupled_build_send_plan(**{**legal, **arguments})


def test_shard_labels():
    assert split_channel_message("3_1_train_rollout_results") == (3, 1, "train", "rollout_results")
    assert build_channel_message(3, 1, "train", "rollout_results") == "3_1_train_rollout_results"
    for text in ("", "1_2_train", "x_1_train_obs", "1_-1_train_obs"):
        with pytest.raises(ValueError, match="not a shard label"):
            split_channel_message(text)


def leaves(batch):
    whole = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
    shape = st.tuples(st.just(batch), st.integers(0, 3))
    arrays = shape.flatmap(lambda s: numpy_strategies.arrays(np.float32, s, elements=st.just(1.5)))
    lists = st.lists(st.integers(), min_size=batch, max_size=batch)
    return st.one_of(whole, arrays, arrays.map(torch.from_numpy), lists, lists.map(tuple))


def equal(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_merge_undoes_split(parts, data):
    payload = data.draw(
        st.recursive(
            leaves(sum(parts)),
            lambda inner: st.dictionaries(st.text(max_size=2), inner),
            max_leaves=6,
        )
    )
    shards = split_batch(payload, parts)
    assert len(shards) == len(parts)
    assert equal(merge_batches(shards), payload)


def test_shards_have_the_asked_sizes():
    payload = {"x": torch.arange(10).reshape(5, 2), "y": list("abcde"), "n": None, "s": 3}
    first, second = split_batch(payload, [2, 3])
    assert first["x"].tolist() == [[0, 1], [2, 3]]
    assert (first["y"], second["y"]) == (["a", "b"], ["c", "d", "e"])
    assert (first["n"], second["s"]) == (None, 3)
    assert (infer_batch_size(first), infer_batch_size(second)) == (2, 3)
    assert second["x"].is_contiguous()
    assert second["x"].data_ptr() == payload["x"][2:].data_ptr()


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.zeros(3, 2), 3),
        (np.zeros((2, 5)), 2),
        ([1, 2], 2),
        ({"a": None, "b": [1]}, 1),
        ({"a": "text", "b": {"c": torch.zeros(4)}}, 4),
    ],
)
def test_batch_sizes(data, size):
    assert infer_batch_size(data) == size
    assert get_batch_size(data) == size
    assert get_batch_size(data, lambda _: 7) == 7
    validate_batch_size(data, size)
    validate_batch_size(data, None)
    with pytest.raises(ValueError, match=f"Expected batch size {size + 1}, but received {size}"):
        validate_batch_size(data, size + 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: infer_batch_size({"a": None}), "all its values are None"),
        (lambda: infer_batch_size({1, 2}), "Unsupported payload type.*set"),
        (lambda: infer_batch_size(3), "Cannot infer"),
        (lambda: split_batch(torch.zeros(4), [1, 2]), r"batch of 4 into \[1, 2\].*add up to 3"),
        (lambda: split_batch([1, 2], [3, -1]), "0 or more"),
        (lambda: split_batch({1}, [1]), "Unsupported payload type"),
        (lambda: merge_batches([]), "empty list of batches"),
        (lambda: merge_batches([None, torch.zeros(1)]), "mix of None and non-None"),
        (lambda: merge_batches([[1], torch.zeros(1)]), "mix of Tensor, list"),
        (lambda: merge_batches([{"a": 1}, {"b": 1}]), "different keys"),
        (lambda: merge_batches([1, 2]), r"different values.*\[1, 2\]"),
        (lambda: merge_batches([{1}, {2}]), "Unsupported payload type for batch merge: set"),
    ],
)
def test_what_cannot_be_split_or_merged(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, UserError)


def test_world_size_of_a_registered_group():
    known = {"env:0": SimpleNamespace(group_world_size=4)}
    registry = SimpleNamespace(get_worker_info=lambda address: known.get(address.get_name()))
    assert get_group_world_size(registry, "env") == 4
    with pytest.raises(ValueError, match="'rollout' is not registered"):
        get_group_world_size(registry, "rollout")


def test_weighted_items_compare_by_weight():
    assert repr(WeightedItem(weight=0, item="x")) == "WeightedItem(weight=0, item='x')"
    assert WeightedItem(1, {}) < WeightedItem(2, None)
