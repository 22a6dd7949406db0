"""Batches that are cut and merged between groups of different sizes."""

import pytest
import torch

from rlinf.scheduler import Channel, NodePlacementStrategy
from tests.scheduler.workers import Router


@pytest.fixture(scope="package")
def groups(cluster):
    launched = [
        Router.create_group().launch(cluster, NodePlacementStrategy([0] * count), name)
        for name, count in (("senders", 2), ("receivers", 4))
    ]
    yield launched
    for group in launched:
        group._close()


DATA = {"x": torch.arange(12.0), "y": torch.arange(24).reshape(12, 2)}


@pytest.mark.parametrize("direct", [False, True])
def test_every_receiver_gets_its_slice(groups, direct):
    senders, receivers = groups
    channel = Channel.create(f"routed-{direct}")
    options = {"tag": "obs", "batch_size": 12, "enable_p2p": direct}
    sending = senders.send_batch(DATA, "receivers", channel, **options)
    received = receivers.receive_batch("senders", channel, **options).wait()
    sending.wait()
    for rank, batch in enumerate(received):
        assert torch.equal(batch["x"], DATA["x"][3 * rank : 3 * rank + 3])
        assert torch.equal(batch["y"], DATA["y"][3 * rank : 3 * rank + 3])
    channel.close()


def test_batch_size_is_inferred(groups):
    senders, receivers = groups
    channel = Channel.create("inferred")
    senders.send_batch(DATA, "receivers", channel).wait()
    received = receivers.receive_batch("senders", channel, batch_size=12).wait()
    assert torch.equal(torch.cat([batch["x"] for batch in received]), DATA["x"])
    channel.close()


def test_indivisible_batch(groups):
    senders, _ = groups
    channel = Channel.create("indivisible")
    with pytest.raises(AssertionError, match="divisible"):
        senders.send_batch(DATA, "receivers", channel, batch_size=13).wait()
    channel.close()


def test_unknown_group(groups):
    senders, _ = groups
    with pytest.raises(ValueError, match="'nobody' is not registered"):
        senders.send_batch(DATA, "nobody", None).wait()


def test_decoupled_shards_return_to_who_sent_them(groups):
    servers, clients = groups
    channel = Channel.create("decoupled")
    serving = servers.serve("receivers", channel, 8)
    answers = clients.ask("senders", channel, 8).wait()
    assert serving.wait() == [2, 2]
    for rank, answer in enumerate(answers):
        assert torch.equal(answer["a"], 10 * torch.arange(8.0).chunk(4)[rank])
    channel.close()
