"""An imagined network between workers: what is booked, what waits, and what stays as it is."""

import json
import logging
import textwrap

import numpy as np
import pytest
import torch

from rlinf.errors import UserError
from rlinf.scheduler.cluster_sections import NetEmulationConfig
from rlinf.scheduler.services import network
from rlinf.scheduler.services.network import NetworkService, wire_bytes
from rlinf.scheduler.transport.endpoint import Endpoint
from tests.warm import Warm

MEGABYTE = 1_000_000


@pytest.fixture
def book(monkeypatch):
    """A network at a time that stands still, unless a test moves it."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(network.time, "monotonic", lambda: Clock.now)

    def open_book(pairs, bandwidths=(), **options) -> NetworkService:
        keys = ("src", "dst", "delay_ms")
        config = NetEmulationConfig(
            enabled=True,
            crossdc_pairs=[dict(zip(keys, pair, strict=True)) for pair in pairs],
            bandwidth_groups=[
                {"members": members, "bandwidth_mbps": mbps} for members, mbps in bandwidths
            ],
            **options,
        )
        return NetworkService(Endpoint(), config.slow_links())

    open_book.clock = Clock
    return open_book


def test_a_delay_holds_in_both_directions_and_for_no_other_link(book):
    links = book([("env:0-1", "actor:0", 100)])
    assert links.book("env:1", ["actor:0"], MEGABYTE) == pytest.approx(0.1)
    assert links.book("actor:0", ["env:0"], MEGABYTE) == pytest.approx(0.1)
    assert links.book("env:2", ["actor:0"], MEGABYTE) == 0.0
    assert not links.is_slow("env:0", ["env:1"])


def test_the_other_direction_is_its_own_where_it_is_given_or_not_mirrored(book):
    both = book([("env:0", "actor:0", 100), ("actor:0", "env:0", 30)])
    assert both.book("env:0", ["actor:0"], 1) == pytest.approx(0.1)
    assert both.book("actor:0", ["env:0"], 1) == pytest.approx(0.03)
    one = book([("env:0", "actor:0", 100)], symmetric=False)
    assert one.is_slow("env:0", ["actor:0"])
    assert not one.is_slow("actor:0", ["env:0"])


def test_names_with_group_and_children_of_a_worker_are_the_worker(book):
    links = book([("Env:0", "ActorGroup:0", 100)])
    assert links.is_slow("EnvGroup:0", ["Actor:0"])
    assert links.is_slow("Env:0:3", ["Actor:0"])


def test_messages_of_one_link_follow_each_other(book):
    # 8 megabits per second are one megabyte per second.
    links = book([("env:0", "actor:0", 100)], [("env:0", 8), ("actor:0", 8)])
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(1.1)
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(2.1)
    book.clock.now += 1.5
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(1.6)
    book.clock.now += 60
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(1.1)


def test_two_senders_share_the_receiving_end(book):
    links = book([("env:0-1", "actor:0", 100)], [("actor:0", 8)])
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(1.1)
    assert links.book("env:1", ["actor:0"], MEGABYTE) == pytest.approx(2.1)
    # What goes back is another direction.
    assert links.book("actor:0", ["env:0"], MEGABYTE) == pytest.approx(1.1)


def test_the_slower_end_decides(book):
    links = book([("env:0", "actor:0", 100)], [("env:0", 80), ("actor:0", 8)])
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(1.1)
    # The sender has been free for long, the receiver takes in the first one still.
    assert links.book("env:0", ["actor:0"], MEGABYTE) == pytest.approx(2.1)


def test_a_broadcast_leaves_once_and_reaches_a_group_once(book):
    links = book([("actor:0", "env:0-2", 100)], [("actor:0", 8), ("env:0-1", 8)])
    receivers = ["env:0", "env:1", "env:2", "rollout:0"]
    assert links.book("actor:0", receivers, MEGABYTE) == pytest.approx(1.1)
    uneven = book([("actor:0", "env:0", 50), ("actor:0", "env:1", 200)])
    assert uneven.book("actor:0", ["env:0", "env:1"], 0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("delay", "mean", "least"),
    [
        ({"uniform": [100, 200]}, 0.15, 0.1),
        ({"exponential": 100}, 0.1, 0.0),
        ({"gaussian": [100, 10]}, 0.1, 0.05),
    ],
)
def test_delays_are_drawn_for_each_message(book, delay, mean, least):
    links = book([("env:0", "actor:0", delay)])
    drawn = []
    for _ in range(4000):
        drawn.append(links.book("env:0", ["actor:0"], 1))
        book.clock.now += 10
    assert np.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert min(drawn) >= least
    assert np.std(drawn) > 0.005


def test_a_message_does_not_overtake_the_one_before_it(book):
    links = book([("env:0", "actor:0", {"uniform": [0, 200]})])
    arrivals = [links.book("env:0", ["actor:0"], 1) for _ in range(50)]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] < arrivals[-1]


def test_groups_that_nobody_heard_of_are_named(book, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rlinf"), "propagate", True)
    links = book([("env:0", "actr:0", 100)])
    links.is_slow("env:0", ["actor:0"])
    links.close()
    assert "names actr, but no such worker" in caplog.text


def test_sizes_are_those_of_tensors_and_of_the_pickle_of_the_rest():
    tensor = torch.zeros(256)
    assert 1024 + 256 <= wire_bytes(tensor) < 1024 + 256 + 100
    nested = {"a": tensor, "b": [tensor, np.zeros(256, dtype=np.float32)]}
    assert 3 * (1024 + 256) < wire_bytes(nested) < 3 * (1024 + 256) + 200
    assert 10_000 <= wire_bytes("x" * 10_000) < 10_100
    assert wire_bytes([tensor, lambda: None]) >= 1024


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "names no link in crossdc_pairs"),
        ({"crossdc_pairs": [{"src": [], "dst": "a:0", "delay_ms": 1}]}, r"'src' names no worker"),
        (
            {"crossdc_pairs": [{"src": "a", "dst": "a:0", "delay_ms": 1}]},
            r"no group:ranks, got 'a'",
        ),
        ({"crossdc_pairs": [{"src": "a:x", "dst": "a:0", "delay_ms": 1}]}, "Invalid rank format"),
        ({"crossdc_pairs": [{"src": "a:0", "dst": "b:0", "delay_ms": -1}]}, "delay_ms"),
        (
            {
                "crossdc_pairs": [
                    {"src": "a:0-1", "dst": "b:0", "delay_ms": 1},
                    {"src": "a:1", "dst": "b:0", "delay_ms": 2},
                ]
            },
            "from a:1 to b:0 two delays",
        ),
        (
            {"crossdc_pairs": [{"src": "a:0", "dst": "b:0", "delay_ms": {}}]},
            r"is \{uniform: \[least, most\]\}, .* one of them",
        ),
        (
            {"crossdc_pairs": [{"src": "a:0", "dst": "b:0", "delay_ms": {"uniform": [3, 2]}}]},
            r"\[3, 2\] ends before it begins; nearest: \[2, 3\]",
        ),
        (
            {
                "crossdc_pairs": [{"src": "a:0", "dst": "b:0", "delay_ms": 1}],
                "bandwidth_groups": [
                    {"members": "a:0-1", "bandwidth_mbps": 1},
                    {"members": ["aGroup:1"], "bandwidth_mbps": 1},
                ],
            },
            "has a:1 in two groups",
        ),
    ],
)
def test_a_network_that_cannot_be_is_refused(section, message):
    from rlinf.scheduler import ClusterConfig

    section = {"enabled": True, **section}
    with pytest.raises(UserError, match=message):
        ClusterConfig.from_dict_cfg(
            {"num_nodes": 1, "component_placement": {}, "net_emulation": section}
        )


PROGRAM = """
    import json, sys, time
    from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Distant

    links = [{"src": "near:0", "dst": ["far:0", "queue:0"], "delay_ms": 200}]
    config = {
        "runtime": sys.argv[1],
        "net_emulation": {"enabled": True, "crossdc_pairs": links},
    }
    cluster = Cluster(cluster_cfg=config)
    near, far = (
        Distant.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name)
        for name in ("near", "far")
    )
    queue, own = Channel.create("queue"), Channel.create("own", host="far:0")
    seconds = {}
    for way in ("send", "send_large", "tensor", "broadcast", "queue", "own"):
        for rank in (0, 1):
            channel = {"queue": queue, "own": own}.get(way)
            taking = far.execute_on(rank).take(way, rank, channel)
            (sent,) = near.execute_on(rank).give(way, rank, channel).wait()
            (got,) = taking.wait()
            assert got["values"] == [0, 1, 2], (way, got)
            seconds[f"{way} {rank}"] = got["at"] - sent["began"]
            seconds[f"{way} {rank} sender"] = sent["ended"] - sent["began"]
    print(json.dumps(seconds))
    cluster.shutdown()
"""


# On Ray it is the same book that the senders ask; a cluster of its own takes long to begin.
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_what_workers_send_arrives_late_and_in_order(runtime):
    if runtime == "ray":
        pytest.importorskip("ray")
    program = Warm(["-c", textwrap.dedent(PROGRAM), runtime])
    assert program.wait(120) == 0, program.communicate()[1].decode()[-3000:]
    seconds = json.loads(program.communicate()[0].splitlines()[-1])
    for way in ("send", "send_large", "tensor", "broadcast", "queue", "own"):
        assert seconds[f"{way} 0"] >= 0.2, (way, seconds)
    # Each of three plain sends comes back when its message has arrived, as a broadcast does.
    for way in ("send", "tensor", "broadcast"):
        assert seconds[f"{way} 0 sender"] >= 0.6, (way, seconds)
