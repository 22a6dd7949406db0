"""Send, receive and broadcast between workers."""

import os
import signal
import time
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.scheduler import Channel
from rlinf.scheduler.errors import WorkerDiedError
from rlinf.scheduler.messaging import Messaging
from rlinf.scheduler.services import registry
from rlinf.scheduler.services.mailbox import PAIR, MailboxService
from rlinf.scheduler.transport.payload import Payload
from tests.scheduler.workers import Bundle, Queuer, Talker

NAME = "sharedTalker"


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Bundle):
        return same(vars(a), vars(b))
    return a == b


VALUES = [
    torch.arange(5),
    torch.zeros(()),
    torch.empty(0, 3),
    torch.randn(300, 300, dtype=torch.bfloat16),
    torch.arange(40_000.0).reshape(200, 200).T,
    torch.randn(70_000) > 0,
    [torch.ones(2), torch.zeros(30_000)],
    {"z": torch.ones(1), "a": torch.zeros(2), 3: None},
    OrderedDict(b=1, a=2),
    Bundle("n", torch.ones(3), [torch.zeros(20_000)], {"k": torch.ones(2)}),
    np.arange(100_000).reshape(100, 1000),
    np.asfortranarray(np.ones((200, 300))),
    np.array(["text", None], dtype=object),
    (1, "two", None, {"three"}),
    None,
]


def test_types_round_trip(shared):
    group = shared(Talker)
    answering = group.execute_on(1).echo(NAME, 0, len(VALUES))
    (returned,) = group.execute_on(0).round_trip(VALUES, NAME, 1).wait()
    answering.wait()
    for sent, got in zip(VALUES, returned, strict=True):
        assert same(sent, got), (sent, got)


def test_parameters_keep_their_class(shared):
    group = shared(Talker)
    parameter = torch.nn.Parameter(torch.ones(30_000))
    group.execute_on(0).send_to_peer(parameter, NAME, 1).wait()
    (got,) = group.execute_on(1).receive_from(NAME, 0).wait()
    assert isinstance(got, torch.nn.Parameter)
    assert got.requires_grad


def test_receive_before_send_and_after(shared):
    group = shared(Talker)
    receiving = group.execute_on(1).receive_from(NAME, 0)
    group.execute_on(0).send_to_peer("late", NAME, 1).wait()
    assert receiving.wait() == ["late"]
    group.execute_on(0).send_to_peer("early", NAME, 1).wait()
    assert group.execute_on(1).receive_from(NAME, 0).wait() == ["early"]


def test_piggyback(shared):
    group = shared(Talker)
    group.execute_on(0).send_to_peer([1], NAME, 1, {"version": 3}).wait()
    assert group.execute_on(1).receive_from(NAME, 0).wait() == [([1], {"version": 3})]


def test_a_worker_can_send_to_itself(shared):
    group = shared(Talker)
    group.execute_on(0).send_to_peer("me", NAME, 0).wait()
    assert group.execute_on(0).receive_from(NAME, 0).wait() == ["me"]


def test_async_messages_keep_order(shared):
    group = shared(Talker)
    first = group.execute_on(0).async_exchange(NAME, 1)
    second = group.execute_on(1).async_exchange(NAME, 0)
    assert first.wait() == [[(1, 0), (1, 1), (1, 2)]]
    assert second.wait() == [[(0, 0), (0, 1), (0, 2)]]


def test_large_tensors(shared):
    group = shared(Talker)
    count, numel = 6, 1 << 20
    sending = group.execute_on(0).large(NAME, 1, count, numel)
    (seen,) = group.execute_on(1).large(NAME, 0, count, numel).wait()
    sending.wait()
    assert seen == [(numel, float(index), True) for index in range(count)]


def test_tensor_in_place(shared):
    group = shared(Talker)
    sending = group.execute_on(0).tensors(NAME, 1)
    (got,) = group.execute_on(1).tensors(NAME, 0).wait()
    sending.wait()
    assert torch.equal(got, torch.arange(6.0).reshape(2, 3).T)


def test_what_is_no_tensor_is_refused_by_its_sender(shared):
    with pytest.raises(TypeError, match="send_tensor sends a tensor, got a list"):
        shared(Talker).execute_on(0).send_list(NAME, 1).wait()


def test_mixed_tensor_and_object_calls_are_named(shared):
    group = shared(Talker)
    sending = group.execute_on(0).mixed(NAME, 1)
    with pytest.raises(RuntimeError, match=r"called recv for a message .* sent with send_tensor"):
        group.execute_on(1).mixed(NAME, 0).wait()
    sending.wait()


def test_a_rank_that_a_running_group_lacks_is_refused_by_both_sides(shared):
    group = shared(Talker)
    for call in (
        lambda: group.execute_on(1).receive_from(NAME, 7),
        lambda: group.execute_on(1).send_to_peer("x", NAME, 7),
    ):
        with pytest.raises(ValueError, match=f"no worker '{NAME}:7': .*has ranks 0-2"):
            call().wait(timeout=20)


def test_chained_work(shared):
    group = shared(Talker)
    call = group.execute_on(1).chained(NAME, 0)
    group.execute_on(0).send_to_peer("x", NAME, 1).wait()
    assert call.wait() == [(42, "x")]


@pytest.mark.parametrize("waits", [False, True])
def test_chained_work_may_lead_to_more(shared, waits):
    group = shared(Talker)
    call = group.execute_on(1).chained_receive(NAME, 0, waits=waits)
    for value in ("first", "second"):
        group.execute_on(0).send_to_peer(value, NAME, 1).wait()
    assert call.wait() == [True]


@pytest.mark.parametrize("async_op", [False, True])
def test_broadcast_over_two_groups(shared, async_op):
    first, second = shared(Talker), shared(Queuer)
    groups = [("sharedTalker", [0, 2]), ("sharedQueuer", 1)]
    value = {"weights": torch.arange(50_000), "step": 3}
    calls = [
        first.execute_on(0, 2).spread(value, groups, None, async_op),
        second.execute_on(1).spread(None, groups, None, async_op),
    ]
    for results in (calls[0].wait(), calls[1].wait()):
        for result in results:
            for got in result if async_op else [result]:
                assert same(got, value)
    source = ("sharedQueuer", 1)
    calls = [
        first.execute_on(0, 2).spread("no", groups, source),
        second.execute_on(1).spread("yes", groups, source),
    ]
    assert [call.wait() for call in calls] == [["yes", "yes"], ["yes"]]


def test_receivers_of_a_broadcast_do_not_share_memory(shared):
    group = shared(Talker)
    assert group.broadcast_and_change([(NAME, [0, 1, 2])]).wait() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("way", ["send", "send_tensor", "broadcast", "channel"])
def test_what_was_sent_may_be_changed(shared, way):
    group, channel = shared(Talker), Channel.create(f"changed by {way}")
    group.execute_on(0).send_one_buffer(way, NAME, 1, channel).wait()
    received = group.execute_on(1).receive_buffers(way, NAME, 0, channel).wait()
    assert received == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]]
    channel.close()


def test_broadcasts_that_are_not_received_are_bounded(shared):
    group, groups = shared(Talker), [(NAME, 0), (NAME, 1)]
    sending = group.execute_on(0).broadcast_ahead(5, groups)
    assert group.execute_on(1).receive_late(5, groups).wait() == [[0, 1, 2, 3, 4]]
    assert sending.wait() == [([True, True, False, False, False], [0, 1, 2, 3, 4])]


@pytest.mark.parametrize("far", [[1], [2], [1, 2]])
def test_a_broadcast_to_other_nodes_gives_its_memory_back(shared, runtime, far):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    group, value = shared(Talker), torch.arange(100_000)
    for _ in range(2):
        sent = group.execute_on(0).spread_afar(value, [0, 1, 2], far)
        received = group.execute_on(1, 2).spread(None, [(NAME, [0, 1, 2])])
        assert all(torch.equal(got, value) for got in (*sent.wait(), *received.wait()))
        del sent, received
    group.execute_on(1, 2).process_id().wait()
    assert group.execute_on(0).busy_blocks().wait() == [0]


def test_messages_that_have_come_and_nobody_looks_at_give_their_memory_back(shared, runtime):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    group, value = shared(Talker), torch.arange(100_000)
    dropping = group.execute_on(1).drop_received(NAME, 0)
    group.execute_on(0).send_to_peer(value, NAME, 1).wait()
    group.execute_on(0).spread(value, [(NAME, [0, 1])]).wait()
    dropping.wait()
    limit = time.monotonic() + 30
    while group.execute_on(0).busy_blocks().wait() != [0] and time.monotonic() < limit:
        time.sleep(0.02)
    assert group.execute_on(0).busy_blocks().wait() == [0]


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_what_a_worker_held_or_did_not_read_is_given_back_once_it_has_ended(
    launch, shared, runtime, how
):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    ends = launch(Talker, 1, f"ends {how}")
    value = torch.arange(100_000)
    shared(Talker).execute_on(0).send_to_peer(value, ends.worker_group_name, 0).wait()
    ends.keep(NAME, 0).wait()
    shared(Talker).execute_on(0).send_to_peer(value, ends.worker_group_name, 0).wait()
    groups = [(NAME, [0, 1]), (ends.worker_group_name, [0])]
    shared(Talker).execute_on(0).spread(value, groups).wait()
    got = shared(Talker).execute_on(1).spread(None, groups).wait()
    del got
    assert shared(Talker).execute_on(0).busy_blocks().wait()[0] >= 3
    if how == "closed":
        ends._close()
    else:
        os.kill(ends.process_id().wait()[0], signal.SIGKILL)
    limit = time.monotonic() + 30
    while (busy := shared(Talker).execute_on(0).busy_blocks().wait()) != [0]:
        assert time.monotonic() < limit, busy
        time.sleep(0.02)


def test_arguments_for_another_node_are_in_no_block(shared, runtime, monkeypatch):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    group, sent = shared(Talker), []
    call = type(group._handles[0]).call

    def recorded(handle, method, arguments):
        sent.append(bool(arguments.blocks))
        return call(handle, method, arguments)

    monkeypatch.setattr(type(group._handles[0]), "call", recorded)
    monkeypatch.setattr(group, "_nodes", [0, 1, 0])  # as if the second were elsewhere
    value = torch.arange(100_000)
    group.spread(value, [(NAME, [0, 1, 2])]).wait()
    assert sent == [True, False, True]


def test_rank_paths_in_a_broadcast(shared):
    group = shared(Talker)
    for members in ([(NAME, [(0,), (1,)])], [(NAME, [np.int64(0), (np.int64(1),)])]):
        assert group.execute_on(0, 1).spread("p", members).wait() == ["p", "p"]


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        (None, ValueError),
        ([], ValueError),
        ("bad", TypeError),
        ([("bad", "rank")], TypeError),
        ([("bad", ())], TypeError),
        ([("bad", True)], TypeError),
        ([("bad",)], TypeError),
        ([("elsewhere", 0)], ValueError),
    ],
)
def test_broadcast_refuses_bad_members(shared, groups, kind):
    with pytest.raises(kind):
        shared(Talker).execute_on(0).spread("x", groups).wait()


def test_a_rank_that_a_group_lacks_is_named_at_once(shared):
    with pytest.raises(ValueError, match=f"no worker '{NAME}:3': group '{NAME}' has ranks 0-2"):
        shared(Talker).execute_on(0).send_to_peer("x", NAME, 3).wait()


@pytest.mark.parametrize(("wait", "given"), [("receive_from", ()), ("send_to_peer", ("x",))])
def test_a_group_that_is_waited_for_and_is_not_there_is_told(
    shared, short_deadline, monkeypatch, caplog, wait, given
):
    monkeypatch.setattr(registry, "_UNKNOWN_SECONDS", 0.1)
    group, other = shared(Talker), f"{wait}Talker"
    short_deadline(group)
    with pytest.raises(TimeoutError):
        getattr(group.execute_on(0), wait)(*given, other, 0).wait()
    assert f"{other}:0 is waited for, and there is no group {other}: " in caplog.text
    assert NAME in caplog.text


def test_receive_from_nobody_ends_with_a_wait_for_list(shared, short_deadline):
    group = shared(Talker)
    short_deadline(group)
    with pytest.raises(TimeoutError) as caught:
        group.execute_on(0).receive_from("nobody", 0).wait()
    text = str(caught.value)
    assert "waiting for a message from nobody:0" in text
    assert "sharedTalker:1: idle" in text
    assert "in receive_from" in text
    with pytest.raises(TimeoutError):
        group.execute_on(0).receive_from(NAME, 2).wait()
    group.execute_on(2).send_to_peer("not for the one who gave up", NAME, 0).wait()
    assert group.execute_on(0).receive_from(NAME, 2).wait() == ["not for the one who gave up"]
    with pytest.raises(TimeoutError, match="worker nobody:0 to start"):
        group.execute_on(1).send_to_peer(1, "nobody", 0).wait()


def test_messages_to_a_receiver_that_died_are_not_waited_for():
    sender, died = Messaging(), Future()
    died.set_exception(WorkerDiedError("worker 'a:0' died"))
    bound = sender._Messaging__bound
    assert bound("a:0", 300 << 20, died) is None
    received = [Future() for _ in range(2)]  # by one of its name
    assert bound("a:0", 200 << 20, received[0]) is None
    assert bound("a:0", 200 << 20, received[1]) is received[0]


def test_what_a_worker_was_sent_and_has_not_received_ends_with_it():
    endpoint = SimpleNamespace(register=lambda *handler: None, lock=nullcontext())
    mailbox, dropped = MailboxService(endpoint), []
    mailbox.discard = lambda payload, *place: dropped.append((payload.reference, *place))
    alive, pair, broadcast = (
        ("alive:0", "sender:0", PAIR), ("ended:0", "sender:0", PAIR), ("ended:0", "sender:0", "all")
    )  # fmt: skip

    def deliver(stream, head, value):
        return mailbox._deliver(stream, head, True, payloads=[Payload(reference=value)])

    received, first = deliver(alive, None, 0), deliver(pair, None, 1)
    second = deliver(broadcast, (2, 3), 2)
    mailbox.mark_dead("ended:0", "its group 'ended' was closed")
    late = deliver(pair, None, 3)
    for each in (first, second, late):
        with pytest.raises(WorkerDiedError, match="its group 'ended' was closed"):
            each.result(0)
    assert dropped == [(1,), (2, 2, 3), (3,)]
    assert not received.done()
    assert mailbox.receive(alive).result(0).payloads[0].reference == 0
    mailbox._forget("ended:0")  # and one of its name starts
    again = deliver(pair, None, 4)
    assert mailbox.receive(pair).result(0).payloads[0].reference == 4
    again.result(0)
