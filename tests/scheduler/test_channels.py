"""Channels, from the driver and from workers."""

import asyncio
import pickle
import time
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch

from rlinf.errors import UserError
from rlinf.flow.stream import NextItem
from rlinf.scheduler import Channel
from rlinf.scheduler.errors import SchedulerError, SchedulerUsageError, WithdrawnError
from rlinf.scheduler.process import require_process
from rlinf.scheduler.services.channels import ChannelService, Ticket, _Getter
from rlinf.scheduler.transport.blocks import HEADER_BYTES
from rlinf.scheduler.transport.cluster_files import shared_memory_directory
from rlinf.scheduler.transport.endpoint import Endpoint
from rlinf.scheduler.transport.payload import Payload
from tests.scheduler.workers import Concurrent, Queuer


@pytest.fixture
def channel(cluster, request):
    made = []

    def create(**options):
        made.append(Channel.create(f"{request.node.name}-{len(made)}", **options))
        return made[-1]

    yield create
    for each in made:
        each.close()


def test_first_in_first_out_per_key(channel):
    queue = channel()
    for index in range(4):
        queue.put(index, key=("k", index % 2))
    assert [queue.get(("k", 1)), queue.get(("k", 0)), queue.get(("k", 1))] == [1, 0, 3]
    assert queue.qsize(("k", 0)) == 1


@pytest.mark.parametrize("queue", [None, 3])
def test_a_reader_looks_ahead(channel, queue):
    sent = channel()
    following = NextItem(sent, queue)
    assert following.take_all() == []
    where = {} if queue is None else {"key": queue}
    for item in ("first", "second"):
        sent.post(item, **where)
    assert following.arrived(30.0)
    assert following.take() == "first"
    assert following.take() == "second"


def test_a_channel_of_this_process_gives_what_it_has_at_once(channel):
    queue = channel()
    assert queue.is_here()
    for item in range(3):
        queue.post(item)
    asked = [queue.get(async_op=True) for _ in range(4)]
    assert [each.done() for each in asked] == [True, True, True, False]
    queue.post(3)
    assert [each.wait() for each in asked] == [0, 1, 2, 3]


def test_unknown_key(channel):
    queue = channel(maxsize=1)
    assert (queue.qsize("none"), queue.empty("none"), queue.full("none")) == (0, True, False)


def test_sizes_count_per_key(channel):
    queue = channel(maxsize=2)
    queue.put(1)
    assert (queue.qsize(), queue.full(), queue.empty()) == (1, False, False)
    queue.put(2)
    assert (queue.full(), queue.full("other"), queue.qsize("other")) == (True, False, 0)


def test_text_shows_items_and_leaves_them(channel):
    queue = channel()
    queue.put("x")
    assert str(queue) == "[WeightedItem(weight=0, item='x')]"
    assert queue.get() == "x"


def test_peeking_keeps_large_items(channel):
    queue = channel()
    queue.put(torch.ones(50_000))
    str(queue)
    str(queue)
    assert queue.get().sum() == 50_000


def test_nowait_on_the_driver(channel):
    queue = channel(maxsize=1)
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()
    queue.put_nowait("a")
    with pytest.raises(asyncio.QueueFull):
        queue.put_nowait("b")
    assert queue.get_nowait() == "a"


def test_nowait_in_a_worker(channel, shared):
    group, queue = shared(Queuer), channel(maxsize=1)
    with pytest.raises(asyncio.QueueEmpty):
        group.execute_on(0).nowait(queue, "get").wait()
    group.execute_on(0).nowait(queue, "put").wait()
    with pytest.raises(asyncio.QueueFull):
        group.execute_on(0).nowait(queue, "put").wait()
    assert group.execute_on(0).nowait(queue, "get").wait() == [1]


def test_async_put_on_a_full_channel(channel):
    queue = channel(maxsize=1)
    queue.put(1)
    work = queue.put(2, async_op=True)
    assert not work.done()
    assert queue.get() == 1
    work.wait()
    assert queue.get() == 2


def test_put_blocks_while_full(channel, shared):
    group, queue = shared(Queuer), channel(maxsize=2)
    putting = group.execute_on(0).put(queue, list(range(20)))
    assert group.execute_on(1).get(queue, 20).wait() == [list(range(20))]
    putting.wait()


def test_a_thousand_async_puts_keep_order(channel, shared):
    group, queue = shared(Queuer), channel()
    putting = group.execute_on(0).put_async(queue, 1000)
    assert group.execute_on(1).get(queue, 1000).wait() == [list(range(1000))]
    putting.wait()


def test_async_gets_on_different_keys(channel, shared):
    group, queue = shared(Queuer), channel()
    assert group.execute_on(0).keys_out_of_order(queue).wait() == [["item b", "item c", "item a"]]


def test_waiting_on_the_event_loop(channel, shared):
    group, queue = shared(Concurrent), channel()
    calls = [group.execute_on(0).get(queue) for _ in range(2)]
    queue.put("first")
    queue.put("second")
    assert sorted(call.wait()[0] for call in calls) == ["first", "second"]


def fill(queue, *weights):
    for weight in weights:
        queue.put(f"w{weight}", weight)


def test_batches(channel):
    queue = channel()
    fill(queue, 1, 2, 3)
    assert queue.get_batch(3) == ["w1", "w2"]
    assert queue.get_batch(2) == []
    assert queue.qsize() == 1
    assert queue.get_batch(3) == ["w3"]


def test_a_batch_stops_before_what_would_exceed(channel):
    queue = channel()
    fill(queue, 2, 3)
    assert queue.get_batch(4) == ["w2"]
    assert queue.get_batch(4, async_op=True).done() is False


def test_a_batch_waits_for_its_weight(channel):
    queue = channel(maxsize=1)
    work = queue.get_batch(3, async_op=True)
    fill(queue, 1, 1)
    assert not work.done()
    fill(queue, 1)
    assert work.wait() == ["w1", "w1", "w1"]


def test_a_batch_that_waits_weighs_each_item_as_it_comes():
    """Not all that it has taken, for each that comes."""
    read = []

    class Item:
        @property
        def weight(self):
            read.append(1)
            return 1

    getter, items = _Getter(Ticket("worker", 0, 0), target=200), deque()
    for number in range(200):
        items.append(Item())
        assert getter.fill(items) is (number == 199)
    assert len(getter.taken) == 200
    assert len(read) <= 400


def test_weightless_batches_end(channel):
    queue = channel()
    fill(queue, 0, 0)
    assert queue.get_batch(5) == ["w0", "w0"]
    fill(queue, 0, 0, 2)
    assert queue.get_batch(0) == ["w0", "w0"]
    assert queue.get_batch(0) == []
    assert queue.get_batch(2) == ["w2"]
    waiting = queue.get_batch(1, async_op=True)
    assert not waiting.done()
    fill(queue, 0)
    assert waiting.wait() == ["w0"]


def test_batch_in_a_worker(channel, shared):
    group, queue = shared(Queuer), channel()
    fill(queue, 1, 1)
    assert group.execute_on(0).batch(queue, 2).wait() == [["w1", "w1"]]


def test_an_existing_name_connects_with_a_warning(channel, cluster):
    queue = channel(maxsize=3)
    queue.put("kept")
    with pytest.warns(UserWarning, match="exists"):
        again = Channel.create(queue.name, maxsize=9)
    assert again.maxsize == 3
    assert again.get() == "kept"


def test_connect(channel, shared):
    queue = channel()
    queue.put(1)
    assert Channel.connect(queue.name).get() == 1
    with pytest.raises(ValueError, match="there is no channel 'unknown'"):
        Channel.connect("unknown")


def test_channels_made_in_a_worker(shared):
    group = shared(Queuer)
    (queue,) = group.execute_on(0).made_here("worker-made").wait()
    assert queue.maxsize == 3
    assert queue.get() == "from the worker"
    queue.put("to the worker")
    assert group.execute_on(0).join("worker-made").wait() == ["to the worker"]
    queue.close()


@pytest.mark.parametrize("weight", [None, "1", -1, float("nan")])
def test_what_is_no_weight_leaves_the_channel_whole(channel, weight):
    queue = channel()
    for use in (queue.put, queue.put_nowait, queue.post):
        with pytest.raises(UserError, match="weight of an item or a batch is a number"):
            use("item", weight)
    with pytest.raises(UserError, match="weight of an item or a batch is a number"):
        queue.get_batch(weight)
    queue.put("item", torch.tensor(2).numpy())
    assert queue.get_batch(2) == ["item"]


def test_what_is_no_key_or_size_is_named(channel, shared):
    queue = channel()
    with pytest.raises(TypeError, match=r"hashable.*got \[1\]") as caught:
        queue.put(1, key=[1])
    assert isinstance(caught.value, UserError)
    with pytest.raises(UserError, match=r"hashable.*got \[1\]"):
        shared(Queuer).execute_on(0).put(queue, [1], key=[1]).wait()
    with pytest.raises(UserError, match="maxsize of channel"):
        channel(maxsize="2")


def test_channel_hosted_at_a_worker(cluster, shared):
    group = shared(Queuer)
    queue = Channel.create("hosted", maxsize=4, host="sharedQueuer:1")
    reading = group.execute_on(1).own_channel("hosted", 10)
    group.execute_on(0).put(queue, list(range(10))).wait()
    assert reading.wait() == [list(range(10))]
    group.execute_on(1).put(queue, [torch.ones(3)]).wait()
    assert torch.equal(queue.get(), torch.ones(3))
    queue.close()


def test_large_items_stream(channel, shared):
    group, queue = shared(Queuer), channel(maxsize=2)
    putting = group.execute_on(0).stream(queue, 8, 1 << 18)
    assert group.execute_on(1).drain(queue, 8).wait() == [[float(i) for i in range(8)]]
    putting.wait()


def test_distributed_channel_on_one_node(channel):
    queue = channel(distributed=True)
    queue.put("x", key=7)
    assert queue.get(7) == "x"


def test_local_channel(shared):
    group = shared(Queuer)
    assert group.execute_on(0).local_channel().wait() == [[True, True, [1, 2], True]]


def test_local_channel_stays_in_its_process(cluster):
    queue = Channel.create("stays", local=True)
    with pytest.raises(RuntimeError, match="local=True"):
        pickle.dumps(queue)


def test_a_local_channel_has_no_handles(cluster):
    queue = Channel.create("at once", local=True)
    for call in (partial(queue.put, 1), queue.get, queue.get_batch):
        with pytest.raises(AssertionError, match="leave it out") as raised:
            call(async_op=True)
        assert isinstance(raised.value, UserError)
    assert queue.empty()


def test_without_a_cluster_no_channel_is_created(monkeypatch):
    monkeypatch.setattr("rlinf.scheduler.process._process", None)
    for local in (False, True):
        with pytest.raises(SchedulerUsageError, match=r"create one with Cluster\("):
            Channel.create("too early", local=local)


def test_a_closed_channel_wakes_its_waiters(channel):
    queue = channel()
    work = queue.get(async_op=True)
    queue.close("the producer failed")
    with pytest.raises(SchedulerError, match="the producer failed"):
        work.wait()
    with pytest.raises(SchedulerError, match="the producer failed"):
        queue.put(1)


def test_waiting_too_long(channel, short_deadline):
    queue = channel(maxsize=1)
    short_deadline()
    with pytest.raises(TimeoutError, match="driver: waiting for an item of channel"):
        queue.get()
    queue.put("not for the one who gave up")
    with pytest.raises(TimeoutError, match="room in channel"):
        queue.put("no room")
    with pytest.raises(TimeoutError, match="items of weight 3"):
        queue.get_batch(3, key="batch", async_op=True).wait()
    queue.put("batch", 3, key="batch")
    assert queue.get("batch") == "batch"
    assert queue.qsize() == 1
    assert queue.get() == "not for the one who gave up"
    assert queue.empty()


def test_posted_items_keep_their_order_among_others(cluster):
    channel = Channel.create("posted")
    channel.post("a")
    channel.put("b")
    channel.post("c", weight=3)
    assert [channel.get() for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(SchedulerUsageError, match="at most 2"):
        Channel.create("bounded", maxsize=2).post("a")


def test_a_channel_that_every_rank_creates_is_open_for_each(shared):
    for number in range(20):
        shared(Queuer).put_into_one_of_all(f"of all {number}").wait()
        channel = Channel.connect(f"of all {number}")
        assert sorted(channel.get() for _ in range(3)) == [0, 1, 2]
        channel.close()


def test_a_channel_ends_with_the_worker_that_hosts_it(launch):
    for value in ("first", "second"):
        group = launch(Queuer, 1, "inn")
        channel = Channel.create("at the inn", host="inn:0")
        channel.put(value)
        assert channel.get() == value
        group._close()


def test_keys_that_nothing_is_in_are_forgotten(channel):
    queue = channel()
    queue.put("kept", key="kept")
    for number in range(3000):
        queue.put(number, key=number)
        assert queue.get(number) == number
    held = require_process().channels._channels[queue.name].queues
    assert len(held) <= 1024
    assert queue.get("kept") == "kept"


def test_an_item_is_not_lost_to_a_wait_that_was_cancelled(launch, channel):
    group = launch(Concurrent, 1, "impatient")
    got = group.give_up(channel()).wait(timeout=30)
    assert got == [["to the next", "to the one kept"]]


def test_an_item_is_not_lost_to_a_handle_that_is_gone(channel):
    queue = channel()
    for _ in range(2):
        queue.get(async_op=True)
    queue.put("kept")
    assert queue.qsize() == 1


@pytest.mark.parametrize("seconds", [0.0, 30.0], ids=["on its way", "there"])
def test_what_a_handle_has_got_is_put_back_once_the_handle_is_gone(channel, shared, seconds):
    """Before the others, with its weight."""
    queue, group = channel(maxsize=2), shared(Queuer)
    queue.put("first", weight=3)
    queue.put("second", weight=1)
    for _ in range(20):
        assert group.execute_on(0).drop(queue, seconds).wait() == [2]
    assert queue.get_batch(3) == ["first"]
    assert queue.get() == "second"


def test_an_item_goes_to_the_next_where_the_one_before_got_it_and_is_gone(channel):
    queue = channel()
    queue.put("only")
    gone, following = queue.get(async_op=True), queue.get(async_op=True)
    assert gone.done()
    del gone
    assert following.wait() == "only"


def test_only_what_is_there_is_taken_now(channel, shared):
    queue, group = channel(), shared(Queuer)
    assert group.execute_on(0).take_now(queue).wait() == [None]
    queue.put("there")
    assert group.execute_on(0).take_now(queue).wait() == ["there"]
    assert queue.get(async_op=True).take_now() is None
    queue.put("later")
    assert queue.get(async_op=True).take_now() == "later"


def test_a_wait_that_was_given_up_is_not_begun_again(channel, short_deadline):
    queue = channel()
    short_deadline()
    work = queue.get(async_op=True)
    with pytest.raises(TimeoutError):
        work.wait()
    with pytest.raises(WithdrawnError, match="was given up; ask for them anew"):
        work.wait()


def test_what_comes_back_or_is_withdrawn_and_nobody_can_take_is_discarded():
    endpoint, dropped = Endpoint(), []
    service = ChannelService(endpoint, lambda worker: None)
    service.discard = lambda payload: dropped.append(payload.reference)

    def ask(kind, *arguments, payloads=()):
        return endpoint.request(endpoint.address, f"channel.{kind}", *arguments, payloads=payloads)

    ask("open", "full", 1).result(0)
    ask("put", "full", None, 0, None, payloads=[Payload(reference="kept")]).result(0)
    ticket = Ticket("putter", 0, 0)
    put = ask("put", "full", None, 0, ticket, payloads=[Payload(reference="no room")])
    assert ask("withdraw", "full", None, ticket).result(0).value
    assert put.done()
    assert dropped == ["no room"]
    ask("close", "full", None).result(0)
    with pytest.raises(SchedulerError):
        ask("restore", "full", None, [0], payloads=[Payload(reference="late")]).result(0)
    assert dropped == ["no room", "kept", "late"]


def test_shared_memory_of_what_nobody_takes_is_given_back(launch, channel, runtime):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    group, numel = launch(Queuer, 1, "giver"), 1 << 18
    (pid,) = group.process_id().wait()

    def claimed() -> list[Path]:
        found = list(shared_memory_directory().glob(f"rlinf-*-{pid}-*"))
        assert found
        return [path for path in found if b"\1" in path.read_bytes()[:HEADER_BYTES]]

    for _ in range(10):
        group.give_large(numel)  # and the handle is gone
        group.process_id().wait()
    for number in range(5):
        queue = Channel.create(f"closed {number}")
        group.stream(queue, 3, numel).wait()
        queue.close()
    limit = time.monotonic() + 60
    while claimed() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not claimed()
