"""Processes that die, waits that end, and how the driver's process ends."""

import asyncio
import contextlib
import fcntl
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch

from rlinf.errors import UserError
from rlinf.flow.executor import Executor
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.flow.stream import Ports, StepAborted
from rlinf.scheduler import Channel, Cluster, ClusterConfig
from rlinf.scheduler.channel.channel import DEFAULT_KEY
from rlinf.scheduler.errors import WorkerCallError, WorkerDiedError
from rlinf.scheduler.process import require_process
from rlinf.scheduler.runtime.execution import Outcome
from rlinf.scheduler.services import failed_calls, silent_workers
from rlinf.scheduler.services.channels import Ticket
from rlinf.scheduler.services.diagnosis import Row
from rlinf.scheduler.services.failed_calls import FailedCalls, Wait
from rlinf.scheduler.services.leases import DeviceLock
from rlinf.scheduler.transport.cluster_files import ClusterFiles, shared_memory_directory
from rlinf.scheduler.transport.payload import Payload
from tests.flow.test_executor import Consumer, Producer
from tests.scheduler.workers import Basic, Concurrent, Queuer, Talker
from tests.warm import Warm


@pytest.fixture
def processes(runtime):
    if runtime == "local":
        pytest.skip("workers of the local runtime are no processes")


def kill(group, rank: int) -> None:
    (pid,) = group.execute_on(rank).process_id().wait()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("processes")
def test_a_killed_worker_is_named(launch, shared):
    group, other = launch(Basic, 2, "killed"), shared(Basic)
    (pid,) = group.execute_on(1).process_id().wait()
    call = group.sleep(60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="'killed:1' died"):
        call.wait()
    with pytest.raises(WorkerDiedError, match="'killed:1' died"):
        group.execute_on(1).add().wait()
    assert other.execute_on(0).add(1).wait() == [(0, 1)]
    assert other.execute_on(0).alive("killed:1").wait() == [False]


@pytest.mark.usefixtures("processes")
def test_who_waits_for_a_dead_worker_is_told(launch, shared):
    group, mortal = shared(Talker), launch(Basic, 1, "mortal")
    mortal.add().wait()
    waiting = group.execute_on(0).receive_from("mortal", 0)
    kill(mortal, 0)
    with pytest.raises(WorkerDiedError, match="worker 'mortal:0' died"):
        waiting.wait()
    with pytest.raises(WorkerDiedError, match="worker 'mortal:0' died"):
        group.execute_on(1).send_to_peer(1, "mortal", 0).wait()


@pytest.mark.usefixtures("processes")
def test_who_asks_a_process_that_was_taken_for_dead_too_early_is_told(launch, cluster, monkeypatch):
    group = launch(Basic, 1, "early")
    channel = Channel.create("in the early one", host="early:0")
    monkeypatch.setattr(require_process(), "deadline_seconds", 20.0)
    (pid,) = group.process_id().wait()
    os.kill(pid, signal.SIGSTOP)
    with require_process().endpoint.lock:
        cluster._services.registry.died("early:0", "its node does not answer")  # as Ray may say
    with pytest.raises(WorkerDiedError, match="'early:0' died: its node does not answer"):
        channel.put(1, async_op=True).wait()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("processes", "impatient")
def test_a_worker_that_is_stopped_ends_the_wait_for_it(launch, monkeypatch, caplog):
    group = launch(Basic, 2, "frozen")
    (pid,) = group.execute_on(1).process_id().wait()
    monkeypatch.setattr(require_process(), "deadline_seconds", 4.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=r"'frozen:1' has not answered for .*(?s:.*)idle"):
            group.add().wait()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "worker frozen:1 has not answered for" in caplog.text
    assert group.add(1).wait() == [(0, 1), (1, 1)]


def step_of(group, consumers):
    """A flow of one step, with its plan: a producer, and these consumers."""
    flow = Flow(group)
    flow.stage("make", Stage("producer", "produce", outputs=("numbers",)))
    flow.stage("use", Stage("consumer", "consume", inputs=("numbers",)))
    counts = {"producer": 1, "consumer": consumers}
    return flow, Plan(
        components={
            name: ComponentPlan(devices=(device,), processes=count, residency="resident")
            for device, (name, count) in enumerate(counts.items())
        }
    )


@pytest.mark.usefixtures("processes")
def test_to_end_a_step_waits_for_no_worker_that_is_stopped(launch, monkeypatch):
    group = launch(Consumer, 1, "unheard")
    flow, plan = step_of("unheard", consumers=1)
    ports = Ports(flow, plan, {"consumer": group}, sources=1, depth=2)
    (place,) = group.place().wait()
    monkeypatch.setattr(require_process(), "deadline_seconds", 1.0)
    os.kill(place.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        ports.abort("another worker failed")
        assert time.monotonic() - begin < 0.9
    finally:
        os.kill(place.pid, signal.SIGCONT)
    monkeypatch.undo()
    consumer = flow.order()[1].stages[0]
    for step in range(2):  # each has a queue of its own
        with pytest.raises(StepAborted, match="another worker failed"):
            group.pending_items(list(ports.inputs(consumer, 0, step))).wait()


@pytest.mark.slow
@pytest.mark.usefixtures("processes", "impatient")
def test_a_step_with_a_worker_that_is_stopped_ends_after_one_deadline(launch, cluster, monkeypatch):
    flow, plan = step_of("half_heard", consumers=2)
    groups = {
        "producer": launch(Producer, 1, "speaker"),
        "consumer": launch(Consumer, 2, "half_heard"),
    }
    executor = Executor(flow, plan, groups, cluster, sources=2, depth=3)
    places = groups["consumer"].place().wait()
    executor.run(0, {"producer": {"items": 4, "sources": 2}})
    monkeypatch.setattr(require_process(), "deadline_seconds", 4.0)
    os.kill(places[1].pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="'half_heard:1' has not answered for"):
            executor.run(1, {"producer": {"items": 4, "sources": 2}})
        assert time.monotonic() - begin < 20.0
    finally:
        os.kill(places[1].pid, signal.SIGCONT)
    executor.close()


@pytest.mark.usefixtures("processes")
def test_a_name_can_be_used_again_after_a_death(launch, shared):
    group, peer = launch(Talker, 1, "reborn"), shared(Talker)
    peer.execute_on(0).send_to_peer("one", "reborn", 0).wait()
    assert group.receive_from("sharedTalker", 0).wait() == ["one"]
    group._close()
    group = launch(Talker, 1, "reborn")
    peer.execute_on(0).send_to_peer("two", "reborn", 0).wait()
    assert group.receive_from("sharedTalker", 0).wait() == ["two"]


@pytest.mark.usefixtures("processes")
def test_a_process_that_hears_late_does_not_take_a_new_worker_for_dead(launch, shared):
    peer, group = shared(Talker), launch(Talker, 1, "renewed")
    group.echo("sharedTalker", 0, 0).wait()
    group._close()
    with pytest.raises(WorkerDiedError, match="'renewed:0' died"):
        peer.execute_on(0).receive_from("renewed", 0).wait()
    peer.execute_on(0).read_no_message(1.0).wait()
    group = launch(Talker, 1, "renewed")
    peer.execute_on(0).send_to_peer("here", "renewed", 0).wait()
    assert group.receive_from("sharedTalker", 0).wait() == ["here"]


@pytest.mark.usefixtures("processes")
def test_who_does_not_answer_is_on_the_wait_for_list(shared):
    peer = shared(Talker)
    peer.execute_on(0).read_no_message(4.0).wait()
    rows = {row.worker: row.doing for row in require_process().ask_driver("diagnosis.report")}
    assert rows["sharedTalker:0"] == "not answering"
    assert rows["sharedTalker:1"] != "not answering"


@pytest.mark.usefixtures("processes")
def test_items_of_a_closed_producer_can_still_be_read(launch, cluster):
    queue = Channel.create("inheritance")
    group = launch(Queuer, 1, "producer")
    group.stream(queue, 3, 50_000).wait()
    group._close()
    assert [float(queue.get()[0]) for _ in range(3)] == [0.0, 1.0, 2.0]
    queue.close()


def test_what_a_closed_worker_waited_for_goes_to_others(launch, cluster):
    channel = Channel.create("bequest")
    group = launch(Queuer, 1, "heirless")
    group.want(channel).wait()
    group._close()
    channel.put("kept")
    assert channel.get_nowait() == "kept"


def until_free(blocks) -> None:
    limit = time.monotonic() + 30
    while any(block.busy for block in blocks):
        assert time.monotonic() < limit, [block.busy for block in blocks]
        time.sleep(0.02)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("where", ["given", "not looked at in a batch", "in its channel"])
def test_shared_memory_of_items_at_a_worker_that_ended_is_given_back(launch, where, how):
    group = launch(Queuer, 1, "careless")
    host = "careless:0" if where == "in its channel" else None
    name = f"{where}, {how}"
    channel, item = Channel.create(name, host=host), torch.zeros(100_000)
    busy = {block.name for block in require_process().codec._pool.blocks if block.busy}
    channel.put(item, weight=1)
    channel.put(item, weight=1)
    blocks = [block for block in require_process().codec._pool.blocks if block.busy]
    taken = [block for block in blocks if block.name not in busy]
    assert len(taken) == 2
    if where == "given":
        group.want(channel).wait()
        group.want(channel).wait()
    elif where == "not looked at in a batch":
        group.want(channel, 2).wait()
    if host is None:
        assert channel.qsize() == 0
    assert all(block.busy for block in taken)
    if how == "closed":
        group._close()
    else:
        kill(group, 0)
    until_free(taken)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_shared_memory_of_arguments_that_a_worker_did_not_reach_is_given_back(launch, how):
    group, value = launch(Queuer, 1, "overtaxed"), torch.zeros(100_000)
    group.process_id().wait()
    busy = {block.name for block in require_process().codec._pool.blocks if block.busy}
    if how == "closed":
        calls = [group.sleep_with(value, 30.0) for _ in range(3)]
    else:
        calls = [group.end_with(value), group.sleep_with(value, 30.0)]
    blocks = [block for block in require_process().codec._pool.blocks if block.busy]
    taken = [block for block in blocks if block.name not in busy]
    if how == "closed":
        group._close()
    for call in calls:
        with pytest.raises(WorkerDiedError):
            call.wait()
    until_free(taken)


def test_a_channel_at_a_worker_ends_with_it(launch):
    """On both runtimes: what is in it goes, and who waits is told."""
    group = launch(Queuer, 1, "landlord")
    channel = Channel.create("let", host="landlord:0")
    channel.put("nobody has this")
    waiting = channel.get(key="empty", async_op=True)
    group._close()
    for use in (waiting.wait, channel.get, channel.get_nowait, partial(channel.put, 1)):
        with pytest.raises(WorkerDiedError, match="'landlord:0' died: its group"):
            use()
    again = launch(Queuer, 1, "landlord")
    assert Channel.create("let", host="landlord:0").qsize() == 0
    again._close()


@pytest.mark.usefixtures("processes")
def test_items_that_come_back_are_no_more_of_the_worker_that_had_them(launch):
    """What it took and dropped stays for others when it ends."""
    group = launch(Queuer, 1, "fickle")
    channel = Channel.create("come back")
    channel.put(torch.ones(100_000))
    assert group.drop(channel, 30.0).wait() == [1]
    group._close()
    gone = launch(Queuer, 1, "next to end")  # whose end is behind that of the first
    gone._close()
    assert float(channel.get_nowait()[0]) == 1.0


def test_what_a_worker_asked_for_takes_nothing_where_it_arrives_after_its_end(launch):
    channel = Channel.create("late")
    group = launch(Queuer, 1, "too_late")
    group._close()
    with pytest.raises(WorkerDiedError):
        require_process().channels._get("late", DEFAULT_KEY, None, Ticket("too_late:0", 1, 1))
    channel.put("kept")
    assert channel.get_nowait() == "kept"


def test_closing_a_group_ends_its_waits(launch):
    group = launch(Talker, 2, "abandoned")
    waiting = group.execute_on(0).receive_from("abandoned", 1)
    group._close()
    with pytest.raises((WorkerDiedError, WorkerCallError), match="died"):
        waiting.wait()


def test_every_worker_is_on_the_wait_for_list(shared, short_deadline):
    group, name = shared(Talker), "sharedTalker"
    shared(Basic).add().wait()
    short_deadline(group)
    calls = [group.execute_on(rank).receive_from(name, 1 - rank) for rank in range(2)]
    with pytest.raises(TimeoutError) as caught:
        calls[0].wait()
    text = str(caught.value)
    assert f"{name}:0: waiting for a message from {name}:1" in text
    # The deadlines of the other one and of the driver pass at the same time; they may be through
    # with it already.
    assert re.search(f"{name}:1: (waiting for a message from {name}:0|running|idle)", text)
    asked = re.escape(f"waiting for receive_from of ['{name}:0']")
    assert re.search(f"driver: ({asked}|running|idle)", text)
    assert f"{name}:2: idle" in text
    assert "sharedBasic:0: idle" in text
    assert "workers.py" in text
    with pytest.raises(TimeoutError):
        calls[1].wait()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(require_process(), "look_seconds", 0.2)


def waits_for_a_message(asked):
    return asked.receive_from("asker", 0).wait


def waits_for_a_message_on_a_loop(asked):
    call = asked.receive_from("asker", 0)
    return lambda: asyncio.run(call.async_wait())


def waits_for_an_item(asked):
    return Channel.create("of_nobody").get


def waits_for_an_item_on_a_loop(asked):
    work = Channel.create("of_nobody_later").get(async_op=True)
    return lambda: asyncio.run(work.async_wait())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "wait",
    [
        waits_for_a_message,
        waits_for_a_message_on_a_loop,
        waits_for_an_item,
        waits_for_an_item_on_a_loop,
    ],
)
def test_a_call_that_failed_ends_the_wait_for_what_cannot_come(launch, caplog, wait):
    asker, asked = launch(Basic, 1, "asker"), launch(Talker, 1, "asked")
    asked.process_id().wait()
    failing = asker.fail("nothing")
    with pytest.raises(KeyError, match=r"asker:0\.fail raised KeyError") as caught:
        wait(asked)()
    assert "Since then driver waits in vain. Who waits for whom" in caught.value.__notes__[-1]
    assert "a call that nobody waits for failed: asker:0.fail raised KeyError" in caplog.text
    with pytest.raises(KeyError):  # which it still does where it is waited for
        failing.wait()


@pytest.mark.usefixtures("impatient")
def test_a_failure_behind_which_a_wait_has_ended_blames_no_other(launch, shared, short_deadline):
    group, others, asker = shared(Talker), shared(Basic), launch(Basic, 1, "asker")
    for started in (group, others, asker):
        started.process_id().wait()
    failing = asker.fail("nothing")
    others.execute_on(0).sleep(1.0).wait()  # in which it is seen
    short_deadline(group)
    with pytest.raises(TimeoutError):
        group.execute_on(0).receive_from("sharedTalker", 1).wait()
    with pytest.raises(KeyError):
        failing.wait()


@pytest.mark.usefixtures("impatient")
def test_failures_of_the_other_ranks_of_a_call_that_raised_end_no_later_wait(
    launch, shared, short_deadline
):
    group, several = shared(Talker), launch(Basic, 3, "several")
    several.process_id().wait()
    with pytest.raises(KeyError):
        several.fail("nothing").wait()
    assert several.process_id().wait()  # by now all of them have failed
    short_deadline(group)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            group.execute_on(0).receive_from("sharedTalker", 1).wait()


@pytest.mark.usefixtures("impatient")
def test_a_call_that_failed_leaves_a_wait_alone_while_others_compute(shared, launch):
    failing = launch(Basic, 1, "asker").fail("nothing")
    others = [shared(Basic).execute_on(0).sleep(1.5), launch(Concurrent, 1, "resting").rest(1.5)]
    assert [call.wait() for call in others]
    with pytest.raises(KeyError):
        failing.wait()


SCRIPT = """
    import sys, time
    from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

    class Failing(Worker):
        def fail(self):
            raise ValueError("on purpose")

    class Waiting(Worker):
        async def wait(self):
            pass

    cluster = Cluster(cluster_cfg={"num_nodes": 1, "runtime": "%s"})
    group = Failing.create_group().launch(cluster, NodePlacementStrategy([0]), "failing")
    call = group.fail()
    if sys.argv[1] == "dropped":
        del call
        time.sleep(0.5)
    if sys.argv[1] == "ended":
        while not call.done():
            time.sleep(0.01)
    if sys.argv[1] == "async":
        Waiting.create_group().launch(cluster, NodePlacementStrategy([0]), "waiting").wait().wait()
    if sys.argv[1] == "caught":
        try:
            call.wait()
        except ValueError:
            sys.exit(7)
    if sys.argv[1] == "raised":
        call.wait()
"""


def run_script(runtime: str, ending: str) -> tuple[int, str]:
    """The exit code and what stands in standard error."""
    script = Warm(["-c", textwrap.dedent(SCRIPT) % runtime, ending])
    _, errors = script.communicate(timeout=120)
    return script.wait(), errors.decode()


def files_left() -> set[str]:
    """Files in shared memory of clusters that have ended; others may run beside the tests."""
    directory, live = shared_memory_directory(), set()
    for lock in directory.glob("rlinf-*.lock"):
        with contextlib.suppress(FileNotFoundError), lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                live.add(lock.stem)
    found = {path.name for path in directory.glob("rlinf-*")}
    return {name for name in found if not name.startswith(tuple(live))}


@pytest.mark.parametrize(
    ("ending", "code"),
    [("caught", 7), ("raised", 1), ("ignored", 0), ("async", 0), ("dropped", 0), ("ended", 0)],
)
def test_the_exit_code_is_the_programs_own(ending, code):
    returned, errors = run_script("local", ending)
    assert returned == code, errors
    if ending in ("ignored", "async"):  # it may not have failed yet
        return
    assert ("ValueError: on purpose" in errors) == (ending != "caught")
    said = "a call that nobody waits for failed: failing:0.fail raised ValueError: on purpose"
    assert errors.count(said) == (ending in ("dropped", "ended"))


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("caught", 7), ("raised", 1)])
def test_the_exit_code_on_ray(ending, code):
    before = files_left()
    returned, errors = run_script("ray", ending)
    assert returned == code, errors
    assert files_left() <= before


ENDLESS = """
    from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

    class Endless(Worker):
        def talk(self):
            while True:
                self.send(1, "endless", 0)
                self.recv("endless", 0)

    cluster = Cluster(cluster_cfg={"num_nodes": 1, "runtime": "local"})
    Endless.create_group().launch(cluster, NodePlacementStrategy([0]), "endless").talk()
    cluster.shutdown()
    try:
        Endless.create_group().launch(cluster, NodePlacementStrategy([0]), "late")
    except RuntimeError as error:
        assert "the cluster was shut down" in str(error), error
    else:
        raise AssertionError("launched on a cluster that was shut down")
"""


def test_a_worker_that_does_not_stop_is_left_without_a_word():
    script = Warm(["-c", textwrap.dedent(ENDLESS)])
    _, errors = script.communicate(timeout=120)
    assert (script.wait(), errors.decode()) == (0, "")


COMPUTING = """
    import sys, time, torch
    from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

    class Computing(Worker):
        def compute(self):
            matrix = torch.ones(300, 300)
            while True:
                matrix = matrix @ matrix / 300

    cluster = Cluster(cluster_cfg={"num_nodes": 1, "runtime": "local"})
    Computing.create_group().launch(cluster, NodePlacementStrategy([0]), "computing").compute()
    time.sleep(0.2)
    print("it ends", end="")
"""


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("sys.exit(5)", 5, ""),
        pytest.param("raise ValueError('on purpose')", 1, "on purpose", marks=pytest.mark.slow),
        pytest.param("cluster.shutdown()", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_computes_to_the_end_does_not_change_the_status(ending, code, told):
    script = textwrap.dedent(COMPUTING) + ending
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, "it ends"), ended.stderr
    assert "terminate called" not in ended.stderr
    assert told in ended.stderr


RESET = """
    import ray
    from rlinf.scheduler import Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Basic

    for value in ("first", "second"):
        cluster = Cluster(num_nodes=1)
        group = Basic.create_group(1).launch(cluster, NodePlacementStrategy([0]), "again")
        assert group.add(1).wait() == [(0, 2)]
        left = group.add(1)
        ray.shutdown()
        del left, Cluster._instance
    ray.init(address="local", num_cpus=1)
    raise SystemExit(9)
"""


@pytest.mark.slow
def test_a_program_that_stops_ray_itself_begins_again_and_keeps_its_own():
    before = files_left()
    script = Warm(["-c", textwrap.dedent(RESET)])
    _, errors = script.communicate(timeout=120)
    assert script.wait() == 9, errors
    assert b"Traceback" not in errors
    assert files_left() <= before


REFUSED = """
    import pathlib, psutil, sys
    from rlinf.errors import UserError
    from rlinf.scheduler import Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Basic

    trace = pathlib.Path(sys.argv[1])

    def refused(why, **config):
        try:
            Cluster(cluster_cfg={"num_nodes": 1} | config)
        except (UserError, ValueError) as error:
            assert why in str(error), error
        else:
            raise AssertionError(config)

    tracer = {"enable": True, "output_file": str(trace)}
    refused("num_nodes must be 1", runtime="local", num_nodes=2, tracer=tracer)
    assert not Cluster.has_initialized()
    assert not trace.exists()

    def late(cluster, nodes):
        raise ValueError("after the runtime has started")

    set_nodes = Cluster._set_nodes
    traced = {"tracer": {"enable": True, "output_file": "/proc/none/trace.jsonl"}}
    for runtime in ("local", "ray"):
        for why, given in (("cannot be written", traced), ("after the runtime", {})):
            Cluster._set_nodes = set_nodes if given else late
            refused(why, runtime=runtime, **given)
            assert not Cluster.has_initialized()
            assert not [each for each in psutil.Process().children() if each.name() == "raylet"]
    Cluster._set_nodes = set_nodes
    cluster = Cluster(cluster_cfg={"num_nodes": 1, "runtime": "local"})
    group = Basic.create_group(1).launch(cluster, NodePlacementStrategy([0]), "later")
    assert group.add(1).wait() == [(0, 2)]
    del Cluster._instance
    refused("num_nodes must be 1", runtime="local", num_nodes=2)
    assert group.add(1).wait() == [(0, 2)]
"""


@pytest.mark.slow
def test_a_cluster_that_is_refused_leaves_nothing_behind(tmp_path):
    script = Warm(["-c", textwrap.dedent(REFUSED), str(tmp_path / "trace.jsonl")])
    _, errors = script.communicate(timeout=120)
    assert script.wait() == 0, errors


ON_A_THREAD = """
    import threading
    from rlinf.scheduler import Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Basic

    thread = threading.Thread(target=lambda: Cluster(num_nodes=1))
    thread.start()
    thread.join()
    group = Basic.create_group(1).launch(Cluster(), NodePlacementStrategy([0]), "later")
    assert group.add(1).wait() == [(0, 2)]
"""


@pytest.mark.slow
def test_a_cluster_outlives_the_thread_that_started_it():
    script = Warm(["-c", textwrap.dedent(ON_A_THREAD)])
    _, errors = script.communicate(timeout=200)
    assert script.wait() == 0, errors


@pytest.fixture
def interruptible():
    """A shell starts what is not in its foreground with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupt_soon(interruptible):
    """As Ctrl-C does, while the main thread waits."""
    main = threading.main_thread().ident
    return lambda: threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()


def test_a_second_interrupt_leaves_no_files(monkeypatch, interruptible):
    """It ends the wait for workers; a third one comes while the files are removed."""
    monkeypatch.setattr("rlinf.scheduler.cluster.set_process", lambda process: None)
    from rlinf.scheduler.runtime.ray import RayRuntime

    runtime, files = object.__new__(RayRuntime), ClusterFiles.create()
    runtime._ended, runtime._files, removed = threading.Event(), files, files.remove
    monkeypatch.setattr(files, "remove", lambda: (signal.raise_signal(signal.SIGINT), removed()))
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    monkeypatch.setattr(runtime, "_end_ray", interrupt)
    monkeypatch.setattr(runtime, "flush_traces", lambda registry: interrupt())
    cluster, closed = object.__new__(Cluster), []
    services = SimpleNamespace(registry=None, close=lambda: closed.append(True))
    cluster.__dict__ |= {"_ready": True, "_services": services, "runtime": runtime}
    with pytest.raises(KeyboardInterrupt):
        cluster.shutdown()
    assert closed
    assert not files._lock_path.exists()
    assert not files.socket_directory.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


WAITING = """
    import time
    from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

    class Sleeping(Worker):
        def sleep(self):
            time.sleep(100)

    cluster = Cluster(num_nodes=1)
    group = Sleeping.create_group().launch(cluster, NodePlacementStrategy([0]), "sleeping")
    call = group.sleep()
    try:
        print("waiting", flush=True)
        call.wait()
    finally:
        time.sleep(4)
        print("tidied up", flush=True)
"""


@pytest.mark.slow
def test_a_waiting_program_that_is_asked_to_end_does_so_in_its_own_time():
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WAITING)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert any(line == "waiting\n" for line in program.stdout)
        program.terminate()
        said = program.stdout.read()
    assert program.returncode == 128 + signal.SIGTERM
    assert "tidied up" in said


def until(condition, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    assert condition()


DRIVER = """
    import sys, time
    from rlinf.scheduler.transport.cluster_files import ClusterFiles, shared_memory_directory
    files = ClusterFiles.create()
    (shared_memory_directory() / f"{files.block_prefix}block").touch()
    print(files.token, flush=True)
    time.sleep(100)
"""


def test_files_of_a_killed_driver_are_removed_by_who_noticed():
    command = [sys.executable, "-c", textwrap.dedent(DRIVER)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    files = ClusterFiles(driver.stdout.readline().strip())
    files.remove_after(driver.pid)
    left = f"rlinf-{files.name}*"
    assert len(list(shared_memory_directory().glob(left))) == 2
    driver.kill()
    driver.communicate()
    until(lambda: not list(shared_memory_directory().glob(left)))
    assert not files.socket_directory.exists()


KILLED = """
    import os, signal
    import psutil, torch
    from rlinf.scheduler import Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Basic

    cluster = Cluster(num_nodes=1)
    group = Basic.create_group(1).launch(cluster, NodePlacementStrategy([0, 0]), "killed")
    group.add(torch.ones(1 << 20)).wait()
    children = psutil.Process().children(recursive=True)
    # Agents of Ray ask for half a minute where the others are.
    print(*(each.pid for each in children if not each.name().endswith("Agent")), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_driver_on_ray_leaves_no_shared_memory_and_no_processes():
    before = files_left()
    script = Warm(["-c", textwrap.dedent(KILLED)])
    said, _ = script.communicate(timeout=120)
    assert script.wait() == -signal.SIGKILL
    until(lambda: files_left() <= before)
    started = [int(word) for word in said.split()]
    assert len(started) >= 4  # control process, raylet, two workers
    until(lambda: not any(runs(number) for number in started))


def runs(number: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


WITHOUT_CONTROL = """
    import psutil
    from rlinf.scheduler import Cluster
    from rlinf.scheduler.runtime.ray_start import control_process

    cluster = Cluster(num_nodes=1, cluster_cfg={"runtime": "ray"})
    cluster.runtime._ended.set()  # nobody looks at it any more, as where both end at once
    control = psutil.Process(control_process())
    control.kill()
    control.wait()
    cluster.shutdown()
    print("shut down", flush=True)
"""


@pytest.mark.slow
def test_the_end_asks_nothing_of_a_ray_whose_control_process_ended_with_it():
    """Such a question is answered by the end of the program, a minute later."""
    script = Warm(["-c", textwrap.dedent(WITHOUT_CONTROL)])
    said, errors = script.communicate(timeout=200)
    assert b"shut down" in said, errors


def test_a_ray_that_a_command_started_is_found_while_it_answers(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from rlinf.scheduler.runtime.ray_start import join_address

    for name in ("RAY_ADDRESS", "RLINF_RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert join_address() is None
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert join_address() == address
        with monkeypatch.context() as another:
            another.setattr(os, "getuid", lambda: 12345)
            of_root = (tmp_path / "ray" / "ray_current_cluster").stat().st_uid == 0
            assert join_address() == (address if of_root else None)
    assert join_address() is None  # it has ended, and its file is left


def test_joining_a_ray_that_nobody_named_is_said(monkeypatch, capsys):
    ray = pytest.importorskip("ray")
    from rlinf.scheduler.cluster_config import ClusterConfig
    from rlinf.scheduler.runtime import ray_start

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_start, "_started_by_command", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", lambda **given: None)
    monkeypatch.setattr(ray_start, "_require_answer", lambda address, what: None)
    ray_start.connect(ClusterConfig())
    assert "joining the Ray at 10.0.0.1:6379" in capsys.readouterr().out
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    ray_start.connect(ClusterConfig())
    assert not capsys.readouterr().out


@pytest.mark.parametrize("variable", [False, True])
def test_an_address_where_nothing_listens_is_refused_at_once(variable, monkeypatch):
    ray = pytest.importorskip("ray")
    from rlinf.scheduler.runtime.ray_start import connect

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", lambda **given: pytest.fail("Ray has been asked"))
    named = f"{address} \\(RAY_ADDRESS\\)" if variable else address
    with pytest.raises(UserError, match=f"joined at {named}: Connection refused; start one there"):
        connect(ClusterConfig(num_nodes=1, runtime="ray", address=None if variable else address))


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_something_else_listens_is_refused(answer, monkeypatch):
    """Also one that says nothing, which Ray would wait for."""
    ray = pytest.importorskip("ray")
    from rlinf.scheduler.runtime import ray_start

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_start, "_SPEAK_SECONDS", 0.5)
    monkeypatch.setattr(ray, "init", lambda **given: pytest.fail("Ray has been asked"))
    kept = []

    def serve(listener):
        with contextlib.suppress(OSError):
            kept.append(listener.accept()[0])
            if answer is not None:
                kept[0].sendall(answer)
                kept[0].shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UserError, match=f"joined at {address}: what listens there is no Ray"):
            ray_start.connect(ClusterConfig(num_nodes=1, runtime="ray", address=address))


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (None, r"Ray did not start: The node timed out; where the machine is busy .*runtime=local"),
        ("auto", r"could be joined at auto: The node timed out; start one there with `ray start"),
    ],
)
def test_where_ray_does_not_start_it_is_said_what_to_do(address, told, monkeypatch):
    ray = pytest.importorskip("ray")
    from rlinf.scheduler.runtime.ray_start import connect

    def late(**settings):
        raise Exception("The node\ntimed out.")

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=told):
        connect(ClusterConfig(num_nodes=1, runtime="ray", address=address))


@pytest.mark.slow
@pytest.mark.parametrize(("deaths", "told"), [(1, "started"), (3, "Ray did not start: its raylet")])
def test_a_raylet_that_ends_while_it_starts_is_started_again(deaths, told):
    pytest.importorskip("ray")
    program = f"""
import contextlib, psutil, threading, time
from rlinf.errors import UserError
from rlinf.scheduler import Cluster

def end_raylets():
    ended = set()
    while len(ended) < {deaths}:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "raylet" and child.pid not in ended:
                    child.kill()
                    ended.add(child.pid)
        time.sleep(0.01)

threading.Thread(target=end_raylets, daemon=True).start()
try:
    Cluster(num_nodes=1, cluster_cfg={{"runtime": "ray"}})
    print("started")
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )
    assert done.stdout.startswith(told), done.stderr
    again = done.stderr.count("Ray is started again: its raylet ended while it started")
    assert again == min(deaths, 2)


def test_who_asks_for_the_end_while_ray_starts_asks_the_program(monkeypatch):
    ray = pytest.importorskip("ray")
    from rlinf.scheduler.runtime.ray_start import connect

    def asked_meanwhile(**settings):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    told, ended = [], []
    monkeypatch.setattr(ray, "init", asked_meanwhile)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("ray"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            connect(ClusterConfig(num_nodes=1, runtime="ray", address="local"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]
    assert ended == ["ray"]


def test_network_interfaces_that_the_machine_does_not_have_are_told():
    from rlinf.scheduler.transport.rendezvous import loopback_interface, require_interfaces

    own = loopback_interface()
    require_interfaces(own)
    with pytest.raises(UserError, match=rf"names 'eth99', which .* does not have; it has.* {own}"):
        require_interfaces(f"{own},eth99")


def test_code_to_send_and_ranks_of_machines_that_are_none_are_told(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    from rlinf.scheduler.runtime.ray_nodes import rank_of, ranks_of
    from rlinf.scheduler.runtime.ray_start import connect

    monkeypatch.setattr(ray, "init", lambda **given: pytest.fail("Ray was started"))
    monkeypatch.setenv("RLINF_CODE_WORKING_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"CODE_WORKING_DIR is .*rlinf is no directory; write auto"):
        connect(ClusterConfig())
    assert [rank_of(text, "10.0.0.1") for text in (None, "", "0", "12")] == [None, None, 0, 12]
    for text in ("x", "-1", "1.0", "²"):
        with pytest.raises(UserError, match=r"NODE_RANK is '.*' on 10\.0\.0\.1, not the rank"):
            rank_of(text, "10.0.0.1")
    assert ranks_of([("1", "10.0.0.1"), (None, "10.0.0.2"), ("0", "10.0.0.3")]) == [1, 2, 0]
    assert ranks_of([(None, "10.0.0.1"), ("1", "10.0.0.2")]) == [0, 1]
    assert ranks_of([(None, "10.0.0.1"), ("0", "10.0.0.2")]) == [1, 0]
    assert ranks_of([("5", "10.0.0.1")]) == [0]
    twice = [("1", "10.0.0.1"), (None, "10.0.0.2"), ("1", "10.0.0.3")]
    with pytest.raises(UserError, match=r"is 1 on 10\.0\.0\.1 and on 10\.0\.0\.3; give each"):
        ranks_of(twice)
    with pytest.raises(UserError, match=r"is 3 on 10\.0\.0\.2, but 2 machines .* are 0 to 1; set"):
        ranks_of([(None, "10.0.0.1"), ("3", "10.0.0.2")])


@pytest.mark.parametrize(
    ("own", "other", "wanted", "order"),
    [
        (None, None, 2, ["own", "other"]),
        (None, "1", 2, ["own", "other"]),
        ("1", None, 2, ["other", "own"]),
        (None, "0", 2, ["other", "own"]),
        ("0", "1", 1, ["own"]),
        ("1", "0", 1, None),
    ],
)
def test_nodes_have_the_ranks_that_they_were_given(monkeypatch, own, other, wanted, order):
    pytest.importorskip("ray")
    from rlinf.scheduler.runtime import ray_nodes

    def on_node(_: str, function):
        asked = {ray_nodes._given_rank: lambda: other, ray_nodes.probe_node: probe}
        return SimpleNamespace(remote=asked[function])

    def probe(_: ClusterConfig, rank: int, *, ray_id: str, **others: str) -> tuple[int, str]:
        return rank, ray_id

    places = {"other": "10.0.0.1", "own": "10.0.0.2"}
    nodes = [{"NodeID": k, "NodeManagerAddress": v, "Alive": True} for k, v in places.items()]
    context = SimpleNamespace(get_node_id=lambda: "own")
    stub = SimpleNamespace(
        nodes=lambda: nodes, get_runtime_context=lambda: context, get=lambda each: each
    )
    monkeypatch.setattr(ray_nodes, "ray", stub)
    monkeypatch.setattr(ray_nodes, "_on_node", on_node)
    monkeypatch.setattr(ray_nodes, "probe_node", probe)
    monkeypatch.setenv("RLINF_NODE_RANK", own or "")
    config = ClusterConfig(runtime="ray", num_nodes=wanted)
    if order is None:
        with pytest.raises(UserError, match=r"has rank 1 of 2 .* is 1; .*num_nodes=2, or"):
            ray_nodes.find_nodes(config, 1.0, False)
    else:
        assert ray_nodes.find_nodes(config, 1.0, False) == list(enumerate(order))


def test_of_a_call_that_several_ranks_fail_the_others_are_called_that(launch, caplog):
    group = launch(Basic, 2, "failing")
    with pytest.raises(KeyError):
        group.fail("nothing").wait()
    group.process_id().wait()  # behind the calls that failed
    group._close()
    until(lambda: re.search(r"another rank failed: failing:[01]\.fail raised Key", caplog.text))
    assert "nobody waits for" not in caplog.text


def test_failures_of_several_ranks_that_were_caught_are_forgotten(launch):
    group, kept = launch(Basic, 2, "forgotten"), require_process().failed_calls
    for _ in range(3):
        with pytest.raises(KeyError):
            group.fail("nothing").wait()
    group.process_id().wait()  # behind the calls that failed
    until(lambda: not any(call.worker.startswith("forgotten:") for call in kept._all()))


def test_of_failures_that_nobody_waits_for_the_newest_are_kept_without_their_variables():
    calls, batches, futures = FailedCalls(), [], []

    def fail():
        batch = set[int]()  # what a method computes with
        batches.append(weakref.ref(batch))
        raise KeyError("nothing")

    for _ in range(failed_calls._MOST_ABANDONED + 3):
        failed = Future()
        try:
            fail()
        except KeyError as error:
            failed.set_result(Outcome(Payload(reference=error), failed=True, seconds=0.0))

        def take(outcome):
            raise WorkerCallError("nothing", "asker:0") from outcome.payload.reference

        calls.watch("driver", "asker:0", failed, take)
        futures.append(failed)
        calls.abandon(failed)
        until(lambda: futures[-1] in calls._abandoned)
    assert [call.future for call in calls._all()] == futures[3:]
    gc.collect()
    assert not any(batch() for batch in batches)


@pytest.mark.parametrize(("seconds", "ends"), [(0.0, False), (3.0, True)])
def test_a_worker_that_waits_for_an_answer_at_the_moment_does_not_stand_still(seconds, ends):
    calls, wait = a_failed_call(), Wait()
    rows = [
        Row("driver", "waiting for an item", 3.0),
        Row("begun:0", "waiting for the driver's answer to registry.register", seconds),
    ]
    calls.check("driver", wait, lambda: rows, still_seconds=1.0)  # in which it is first seen
    with pytest.raises(WorkerCallError) if ends else nullcontext():
        calls.check("driver", wait, lambda: rows, still_seconds=1.0)


def test_a_wait_whose_call_ends_while_it_is_looked_at_is_not_in_vain():
    calls, wait, resting, asked = a_failed_call(), Wait(), Future(), []
    calls.watch("driver", "resting:0", resting, bool)

    def rows():  # which an async method leaves idle
        asked.append(True)
        if len(asked) == 2:
            resting.set_result(Outcome(Payload(), failed=False, seconds=3.0))
        return [Row("driver", "waiting for rest", 3.0), Row("resting:0", "idle", 3.0)]

    for _ in range(3):
        calls.check("driver", wait, rows, still_seconds=1.0)
    assert resting.done()


def test_a_failure_that_another_wait_saw_first_ends_one_that_had_begun():
    calls, long, short = a_failed_call(), Wait(), Wait()
    rows = [Row("driver", "waiting for an item", 3.0)]
    calls.check("driver", short, lambda: rows, still_seconds=1.0)  # which ends then, by itself
    later = Wait()
    for _ in range(3):
        calls.check("driver", later, lambda: rows, still_seconds=1.0)
    calls.check("driver", long, lambda: rows, still_seconds=1.0)
    with pytest.raises(WorkerCallError):
        calls.check("driver", long, lambda: rows, still_seconds=1.0)


def a_failed_call() -> FailedCalls:
    calls, failed = FailedCalls(), Future()
    failed.set_result(Outcome(Payload(), failed=True, seconds=0.0))

    def take(outcome):
        raise WorkerCallError("nothing", "asker:0")

    calls.watch("driver", "asker:0", failed, take)
    return calls


def test_what_comes_after_a_wait_that_was_in_vain_is_for_the_next_one(launch, impatient):
    channel, asker = Channel.create("resumed"), launch(Basic, 1, "asker")
    failing = asker.fail("nothing")
    with pytest.raises(KeyError):
        channel.get()
    with pytest.raises(KeyError):
        failing.wait()
    for item in ("first", "second"):
        channel.put(item)
    assert [channel.get(), channel.get()] == ["first", "second"]
    channel.close()


def test_what_comes_after_an_interrupt_is_for_the_next_wait(cluster, interrupt_soon):
    channel = Channel.create("interrupted")
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        channel.get()
    for item in ("first", "second"):
        channel.put(item)
    assert [channel.get(), channel.get()] == ["first", "second"]
    channel.close()


def test_devices_are_granted_to_nobody_whose_wait_was_interrupted(cluster, interrupt_soon):
    lock = DeviceLock("driver", [0])
    with cluster.reserve_lease("another", [0]):
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        ticket = cluster.reserve_lease("driver", [0])
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            ticket.acquire()
    with cluster.reserve_lease("third", [0]):
        pass


def test_a_message_after_a_wait_that_was_in_vain_is_received(launch, shared):
    group, _ = shared(Talker), launch(Basic, 1, "asker")
    waiting = group.execute_on(0).receive_twice("sharedTalker", 1, "asker")
    answer = group.execute_on(1).echo("sharedTalker", 0)
    ((ended, received),) = waiting.wait()
    assert "asker:0.fail raised KeyError" in ended
    assert received == "now"
    answer.wait()


def test_a_lease_of_a_worker_that_is_gone_is_refused(launch, cluster):
    launch(Basic, 1, "leaver")._close()
    for kind in ("reserve", "lock"):
        with pytest.raises(WorkerDiedError, match="'leaver:0' died"):
            require_process().ask_driver(f"lease.{kind}", "leaver:0", [0])
    with cluster.reserve_lease("next", [0]):
        pass


def test_two_looks_with_nothing_between_are_no_silence(monkeypatch):
    clock = SimpleNamespace(now=100, monotonic=lambda: clock.now)
    monkeypatch.setattr(silent_workers, "time", clock)
    watch = silent_workers.SilentWorkers()

    def look(seconds: int) -> None:
        clock.now = seconds
        watch.check(["a:0"], lambda: [Row("a:0", "not answering")], 1800.0)

    for seconds in (200, 2500, 2540, *range(4200, 6020, 40)):
        look(seconds)
    with pytest.raises(TimeoutError, match=r"'a:0' has not answered for 30\.7 minutes"):
        look(6040)


KILLABLE = """
    import time
    from rlinf.scheduler import Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Basic

    cluster = Cluster(num_nodes=1)
    group = Basic.create_group(1).launch(cluster, NodePlacementStrategy([0]), "driven")
    assert group.add(1).wait() == [(0, 2)]
    print(cluster.runtime.namespace, flush=True)
    time.sleep(100)
"""
VISITOR = """
    from rlinf.scheduler import Cluster
    from rlinf.scheduler.worker_group import WorkerGroup
    from tests.scheduler.workers import Basic

    cluster = Cluster()
    group = WorkerGroup.from_group_name(Basic, "driven")
    assert group.add(2).wait() == [(0, 3)]
"""
AFTER_A_KILL = """
    import os, subprocess, sys
    from rlinf.scheduler.cluster import _prepare_ray

    _prepare_ray()
    import ray
    from rlinf.scheduler.runtime.ray_start import on_loopback

    with on_loopback():
        ray.init(address="local", include_dashboard=False, num_cpus=2, logging_level="WARNING")
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    begin = lambda program: subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    for _ in range(2):
        driver = begin(sys.argv[1])
        assert driver.stdout.readline() == "RLinf\\n"
        assert begin(sys.argv[2]).wait(60) == 0
        driver.kill()
        driver.wait()
    ray.shutdown()
"""


@pytest.mark.slow
def test_a_program_that_was_killed_on_a_ray_that_lives_on_is_in_nobody_s_way():
    words = [textwrap.dedent(program) for program in (AFTER_A_KILL, KILLABLE, VISITOR)]
    script = Warm(["-c", *words])
    _, errors = script.communicate(timeout=200)
    assert script.wait() == 0, errors
