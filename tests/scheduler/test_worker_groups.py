"""Launching groups, calling their methods, and what comes back."""

import asyncio
import errno
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import pytest

from rlinf.errors import MissingPackageError, UserError
from rlinf.scheduler import (
    Channel,
    Cluster,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Worker,
    WorkerAddress,
)
from rlinf.scheduler.cluster_config import NodeGroupEnvConfig
from rlinf.scheduler.errors import NameTakenError, WaitTimeout, WorkerCallError, WorkerDiedError
from rlinf.scheduler.node import NodeGroupInfo
from rlinf.scheduler.process import require_process
from rlinf.scheduler.runtime.attach import show_log
from rlinf.scheduler.worker import WorkerGroup
from tests.scheduler.workers import (
    Adopted,
    Basic,
    Clash,
    Concurrent,
    Counting,
    Early,
    FailingStart,
    Late,
    Looping,
    Named,
    Namesake,
    Oddity,
    Queuer,
    Sentence,
    WithoutBase,
    put_from_forked_child,
)


class Held:
    """Something large that a worker has."""


def test_results_come_in_order_of_ranks(shared):
    group = shared(Basic)
    assert group.add(5).wait() == [(0, 5), (1, 5), (2, 5)]
    assert group.execute_on(2, 0).add(value=1).wait() == [(2, 1), (0, 1)]
    assert group.add().wait() == [(0, 0), (1, 0), (2, 0)]
    assert group.fixed().wait() == ["static"] * 3


def test_done_is_false_until_the_call_is(shared):
    group = shared(Basic)
    group.add().wait()
    call = group.execute_on(0).sleep(0.3)
    assert not call.done()
    assert call.wait() == [0]
    assert call.done()
    assert call.wait() == [0]


def test_a_wait_may_have_a_timeout_and_be_made_again(shared, tmp_path):
    group, file = shared(Basic), tmp_path / "made"
    call = group.wait_for_file(file)
    said = r"(?s)wait_for_file of .* took longer than .* it goes on.*wait_for_file"
    with pytest.raises(WaitTimeout, match=said):
        call.wait(timeout=0.05)
    with pytest.raises(TimeoutError, match="wait_for_file of"):
        asyncio.run(call.async_wait(timeout=0.05))
    file.touch()
    assert call.wait(timeout=100) == [0, 1, 2]
    with pytest.raises(ValueError, match="this rank fails"):
        group.fail_on(1).wait(timeout=100)


def test_async_wait(shared):
    group = shared(Basic)
    assert asyncio.run(group.add(1).async_wait()) == [(0, 1), (1, 1), (2, 1)]
    with pytest.raises(ValueError, match="this rank fails"):
        asyncio.run(group.fail_on(1).async_wait())


def test_bad_rank_is_refused_and_forgotten(shared):
    group = shared(Basic)
    with pytest.raises(AssertionError, match=r"Invalid rank\(s\) specified\."):
        group.execute_on(5)
    assert len(group.add().wait()) == 3


def test_ranks_are_of_the_next_call_of_their_thread(shared):
    group = shared(Basic)

    def elsewhere(call):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: call(1).wait()).result()

    group.execute_on(2)
    assert len(elsewhere(lambda value: group.add(value=value))) == 3
    assert group.add(1).wait() == [(2, 1)]
    assert elsewhere(group.execute_on(1).add) == [(1, 1)]
    assert len(group.add(1).wait()) == 3


@pytest.mark.parametrize("rank", ["0", [0], None, 0.0])
def test_what_is_no_rank_is_refused(shared, rank):
    with pytest.raises(AssertionError, match="Invalid rank"):
        shared(Basic).execute_on(rank)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"placement_strategy": PackedPlacementStrategy}, "placement_strategy is a strategy"),
        ({"placement_strategy": "0-1"}, "placement_strategy is a strategy"),
        ({"max_concurrency": -1}, "legal: 1"),
        ({"max_concurrency": "4"}, "legal: 1"),
        ({"name": 5}, "name of a worker group is text"),
        ({"cluster": None}, r"Cluster\(num_nodes=1\), got None"),
    ],
)
def test_a_group_that_cannot_be_launched(cluster, given, message):
    with pytest.raises(UserError, match=message):
        Basic.create_group().launch(**{"cluster": cluster, **given})


def test_a_class_that_leaves_out_the_base(launch):
    group = launch(WithoutBase, 1, "baseless")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"WithoutBase.__init__ does not call super"):
            group.hello().wait()


def test_names_that_a_group_cannot_call(launch, shared):
    group = shared(Basic)
    with pytest.raises(ValueError, match="is hidden"):
        group._hidden()
    with pytest.raises(ValueError, match="execute_on"):
        launch(Clash, 1, "clash")
    with pytest.raises(AttributeError, match="no method 'missing'"):
        group.missing()


def test_methods_that_are_no_plain_functions(shared):
    group = shared(Basic)
    assert [value for _, value in group.add_seven().wait()] == [7] * 3
    assert group.cached(1).wait() == [2] * 3
    assert group.world_size().wait() == [3] * 3


def test_a_name_is_taken_until_the_group_is_closed(launch):
    first = launch(Basic, 1, "taken")
    first.add().wait()
    with pytest.raises(NameTakenError, match="taken"):
        launch(Basic, 1, "taken")
    first._close()
    assert launch(Basic, 1, "taken", 4).add().wait() == [(0, 4)]


def test_default_name_and_placement(cluster):
    group = Basic.create_group().launch(cluster)
    try:
        assert group.worker_group_name == "worker_group_Basic"
        assert group.worker_cls_name == "Basic"
        rows = group.describe().wait()
        assert [row["devices"] for row in rows] == [[0], [1]]
        assert [row["accelerator"] for row in rows] == [0, 1]
    finally:
        group._close()


def test_what_a_worker_knows_of_itself(launch):
    group = launch(Basic, 2, "self", placement_strategy=PackedPlacementStrategy(0, 1))
    for rank, row in enumerate(group.describe().wait()):
        assert row["rank"] == rank
        assert row["world_size"] == 2
        assert row["name"] == f"self:{rank}" == row["address"].get_name()
        assert row["info"].group_world_size == 2
        assert row["info"].available_accelerators == [rank]
        assert row["current"]
        assert row["platform"] == (None, None)
        assert row["class"] == "Basic"
        assert len(row["cores"]) >= 1
    assert Worker.current_worker is None


def test_a_worker_computes_with_its_own_cores_whoever_starts_later(launch, cluster, runtime):
    if runtime == "ray":
        pytest.skip("each has a process of its own")
    one = launch(Basic, 2, "one", placement_strategy=PackedPlacementStrategy(0, 1))
    both = launch(Basic, 1, "both", placement_strategy=FlexiblePlacementStrategy([[0, 1]]))
    for threads, cores in both.compute_threads().wait() + one.compute_threads().wait():
        assert threads == cores


def test_members_can_be_called_alone(shared, runtime):
    group = shared(Basic)
    member = group.worker_info_list[1]
    assert member.rank == 1
    answer = member.worker.add.remote(3)
    if runtime == "ray":
        import ray

        assert ray.get(answer) == (1, 3)
    else:
        assert answer.result() == (1, 3)


def test_attach_by_name(shared, cluster):
    shared(Basic)
    assert WorkerGroup.from_group_name(Basic, "sharedBasic").add().wait() == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    with pytest.raises(ValueError, match="no running worker group"):
        WorkerGroup.from_group_name(Basic, "unknown")


def test_a_worker_is_not_built_directly(cluster):
    with pytest.raises(RuntimeError, match="You may have mistakenly initialized the Worker class"):
        Basic()


def test_exceptions_keep_their_type(shared):
    group = shared(Basic)
    with pytest.raises(Oddity) as caught:
        group.execute_on(0).fail("oddity").wait()
    assert isinstance(caught.value, WorkerCallError)
    assert caught.value.code == 7
    assert isinstance(caught.value.__cause__, Oddity)
    assert "raise Oddity" in str(caught.value)
    assert caught.value.worker_name == "sharedBasic:0"
    with pytest.raises(KeyError):
        group.execute_on(0).fail("nothing").wait()
    with pytest.raises(MissingPackageError, match="a test needs the package 'nothing'"):
        group.execute_on(0).fail("package").wait()
    with pytest.raises(Sentence, match=r"raised .*Sentence: 3: so be it") as caught:
        group.execute_on(0).fail("sentence").wait()
    assert caught.value.code == 3
    with pytest.raises(RuntimeError, match="held"):
        group.execute_on(0).fail("unpicklable").wait()
    with pytest.raises(ValueError, match="raised ValueError: this one"):
        group.execute_on(0).fail("noted").wait()
    assert group.execute_on(0).add(1).wait() == [(0, 1)]


def test_exceptions_keep_their_type_through_a_worker_between(shared, launch):
    shared(Basic)
    between = launch(Basic, 1, "between")
    with pytest.raises(KeyError) as caught:
        between.fail_through("sharedBasic", "nothing").wait()
    assert caught.value.worker_name == "between:0"
    inner = "WorkerCallError: sharedBasic:0.fail raised KeyError: 'nothing'"
    assert f"between:0.fail_through raised {inner}" in str(caught.value)


def test_an_error_of_a_file_says_which(shared):
    with pytest.raises(FileNotFoundError) as caught:
        shared(Basic).execute_on(0).fail("file").wait()
    found = caught.value
    assert (found.errno, found.strerror) == (errno.ENOENT, "not there")
    assert (found.filename, found.filename2) == ("/from/here", "/to/there")


def test_exit_in_a_method_is_an_error_of_the_call(shared):
    group = shared(Basic)
    with pytest.raises(RuntimeError, match=r"sys\.exit\(3\)"):
        group.execute_on(0).fail("exit").wait()
    assert group.execute_on(0).add(1).wait() == [(0, 1)]


def test_the_first_failure_is_raised_at_once(shared):
    group = shared(Basic)
    group.add().wait()
    with pytest.raises(ValueError, match="this rank fails"):
        group.fail_on(1).wait()


def test_failing_start_is_raised_by_every_call(launch):
    group = launch(FailingStart, 1, "unborn")
    with pytest.raises(Oddity) as caught:
        group.hello().wait()
    assert caught.value.code == 5


def test_async_methods_interleave(shared):
    group = shared(Concurrent)
    waiting = group.execute_on(0).wait_open()
    assert group.execute_on(0).open().wait() == ["done"]
    assert waiting.wait() == ["opened"]


def test_a_thread_of_an_async_method_is_the_workers(shared):
    assert shared(Concurrent).who_is_at_work().wait() == [True] * 3


def test_classes_of_the_program_itself_stay_the_same_class(launch, cluster):
    @dataclass
    class Item:
        number: int

    class Colour(Enum):
        RED = 1

    class Maker(Worker):
        def check(self, item, colour):
            return type(item) is Item, colour is Colour.RED

        def make(self, channel):
            channel.put(Item(2), key=Colour.RED)
            return Item(1)

    channel = Channel.create("own classes")
    group = launch(Maker, 1, "maker")
    assert group.check(Item(1), Colour.RED).wait() == [(True, True)]
    assert group.make(channel).wait() == [Item(1)]
    assert channel.get(key=Colour.RED) == Item(2)


def test_a_worker_may_have_private_names_of_its_own(launch):
    group = launch(Namesake, 1, "namesake")
    call = group.talk_to_itself("self")
    assert call.wait() == ["self"]
    assert call.consume_durations()["talk"] > 0


def test_several_calls_at_a_time(launch):
    group = launch(Basic, 1, "threads", max_concurrency=2)
    group.add().wait()
    long = group.sleep(0.5)
    assert group.add(2).wait() == [(0, 2)]
    assert not long.done()
    long.wait()


@pytest.mark.parametrize("most", [None, 2])
def test_a_plain_method_may_run_a_private_coroutine(launch, most):
    group = launch(Looping, 1, "looping", max_concurrency=most)
    assert group.run_later().wait() == ["looping:0"]


def test_the_most_calls_at_a_time_may_be_any_number(launch):
    group = launch(Basic, 1, "many", max_concurrency=1000)
    assert [call.wait() for call in [group.add(number) for number in range(9)]] == [
        [(0, number)] for number in range(9)
    ]
    assert launch(Basic, 1, "usual", max_concurrency=0).add(1).wait() == [(0, 1)]


def test_a_worker_knows_which_one_it_is_before_its_base_is_built(launch):
    results = launch(Early, 2, "early").early().wait()
    assert [early[:4] for early, _ in results] == [
        [rank, 2, "early", f"early:{rank}"] for rank in range(2)
    ]
    assert all(early == later for early, later in results)


def test_a_launched_worker_that_is_given_a_parent_is_refused(launch):
    group = launch(Adopted, 1, "adopted", WorkerAddress("other", 0))
    with pytest.raises(UserError, match=r"'adopted:0' was launched .* \(got 'other:0'\)"):
        group.hello().wait()


def test_each_worker_has_arguments_of_its_own(launch):
    config, ranks = {"seed": 0}, []
    group = launch(Counting, 3, "counting", config)
    assert group.own_seed().wait() == [1, 2, 3]
    assert group.append_rank(ranks).wait() == [[0], [1], [2]]
    assert (config, ranks) == ({"seed": 0}, [])


def test_what_a_closed_worker_held_goes(launch, runtime):
    if runtime == "ray":
        pytest.skip("it went with the process")
    held = Held()
    gone = weakref.ref(held)
    group = launch(Basic, 1, "holder", held)
    del held
    group.process_id().wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "holder:0"]
    group._close()
    group._arguments = ((), {})
    thread.join(30)
    gc.collect()
    assert gone() is None


def test_what_a_closed_group_returned_is_kept_while_somebody_may_take_it(launch, monkeypatch):
    failed, discarded = require_process().failed_calls, []
    monkeypatch.setattr(failed, "_discard", discarded.append)
    group = launch(Queuer, 1, "giver")
    held, let_go = group.give_large(30_000), group.give_large(30_000)
    while not (held.done() and let_go.done()):
        time.sleep(0.01)
    group._close()
    assert discarded == []
    assert held.wait()[0].numel() == 30_000
    del let_go
    assert len(discarded) == 1
    assert "giver:0" not in {call.worker for call in failed._all()}


def test_durations(shared):
    group, failed = shared(Basic), require_process().failed_calls
    group.pop_execution_times().wait()
    assert group.timed().consume_duration() >= 0.01
    watched = len(failed._all())
    assert group.add().consume_duration("mean") >= 0.0
    assert len(failed._all()) == watched  # none failed for want of a timer
    durations, per_rank = group.work().consume_durations(return_per_rank=True)
    assert set(durations) == {"work", "inner"}
    assert durations["work"] >= durations["inner"] >= 0.01
    assert [row["inner"] >= 0.01 for row in per_rank] == [True, True, True]
    assert group.pop_execution_times().wait() == [{}, {}, {}]
    assert group.add().consume_durations(return_per_rank=True) == ({}, [{}, {}, {}])  # no timer
    with pytest.raises(ValueError, match="no duration was recorded for tag 'nothing'"):
        group.pop_execution_time("nothing").wait()


def test_ports_differ(shared):
    group = shared(Basic)
    ports = group.port().wait() + group.port().wait()
    assert len(set(ports)) == 6
    limited = group.port(30_000).wait() + group.port(30_000).wait()
    assert len(set(limited)) == 6
    assert max(limited) <= 30_000


def test_alive(shared):
    group = shared(Basic)
    assert group.alive("sharedBasic:0").wait() == [True] * 3
    assert group.alive("nobody:0").wait() == [False] * 3
    assert Worker.check_worker_alive("sharedBasic:0")
    assert not Worker.check_worker_alive("nobody:0")


def test_process_environment(launch, runtime):
    if runtime == "local":
        pytest.skip("threads share one environment")
    group = launch(Basic, 2, "env", placement_strategy=PackedPlacementStrategy(0, 1))
    names = (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "NODE_RANK", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE", "CLUSTER_NODE_RANK",
        "LOCAL_ACCELERATOR_RANK", "LOCAL_HARDWARE_RANKS", "NODE_GROUP_LABEL", "VISIBLE_DEVICES",
        "ISOLATE_ACCELERATOR", "ACCELERATOR_TYPE", "GROUP_NAME", "WORKER_NAME",
        "CLUSTER_NAMESPACE", "CATCH_SYSTEM_FAILURE",
    )  # fmt: skip
    first, second = group.environment(*names).wait()
    assert all(value is not None for value in first.values())
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert (second["LOCAL_RANK"], second["NODE_LOCAL_RANK"]) == ("0", "1")
    assert second["VISIBLE_DEVICES"] == second["LOCAL_HARDWARE_RANKS"] == "1"
    assert second["WORKER_NAME"] == "env:1"
    assert second["CATCH_SYSTEM_FAILURE"] == "0"
    catching = launch(Basic, 1, "catching", catch_system_failure=True)
    assert catching.environment("CATCH_SYSTEM_FAILURE").wait() == [{"CATCH_SYSTEM_FAILURE": "1"}]
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (
        second["MASTER_ADDR"],
        second["MASTER_PORT"],
    )


def test_configured_paths_are_put_before_those_of_the_node(cluster, launch, monkeypatch):
    monkeypatch.setenv("CPATH", "/of/the/driver")
    (node,) = cluster.nodes
    monkeypatch.setitem(node.default_env_vars, "CPATH", "/of/the/node")
    variables = [{"CPATH": "/configured"}, {"PKG_CONFIG_PATH": "/configured"}]
    configured = NodeGroupEnvConfig(node_ranks=[0], env_vars=variables)
    told = NodeGroupInfo("told", [node], ignore_hardware=True, env_configs=[configured])
    monkeypatch.setitem(cluster.node_groups, "told", told)
    launch(Basic, 1, "told", placement_strategy=NodePlacementStrategy([0], "told"))
    environment = require_process().ask_driver("registry.launch", "told:0").environment
    assert environment["CPATH"] == "/configured:/of/the/node"
    assert environment["PKG_CONFIG_PATH"] == "/configured"


def test_a_worker_without_tensors_starts_without_torch(launch, runtime):
    """It takes more than a second; counting devices, it would count those of the whole node."""
    if runtime == "local":
        pytest.skip("threads share what is imported")
    group = launch(Basic, 1, "light")
    assert group.has_imported("rlinf.scheduler").wait() == [True]
    assert group.has_imported("torch").wait() == [False]


def test_a_worker_of_the_main_program_has_torch_where_that_has(launch):
    class OfMain(Basic):
        __module__ = "__main__"

    importlib.import_module("torch")
    assert launch(OfMain, 1, "of main").has_imported("torch").wait() == [True]


CHILD = """
import sys, time
from rlinf.scheduler import Worker, WorkerAddress

class Child(Worker):
    def __init__(self, parent):
        super().__init__(parent_address=parent, world_size=2, rank=1)

parent = WorkerAddress.from_name(sys.argv[1])
child = Child(parent)
child.send(child.get_name(), parent.root_group_name, parent.rank)
if len(sys.argv) > 2:
    child.device_lock.acquire()
    child.connect_channel("of its child").get(async_op=True)
    child.recv(parent.root_group_name, parent.rank)
print(child.get_parent_rank(), child._world_size)
"""


def test_a_process_that_a_worker_starts_becomes_a_worker(shared, runtime):
    if runtime == "local":
        pytest.skip("workers of the local runtime are no processes")
    group = shared(Basic)
    printed = group.execute_on(2).start_child(CHILD).wait()
    assert printed == ["2 2\n"]
    assert group.execute_on(2).from_child().wait() == ["sharedBasic:2:1"]
    while group.execute_on(0).alive("sharedBasic:2:1").wait() == [True]:  # its end is not known
        time.sleep(0.1)
    assert "sharedBasic:2:1: not answering" not in require_process().who_waits()


@pytest.mark.parametrize("by", ["worker", "driver"])
def test_a_forked_child_speaks_for_itself_or_not_at_all(shared, runtime, by):
    if runtime == "local":
        pytest.skip("what is forked from the local runtime reaches nobody")
    group, channel = shared(Basic), Channel.create(f"of a child of the {by}")
    if by == "worker":
        (heard,) = group.execute_on(0).fork(channel).wait()
    else:
        heard = put_from_forked_child(channel, "sharedBasic")
    assert heard[0] == "from a child"
    assert "cannot speak in its parent's name: call Cluster() in it first" in heard[1]
    assert "cannot launch groups or call their methods" in heard[2]
    assert heard[3] == "its exit code is 0"
    channel.put("still there")
    assert (channel.get(), channel.qsize()) == ("still there", 0)
    channel.close()


def test_what_a_child_held_is_free_after_its_end(launch, runtime):
    if runtime == "local":
        pytest.skip("workers of the local runtime are no processes")
    on_device = PackedPlacementStrategy(0, 0)
    group = launch(Basic, 1, "parent", placement_strategy=on_device)
    channel = Channel.create("of its child")
    for _ in range(2):  # of one name, one after the other
        assert group.with_child(CHILD).wait() == ["2 2\n".replace("2", "0", 1)]
        assert group.locked().wait() == ["locked"]
    channel.put("for others")
    assert channel.get() == "for others"
    channel.close()


def test_a_worker_that_is_up_after_its_group_was_closed_is_nobody(launch, runtime):
    group = launch(Basic, 1, "brief")
    assert group.add(1).wait() == [(0, 1)]
    ask = require_process().ask_driver
    record, early = ask("registry.group", "brief"), ask("registry.launch", "brief:0")
    group._close()
    register = partial(ask, "registry.register", "brief:0", "0|/nowhere/1.0|", early.info)
    with pytest.raises(WorkerDiedError, match="'brief:0' is up after its group was closed"):
        register(record.incarnation)
    later = launch(Basic, 1, "brief")
    assert later.add(2).wait() == [(0, 2)]
    with pytest.raises(WorkerDiedError, match="'brief:0' is up after its group was closed"):
        register(record.incarnation)
    assert later.add(3).wait() == [(0, 3)]
    assert "brief:0: not answering" not in require_process().who_waits()


LOGGED = """
import logging
from rlinf.scheduler import Cluster, Worker
Cluster(cluster_cfg={"runtime": "local"})
Worker.logger.info("on the driver")
logging.basicConfig(format="own: %(message)s")
Worker.logger.info("by the program")
"""


def test_the_log_is_shown_on_the_driver():
    environment = {**os.environ, "RLINF_LOG_LEVEL": "info"}
    done = subprocess.run(
        [sys.executable, "-c", LOGGED], env=environment, capture_output=True, text=True, check=True
    )
    first, second = done.stderr.splitlines()
    assert first.endswith(" INFO on the driver")
    assert second == "own: by the program"


def logged(path: Path, text: str, times: int = 1) -> str:
    """What a file holds once a text is so often in it: it is written by other processes."""
    limit, found = time.monotonic() + 60, ""
    while found.count(text) < times and time.monotonic() < limit:
        time.sleep(0.05)
        found = path.read_text() if path.exists() else ""
    assert found.count(text) == times
    return found


def test_a_log_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("RLINF_LOG_LEVEL", "warn_ing")
    with pytest.raises(UserError, match=r"RLINF_LOG_LEVEL is WARN_ING, .* did you mean `WARNING`"):
        show_log()


def test_log_files_of_workers(launch, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "distributed_log_dir", str(tmp_path))
    launched = launch(Basic, 2, "logging")
    launched.log_something().wait()
    files = [tmp_path / f"logging/rank_{rank}.log" for rank in range(2)]
    for rank, file in enumerate(files):
        assert f"logging:{rank}" in logged(file, "something happened")
    launched._close()
    launch(Basic, 1, "logging").log_something().wait()  # one that has the name of another
    logged(files[0], "something happened", times=2)


def test_what_a_worker_prints_is_in_its_log_file(launch, cluster, runtime, tmp_path, monkeypatch):
    if runtime == "local":
        pytest.skip("threads have one standard output")
    monkeypatch.setattr(cluster, "distributed_log_dir", str(tmp_path))
    with pytest.raises(WorkerDiedError):
        launch(Basic, 1, "printing").print_something().wait()
    # Without the ends of lines, behind which those of the other stream may come first.
    for told in ("printing:0 prints", "printing:0 warns", "0 lets print", "last words"):
        logged(tmp_path / "printing/rank_0.log", told)


def test_one_cluster_per_process(cluster):
    assert Cluster(num_nodes=1) is cluster
    assert Cluster() is cluster
    assert Cluster.has_initialized()


def test_a_worker_sees_the_cluster(launch):
    class Looker(Worker):
        def look(self):
            inner = Cluster()
            return inner.num_nodes, inner.num_accelerators

        def launch_more(self):
            group = Basic.create_group(3).launch(Cluster(), name="inner")
            result = group.add(1).wait()
            group._close()
            return result

    group = launch(Looker, 1, "looking")
    assert group.look().wait() == [(1, 2)]
    assert group.launch_more().wait() == [[(0, 4), (1, 4)]]


def test_arguments_may_have_any_name(shared):
    group = shared(Named)
    told = group.execute_on(1).told(method="grpo", name="a", func=3)
    assert told.wait() == [("grpo", "a", 3)]


def test_what_ended_before_it_is_asked_is_done(shared):
    group = shared(Named)
    group.nap(0.0).wait()
    calls = [group.execute_on(rank).nap(0.0) for rank in range(2)]
    time.sleep(1.0)
    assert [call.done() for call in calls] == [True, True]


ATTACHED = """
from rlinf.scheduler import Channel, Cluster
Cluster()
print(Channel.connect("of the driver", None).get())
"""


def test_a_process_of_the_driver_attaches_to_its_cluster(cluster, runtime):
    if runtime == "local":
        pytest.skip("one process is all of it")
    Channel.create("of the driver").put("an item")
    done = subprocess.run(
        [sys.executable, "-c", ATTACHED], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "an item\n", done.stderr


def test_what_runs_workers_reads_no_configurations():
    code = "import sys, rlinf.scheduler.worker, rlinf.scheduler.runtime.ray_actors\n"
    code += "assert not {'pydantic', 'omegaconf'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_handle_of_a_closed_group_closes_no_later_one_of_its_name(launch):
    first = launch(Basic, 1, "once")
    other = WorkerGroup.from_group_name(Basic, "once")
    first._close()
    later = launch(Basic, 1, "once")
    assert later.add(1).wait() == [(0, 1)]
    for closed in (first, other):
        closed._close()
    assert later.execute_on(0).alive("once:0").wait() == [True]


class Unwilling:
    """Cannot be sent."""

    def __reduce__(self):
        raise TypeError("it will not go")


def test_a_launch_that_fails_leaves_the_name_free(launch, runtime):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    with pytest.raises(UserError, match="it will not go"):
        launch(Basic, 1, "second try", Unwilling())
    assert launch(Basic, 1, "second try").add(1).wait() == [(0, 1)]


def test_the_name_of_a_group_whose_workers_have_all_died_is_free(launch, runtime):
    if runtime == "local":
        pytest.skip("workers of the local runtime are no processes")
    group = launch(Basic, 1, "extinct")
    (pid,) = group.process_id().wait()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.add().wait()
    later = launch(Basic, 1, "extinct")
    assert later.add(1).wait() == [(0, 1)]
    group._close()
    assert later.add(2).wait() == [(0, 2)]


def test_what_a_closed_worker_still_computes_reaches_nobody(launch, runtime, tmp_path):
    if runtime == "ray":
        pytest.skip("a process ends with its worker")
    channel, path = Channel.create("of the living"), tmp_path / "go"
    group = launch(Late, 1, "late")
    call = group.put_late(channel, path)
    while not path.with_suffix(".begun").exists():
        time.sleep(0.01)
    group._close()
    later = launch(Late, 1, "late")
    assert later.rank().wait() == [0]
    path.touch()
    while not path.with_suffix(".refused").exists():
        time.sleep(0.01)
    assert "'late:0' died" in path.with_suffix(".refused").read_text()
    assert channel.empty()
    with pytest.raises(WorkerDiedError):
        call.wait()
    channel.close()


def test_ray_keeps_nothing_of_the_calls_that_have_ended(shared, runtime):
    if runtime == "local":
        pytest.skip("there is no Ray")
    import ray

    shared(Basic).add(1).wait()
    assert not ray.timeline()
