"""Every syncer on both runtimes: what arrives, bit by bit."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time

import pytest
import torch

from rlinf.scheduler.errors import WorkerCallError, WorkerDiedError
from rlinf.weight_sync.bucket import Collective, Meeting
from rlinf.weight_sync.config import (
    AutoConfig,
    BucketConfig,
    PatchConfig,
    ReferenceConfig,
    SharedMemoryConfig,
)
from rlinf.weight_sync.errors import TornReadError, WeightSyncError
from rlinf.weight_sync.link import Parties
from tests.weight_sync.workers import bits

CONFIGS = {
    "auto": AutoConfig(),
    "shared_copy": SharedMemoryConfig(),
    "shared_view": SharedMemoryConfig(reads="view"),
    "bucket": BucketConfig(bucket_size=1 << 20),
    "bucket_small": BucketConfig(bucket_size=1000),
    "patch": PatchConfig(bucket_size=4096),
    "patch_absolute": PatchConfig(delta_encoding=False),
}


def connect(pair, config, *, senders=1, targets=None) -> None:
    sender, receiver = pair
    parties = Parties(sender="trainer", receiver="generator", receivers=2, senders=senders)
    sender.open_sender(config, parties).wait()
    receiver.open_receiver(config, parties, targets).wait()


def sync(pair, weights, version):
    """Send and receive; returns what rank 0 sent and what every receiver got."""
    sending = pair[0].send_weights(weights, version)
    received = pair[1].receive_bits().wait()
    return sending.wait()[0], received


def all_kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42])
    big = torch.randn(70, 41, generator=generator)
    return {
        "matrix": big,
        "transposed": torch.randn(13, 5, generator=generator).T,
        "half": torch.randn(33, generator=generator).half(),
        "brain": torch.cat([special, torch.randn(500, generator=generator)]).bfloat16(),
        "special": special,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "empty_too": torch.zeros(0, 3),
        "counter": torch.tensor(7),
        "integers": torch.arange(300, dtype=torch.int32),
        "mask": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64, generator=generator),
        "tied": big,
        "large": torch.randn(40_000, generator=generator),
    }


def changed(weights: dict[str, torch.Tensor], fraction: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    found = {}
    for name, tensor in weights.items():
        mask = torch.rand(tensor.shape, generator=generator) < fraction
        found[name] = torch.where(mask, (tensor == 0).to(tensor.dtype), tensor)
    found["tied"] = found["matrix"]
    found["special"] = torch.tensor([-0.0, 0.0, math.nan, math.inf, 1.0, 1e-42])
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_tensor_arrives_bit_by_bit(pair, name):
    connect(pair, CONFIGS[name])
    for version, weights in enumerate(
        [all_kinds(), changed(all_kinds(), 0.02), changed(all_kinds(), 0.9), all_kinds()]
    ):
        _, received = sync(pair, weights, version)
        for found, given, own in received:
            assert found == bits(weights)
            assert given == own == version
    pair[0].close_syncer().wait()


@pytest.mark.parametrize("name", ["auto", "shared_copy", "bucket", "patch"])
def test_a_policy_is_loaded_as_the_trainer_has_it(pair, name):
    parties = Parties(sender="trainer", receiver="generator", receivers=2)
    opened = [
        group.open_policy(CONFIGS[name], parties, sends=sends)
        for group, sends in zip(pair, (True, False), strict=True)
    ]
    for handle in opened:
        handle.wait()
    for version in range(3):
        sending = pair[0].train_and_send(version)
        loaded = pair[1].load_policy().wait()
        assert loaded == [(version, sending.wait()[0])] * 2


@pytest.mark.parametrize("name", ["auto", "shared_copy", "shared_view", "bucket", "patch"])
def test_weights_arrive_in_the_types_of_the_receiver(pair, name):
    targets = {"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(2)}
    connect(pair, CONFIGS[name], targets=targets)
    for version in range(3):
        weights = {"a": torch.randn(3, 4), "b": torch.randn(2).double(), "more": torch.ones(1)}
        _, received = sync(pair, weights, version)
        expected = {**weights, "a": weights["a"].bfloat16(), "b": weights["b"].float()}
        assert [found for found, _, _ in received] == [bits(expected)] * 2


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_in_place_after_a_send_are_not_seen(pair, name):
    connect(pair, CONFIGS[name])
    weights = {"a": torch.zeros(20_000), "b": torch.zeros(3, 3)}
    sending = pair[0].execute_on(0).send_changing(weights, 4)
    seen = pair[1].receive_several(4).wait()
    sending.wait()
    for updates in seen:
        for values, version in updates:
            assert values == {float(version)}
        if not name.startswith(("shared", "auto")):  # those read the newest
            assert [version for _, version in updates] == [0, 1, 2, 3]
        assert updates[-1][1] == 3


@pytest.mark.parametrize("name", CONFIGS)
def test_tied_weights_travel_once(pair, name, runtime):
    connect(pair, CONFIGS[name])
    table = torch.randn(1000, 10)
    sending = pair[0].send_weights({"a": table, "b": table}, 0)
    assert pair[1].tied().wait() == [True, True]
    sent = sending.wait()[0]
    assert sent.nbytes < 1.1 * table.nbytes


def test_two_senders_serve_one_receiver_each(pair, runtime):
    if runtime == "ray":
        pytest.skip("one sender is enough processes")
    connect(pair, BucketConfig(), senders=2)
    weights = {"a": torch.arange(5.0)}
    sending = pair[0].send_weights(weights, 4)
    assert [found for found, _, _ in pair[1].receive_bits().wait()] == [bits(weights)] * 2
    assert [sent.kind for sent in sending.wait()] == ["bucket", "bucket"]


def test_auto_takes_what_reaches_all_receivers(pair, runtime):
    connect(pair, AutoConfig())
    sent, _ = sync(pair, {"a": torch.ones(3)}, 0)
    assert sent.kind == {"local": "reference", "ray": "shared_memory"}[runtime]


def test_auto_does_without_shared_memory_that_is_full(pair, runtime):
    connect(pair, AutoConfig())
    weights, kinds = {"a": torch.ones(3_000_000)}, []
    for version in range(2):
        sending = pair[0].send_without_memory(weights, version)
        received = pair[1].receive_bits().wait()
        assert received == [(bits(weights), version, version)] * 2
        kinds.append(sending.wait()[0].kind)
        weights["a"][0] += 1
    assert kinds == {"local": ["reference"] * 2, "ray": ["bucket", "patch"]}[runtime]


def test_a_patch_falls_back_to_buckets_by_density(pair):
    connect(pair, PatchConfig(retry_after=1))
    weights = torch.zeros(10_000)
    kinds = []
    for version, entries in enumerate([0, 100, 10_000, 1, 1, 0]):
        weights = weights.clone()
        weights[:entries] += 1
        sent, received = sync(pair, {"a": weights}, version)
        assert received[0][0] == bits({"a": weights})
        kinds.append((sent.kind, sent.density))
    assert kinds == [
        ("bucket", None),  # the first
        ("patch", 0.01),
        ("bucket", 1.0),  # too dense
        ("bucket", None),  # not looked at
        ("patch", 1e-4),
        ("patch", 0.0),
    ]
    assert sent.nbytes == 0


def test_patches_are_written_into_the_receivers_own_tensors(pair):
    targets = {"a": torch.zeros(50, dtype=torch.bfloat16), "b": torch.zeros(2, 2)}
    connect(pair, PatchConfig(in_place=True), targets=targets)
    weights = {"a": torch.randn(50), "b": torch.randn(2, 2)}
    for version in range(3):
        weights = {**weights, "a": weights["a"].clone()}
        weights["a"][version] += 1
        sent, _ = sync(pair, weights, version)
        expected = bits({"a": weights["a"].bfloat16(), "b": weights["b"]})
        assert pair[1].target_bits().wait() == [expected] * 2
    assert sent.kind == "patch"


def test_a_patch_of_tied_weights_is_written_into_both_tensors_of_a_receiver(pair):
    connect(pair, PatchConfig(in_place=True), targets={"a": torch.zeros(50), "b": torch.zeros(50)})
    for version in range(2):
        tied = torch.zeros(50)
        tied[version] = 1
        sent, _ = sync(pair, {"a": tied, "b": tied}, version)
        assert pair[1].target_bits().wait() == [bits({"a": tied, "b": tied})] * 2
    assert sent.kind == "patch"


def test_tensors_that_a_patch_cannot_be_written_into_are_named(pair, runtime):
    if runtime == "ray":
        pytest.skip("arguments arrive contiguous")
    connect(pair, PatchConfig(in_place=True), targets={"a": torch.zeros(2, 3).T})
    receiving = pair[1].fail_to_receive()
    pair[0].execute_on(0).send_weights({"a": torch.ones(3, 2)}, 0)
    for _, text, version in receiving.wait():
        assert "a is no contiguous CPU tensor of the receiver; set in_place to false" in text
        assert version is None


def test_a_receiver_with_another_base_gets_all_weights(pair):
    connect(pair, PatchConfig())
    weights = {"a": torch.randn(1000)}
    sync(pair, weights, 0)
    pair[1].execute_on(1).forget_base(77).wait()
    sent, received = sync(pair, weights, 1)
    assert sent.kind == "bucket"
    assert [found for found, _, _ in received] == [bits(weights)] * 2
    sent, received = sync(pair, {"a": weights["a"] + torch.eye(1, 1000)[0]}, 2)
    assert sent.kind == "patch"


def test_a_patch_for_other_weights_is_refused(pair):
    connect(pair, PatchConfig())
    sync(pair, {"a": torch.zeros(1000)}, 5)
    sync(pair, {"a": torch.zeros(1000)}, 6)
    pair[1].execute_on(1).claim_base().wait()
    sending = pair[0].send_weights({"a": torch.ones(1000) * (torch.arange(1000) < 9)}, 7)
    fine = pair[1].execute_on(0).receive_bits()
    with pytest.raises(
        WorkerCallError, match=r"from version 6 to 7 came.* version 5 .*stays at version 6"
    ):
        pair[1].execute_on(1).receive_bits().wait()
    fine.wait()
    sending.wait()
    pair[1].execute_on(1).honest().wait()
    sent, received = sync(pair, {"a": torch.full((1000,), 2.0)}, 8)
    assert sent.kind == "bucket"
    assert received[1][1:] == (8, 8)


def test_changes_that_were_found_and_not_sent_are_sent_with_the_next(pair):
    connect(pair, PatchConfig())
    weights = {"a": torch.zeros(1000)}
    sync(pair, weights, 0)
    weights = {"a": (torch.arange(1000) < 9).float()}
    receiving = pair[1].fail_to_receive()
    assert pair[0].execute_on(0).fail_to_send(weights, 1).wait() == ["no room"]
    assert [version for _, _, version in receiving.wait()] == [0, 0]
    sent, received = sync(pair, weights, 2)
    assert sent.kind == "bucket"
    assert received[0] == (bits(weights), 2, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_send_that_fails_is_told_to_the_receivers(pair, name):
    connect(pair, CONFIGS[name])
    good = {"a": torch.arange(20_000.0)}
    first = pair[0].send_weights(good, 2)
    receiving = pair[1].receive_failing()
    first.wait()
    broken = {"a": torch.ones(3), "b": "no tensor"}
    with pytest.raises(WorkerCallError):
        pair[0].execute_on(0).send_weights(broken, 3).wait()
    for kind, text, version, before in receiving.wait():
        assert kind == "WeightSyncError"
        assert "trainer:0" in text
        assert "gave up version 3" in text
        assert "stays at version 2" in text
        assert version == 2
        assert before == bits(good)
    _, received = sync(pair, {"a": torch.ones(3)}, 4)
    assert received[0] == (bits({"a": torch.ones(3)}), 4, 4)


@pytest.mark.parametrize("name", [*CONFIGS, "reference"])
def test_after_a_wait_that_ran_out_the_next_update_works(pair, name, runtime):
    if name == "reference" and runtime == "ray":
        pytest.skip("there are no references between processes")
    connect(pair, CONFIGS.get(name, ReferenceConfig()))
    for kind, text, version in pair[1].receive_in_vain().wait():
        assert (kind, version) == ("WeightSyncError", None)
        assert "waited longer" in text
    time.sleep(1.0 if runtime == "ray" else 0.0)  # for the withdrawals to arrive
    for version in (4, 5):
        weights = {"a": torch.full((3,), float(version))}
        assert sync(pair, weights, version)[1] == [(bits(weights), version, version)] * 2


@pytest.mark.parametrize("name", ["auto", "bucket", "patch", "reference"])
def test_one_receiver_may_ask_anew_while_another_is_waited_for(pair, name, runtime):
    if name == "reference" and runtime == "ray":
        pytest.skip("there are no references between processes")
    connect(pair, CONFIGS.get(name, ReferenceConfig()))
    weights = {"a": torch.arange(3.0)}
    sending = pair[0].send_weights(weights, 7)
    pair[1].execute_on(0).ask_in_vain().wait()
    time.sleep(1.0 if runtime == "ray" else 0.0)
    received = [pair[1].execute_on(rank).receive_bits() for rank in range(2)]
    assert [each.wait()[0] for each in received] == [(bits(weights), 7, 7)] * 2
    sending.wait()
    assert sync(pair, weights, 8)[1] == [(bits(weights), 8, 8)] * 2


@pytest.mark.parametrize("name", ["bucket", pytest.param("patch", marks=pytest.mark.slow)])
def test_a_sender_that_dies_in_an_update_leaves_the_old_version(pair, launch, runtime, name):
    config = CONFIGS[name].model_copy(update={"bucket_size": 100_000})
    group = launch(1, f"mortal_{name}")
    parties = Parties(sender=f"mortal_{name}", receiver="generator", receivers=2)
    group.open_sender(config, parties).wait()
    pair[1].open_receiver(config, parties).wait()
    good = {"a": torch.randn(90_000)}
    receiving = pair[1].receive_failing()
    group.send_weights(good, 0).wait()
    group.die_at_part(2).wait()
    with pytest.raises((WorkerDiedError, WorkerCallError)):
        group.send_weights({"a": torch.randn(90_000), "b": torch.ones(50_000)}, 1).wait()
    for kind, text, version, before in receiving.wait():
        assert kind == "WeightSyncError"
        assert ("died" if runtime == "ray" else "a device failed") in text
        assert "stays at version 0" in text
        assert (version, before) == (0, bits(good))


@pytest.mark.slow
def test_shared_memory_survives_its_writer(pair, launch, runtime):
    if runtime == "local":
        pytest.skip("workers of the local runtime are no processes")
    group = launch(1, "mortal_shared")
    parties = Parties(sender="mortal_shared", receiver="generator", receivers=2)
    group.open_sender(SharedMemoryConfig(), parties).wait()
    pair[1].open_receiver(SharedMemoryConfig(), parties).wait()
    received = pair[1].receive_bits()
    group.send_weights({"a": torch.ones(5)}, 0).wait()
    received.wait()  # a block that nobody has opened goes with its writer
    receiving = pair[1].fail_to_receive()
    group.close_syncer().wait()
    (pid,) = group.process_id().wait()
    os.kill(pid, signal.SIGKILL)
    for kind, text, version in receiving.wait():
        assert kind == "WeightSyncError"
        assert "died" in text
        assert version == 0
    assert pair[1].latest().wait() == [None, None]


def test_a_receiver_may_look_for_a_newer_version(pair):
    connect(pair, SharedMemoryConfig())
    sync(pair, {"a": torch.zeros(4)}, 0)
    assert pair[1].latest().wait() == [None, None]
    pair[0].send_weights({"a": torch.ones(4)}, 1).wait()  # nobody receives it
    assert pair[1].latest().wait() == [(1, bits({"a": torch.ones(4)}))] * 2
    assert pair[1].latest().wait() == [None, None]
    assert [version for _, version, _ in pair[1].receive_bits().wait()] == [1, 1]


def test_a_reference_needs_one_process(pair, runtime):
    connect(pair, ReferenceConfig())
    weights = {"a": torch.zeros(4)}
    sending = pair[0].send_weights(weights, 0)
    receiving = pair[1].receive_bits()
    if runtime == "local":
        assert sending.wait()[0].kind == "reference"
        assert receiving.wait()[0] == (bits(weights), 0, 0)
    else:
        with pytest.raises(WeightSyncError, match="shared_memory"):
            sending.wait()
        with pytest.raises(WeightSyncError, match="gave up version 0"):
            receiving.wait()


def test_a_change_of_a_reference_in_use_is_seen(pair, runtime):
    if runtime == "ray":
        pytest.skip("there are no references between processes")
    connect(pair, ReferenceConfig())
    sending = pair[0].send_weights({"a": torch.zeros(4)}, 0)
    other = pair[1].execute_on(1).receive_bits()
    (found,) = pair[1].execute_on(0).change_while_held().wait()
    assert found.startswith("TornReadError: 1 weights of version 0 were changed in place")
    with contextlib.suppress(TornReadError):  # it may still have held the same tensors
        other.wait()
    sending.wait()


def test_a_wrong_shape_is_named(pair):
    connect(pair, BucketConfig(), targets={"a": torch.zeros(3)})
    sending = pair[0].send_weights({"a": torch.zeros(4)}, 0)
    with pytest.raises(WeightSyncError, match=r"a has shape \[4\] at the sender and \[3\]"):
        pair[1].receive_bits().wait()
    with pytest.raises(WeightSyncError, match=r"a has shape \[4\]"):
        sending.wait()


def test_gloo_broadcasts_buckets(pair, runtime):
    config = BucketConfig(transport="gloo", bucket_size=5000)
    connect(pair, config)
    for version in range(2):
        weights = all_kinds()
        sending = pair[0].send_weights(weights, version)
        receiving = pair[1].receive_bits()
        if runtime == "local":
            with pytest.raises(WeightSyncError, match="transport scheduler"):
                sending.wait()
            with pytest.raises(WeightSyncError, match="gave up"):
                receiving.wait()
        else:
            assert receiving.wait()[1] == (bits(weights), version, version)
            sending.wait()


def test_a_library_that_is_not_of_the_devices_is_refused():
    with pytest.raises(WeightSyncError, match=r"nccl needs devices .* on cpu; use transport sch"):
        Collective(Meeting(place="", backend="nccl", seconds=1.0), 0, 2)


@pytest.mark.gpu
def test_nccl_broadcasts_buckets(launch, runtime):
    if runtime == "local" or torch.cuda.device_count() < 2:
        pytest.skip("needs two processes with a device each")
    groups = launch(1, "nccl_trainer"), launch(1, "nccl_generator")
    parties = Parties(sender="nccl_trainer", receiver="nccl_generator", receivers=1)
    groups[0].open_sender(BucketConfig(transport="nccl"), parties).wait()
    groups[1].open_receiver(BucketConfig(transport="nccl"), parties).wait()
    weights = all_kinds()
    sending = groups[0].send_weights(weights, 0)
    assert groups[1].receive_bits().wait() == [(bits(weights), 0, 0)]
    sending.wait()
