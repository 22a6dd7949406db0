"""Several steps of a flow under way: order, capacity, failures, and what a checkpoint takes."""

from __future__ import annotations

import collections
import threading
import time

import pytest

from rlinf.flow.executor import Executor, Hooks
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, StepAborted
from rlinf.scheduler import Cluster

from .test_executor import launch, plan


class Maker(StageWorker):
    """Yields items that say their step."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def make(self, *, step: int, items: int = 4, fail: bool = False):
        self.made.append(step)
        for number in range(items):
            time.sleep(0.01)
            yield Emit("numbers", number, (step, number))
        if fail:
            raise ValueError("the maker broke")
        return list(self.made)


class User(StageWorker):
    """Takes them."""

    def use(self, numbers, *, pause: float = 0.0, fail: bool = False):
        if fail:
            raise ValueError("the user broke")
        time.sleep(pause)
        found = sorted((item.source, item.payload) for item in numbers)
        yield from ()
        return time.monotonic(), found


@pytest.fixture
def cluster():
    cluster = Cluster(cluster_cfg={"runtime": "local", "num_nodes": 1, "component_placement": {}})
    yield cluster
    cluster.shutdown()


def pipeline(cluster, *, depth, maker=(0,), user=(1,), makers=1, users=1, name=""):
    flow = Flow("line" + name)
    flow.stage("make", Stage("maker", "make", outputs=("numbers",)), ahead=True)
    flow.stage("use", Stage("user", "use", inputs=("numbers",)))
    groups = {
        "maker": launch(cluster, Maker, makers, "maker" + name),
        "user": launch(cluster, User, users, "user" + name),
    }
    plans = plan(maker=(maker, makers, "resident"), user=(user, users, "resident"))
    return Executor(flow, plans, groups, cluster, sources=4, depth=depth)


def given(step, **user):
    return {"maker": {"step": step}, "user": user}


OVERLAPS = [((0,), (0,)), ((0,), (1,)), ((0, 1), (1,)), ((0,), (0, 1)), ((0, 1), (1, 2))]


@pytest.mark.parametrize(("maker", "user"), OVERLAPS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_overlap_deadlocks_and_items_stay_with_their_step(cluster, depth, maker, user):
    executor = pipeline(cluster, depth=depth, maker=maker, user=user, makers=2, users=2)
    started, steps = [], 7
    for done in range(steps):
        while done + len(started) < min(done + depth, steps):
            started.append(executor.start(done + len(started), given(done + len(started))))
        report = started.pop(0).wait()
        for rank, (_, found) in enumerate(report.results("user")):
            assert [payload for _, payload in found] == [
                (done, number) for number in (2 * rank, 2 * rank + 1) for _ in range(2)
            ]
        assert report.results("maker")[0] == list(range(done + 1))


def test_a_step_ahead_is_made_while_the_one_before_is_used(cluster):
    executor = pipeline(cluster, depth=2)
    first, second = (executor.start(step, given(step, pause=1.0)) for step in (0, 1))
    ended = []
    watch = threading.Thread(target=lambda: (second.reports(), ended.append(time.monotonic())))
    watch.start()
    used, _ = first.wait().results("user")[0]
    watch.join(10)
    assert ended[0] < used
    second.wait()


def test_more_steps_than_the_depth_are_refused(cluster):
    executor = pipeline(cluster, depth=1)
    executor.start(0, given(0))
    with pytest.raises(RuntimeError, match="wait for the oldest"):
        executor.start(1, given(1))


def test_who_gives_up_a_lease_late_takes_none_of_another_cluster(cluster):
    late = cluster.reserve_lease("late", (0,))
    cluster.shutdown()
    again = Cluster(cluster_cfg=cluster.config)
    try:
        ticket = again.reserve_lease("own", (0,))
        late.cancel()
        with ticket:
            assert ticket.devices == (0,)
    finally:
        again.shutdown()


def test_hooks_run_between_the_first_nodes_of_two_steps(cluster):
    executor = pipeline(cluster, depth=3)
    seen = []

    def hooks(step):
        def begin():
            seen.append(("begin", step))
            return {"maker": {"items": step}}

        return Hooks(begin, lambda reports: seen.append(("ended", reports["maker"][0].result[-1])))

    steps = [executor.start(step, given(step), hooks(step)) for step in range(3)]
    assert [len(step.wait().results("user")[0][1]) for step in steps] == [0, 1, 2]
    assert seen == [(kind, step) for step in range(3) for kind in ("begin", "ended")]


@pytest.mark.parametrize(("maker", "user"), OVERLAPS)
@pytest.mark.parametrize("who", ["maker", "user"])
def test_a_failure_ends_all_steps_under_way(cluster, maker, user, who):
    executor = pipeline(cluster, depth=3, maker=maker, user=user)
    begun = []
    steps = [
        executor.start(
            step,
            {"maker": {"step": step, "fail": who == "maker" and step == 1},
             "user": {"fail": who == "user"}},
            Hooks(lambda step=step: begun.append(step) or {}),
        )
        for step in range(3)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=f"the {who} broke"):
        collections.deque((step.wait() for step in steps), maxlen=0)
    assert begun == [0, 1, 2], "who waits in a hook of a step that will not come is let go"
    with pytest.raises(ValueError, match=f"the {who} broke"):
        executor.start(3, given(3))
    done = threading.Event()
    ticket = cluster.reserve_lease("someone else", (0, 1, 2))
    threading.Thread(target=lambda: (ticket.acquire(), done.set())).start()
    assert done.wait(10)
    ticket.release()


def test_what_was_made_ahead_is_saved_and_restored(cluster):
    executor = pipeline(cluster, depth=2, users=2)
    first, second = (executor.start(step, given(step)) for step in (0, 1))
    first.wait()
    saved = executor.save(second)
    assert sorted(item.payload for item in saved.items["numbers"]) == [(1, n) for n in range(4)]
    whole = second.wait()
    other = pipeline(cluster, depth=2, users=2, name="again")
    restored = other.restore(saved, {"user": {}}).wait()
    for mine, theirs in zip(whole.results("user"), restored.results("user"), strict=True):
        assert mine[1] == theirs[1]
    assert restored.results("maker") == whole.results("maker")


def test_closing_ends_what_nobody_waits_for(cluster):
    executor = pipeline(cluster, depth=3)
    let_go = []
    hooks = Hooks(lambda: let_go.append(True) or {})
    steps = [executor.start(0, {"maker": {"step": 0, "items": 200}})]
    steps += [executor.start(step, given(step), hooks) for step in (1, 2)]
    executor.close()
    assert all(run.done() for step in steps for run in step.runs.values())
    assert let_go == [True, True]
    with pytest.raises(StepAborted, match="closed"):
        executor.start(3, given(3))
