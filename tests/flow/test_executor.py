"""The executor streams, leases and ends cleanly, on both runtimes' common ground."""

from __future__ import annotations

import threading
import time

import pytest

from rlinf.flow.executor import Executor, StepReport
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.flow.stage_worker import StageReport, StageWorker
from rlinf.flow.stream import Emit
from rlinf.scheduler import Cluster, NodePlacementStrategy


class Producer(StageWorker):
    """Yields numbered items, one per source and turn."""

    def produce(self, *, items: int, sources: int, fail_at: int | None = None, pause: float = 0.0):
        for number in range(items):
            time.sleep(pause)
            if number == fail_at:
                raise ValueError("the simulator caught fire")
            yield Emit("numbers", number % sources, (self._rank, number, time.monotonic()))
        return items


class Consumer(StageWorker):
    """Collects what it receives, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def onload(self) -> None:
        self.calls.append("onload")

    def offload(self) -> None:
        self.calls.append("offload")

    def consume(self, numbers):
        received = [(item.source, item.payload) for item in numbers]
        yield from ()
        return self._rank, time.monotonic(), received, list(self.calls)


class Ping(StageWorker):
    """One side of a loop: sends, and waits for the answer."""

    def play(self, answers, *, rounds: int):
        yield Emit("questions", 0, 1)
        for turn in range(rounds):
            value = next(answers).payload
            if turn + 1 < rounds:
                yield Emit("questions", 0, value)
        yield Emit("total", 0, value)

    def collect(self, total):
        values = [item.payload for item in total]
        yield from ()
        return values


class Doubler(StageWorker):
    """The other side."""

    def answer(self, questions):
        for item in questions:
            yield Emit("answers", item.source, item.payload * 2)


@pytest.fixture
def cluster():
    cluster = Cluster(cluster_cfg={"runtime": "local", "num_nodes": 1, "component_placement": {}})
    yield cluster
    cluster.shutdown()


def launch(cluster, worker, processes, name):
    placement = NodePlacementStrategy([0] * processes)
    return worker.create_group().launch(cluster, placement_strategy=placement, name=name)


def plan(**components):
    return Plan(
        components={
            name: ComponentPlan(devices=devices, processes=processes, residency=residency)
            for name, (devices, processes, residency) in components.items()
        }
    )


def line(cluster, *, producer=(0,), consumer=(1,), producers=1, consumers=1, residency="resident",
         replicated=(), sources=1):  # fmt: skip
    """Producer to consumer; returns the executor."""
    flow = Flow("line")
    flow.stage("make", Stage("producer", "produce", outputs=("numbers",)))
    flow.stage("use", Stage("consumer", "consume", inputs=("numbers",), replicated=replicated))
    groups = {
        "producer": launch(cluster, Producer, producers, "producer"),
        "consumer": launch(cluster, Consumer, consumers, "consumer"),
    }
    return Executor(
        flow,
        plan(producer=(producer, producers, "resident"), consumer=(consumer, consumers, residency)),
        groups,
        cluster,
        sources=sources,
        timeline=True,
    )


def arguments(**options):
    return {"producer": {"sources": 1, **options}}


def test_disjoint_devices_stream_and_shared_devices_take_turns(cluster):
    """With a device each, the consumer starts before the producer has ended."""
    executor = line(cluster)
    report = executor.run(0, arguments(items=3, pause=0.5))
    begins = {e["name"]: e["begin_ns"] for e in report.events}
    ends = {e["name"]: e["end_ns"] for e in report.events}
    assert begins["use.consume"] < ends["make.produce"]


def test_a_shared_device_is_leased_in_topological_order(cluster):
    report = line(cluster, consumer=(0,)).run(0, arguments(items=3))
    begins = {e["name"]: e["begin_ns"] for e in report.events}
    ends = {e["name"]: e["end_ns"] for e in report.events}
    assert begins["use.consume"] >= ends["make.produce"]
    assert [payload[1] for _, payload in report.results("consumer")[0][2]] == [0, 1, 2]


def test_items_are_sharded_by_source_and_keep_their_order(cluster):
    executor = line(cluster, consumers=2, sources=4)
    report = executor.run(0, {"producer": {"items": 8, "sources": 4}})
    for rank, _, received, _ in report.results("consumer"):
        assert {source for source, _ in received} == {2 * rank, 2 * rank + 1}
        for source in (2 * rank, 2 * rank + 1):
            numbers = [payload[1] for s, payload in received if s == source]
            assert numbers == sorted(numbers)
            assert len(numbers) == 2


def test_a_replicated_edge_reaches_every_worker_from_every_producer(cluster):
    executor = line(cluster, producers=2, consumers=2, replicated=("numbers",))
    report = executor.run(0, arguments(items=3))
    for _, _, received, _ in report.results("consumer"):
        assert sorted((p[0], p[1]) for _, p in received) == [
            (r, n) for r in (0, 1) for n in range(3)
        ]


def test_steps_follow_each_other_and_leave_nothing_behind(cluster):
    executor = line(cluster)
    for step in range(3):
        received = executor.run(step, arguments(items=step)).results("consumer")[0][2]
        assert len(received) == step


def test_a_loop_runs_as_one_node(cluster):
    flow = Flow("loop")
    flow.loop(
        "talk",
        Stage("ping", "play", inputs=("answers",), outputs=("questions", "total")),
        Stage("doubler", "answer", inputs=("questions",), outputs=("answers",)),
    )
    flow.stage("end", Stage("collector", "collect", inputs=("total",)))
    groups = {
        "ping": launch(cluster, Ping, 1, "ping"),
        "doubler": launch(cluster, Doubler, 1, "doubler"),
        "collector": launch(cluster, Ping, 1, "collector"),
    }
    everywhere = dict.fromkeys(groups, ((0,), 1, "resident"))
    executor = Executor(flow, plan(**everywhere), groups, cluster, sources=1)
    assert executor.run(0, {"ping": {"rounds": 5}}).results("collector") == [[32]]


def test_offloaded_components_are_loaded_around_their_stage(cluster):
    executor = line(cluster, residency="offload")
    executor.run(0, arguments(items=1))
    calls = executor.run(1, arguments(items=1)).results("consumer")[0][3]
    assert calls == ["onload", "offload", "onload"]


@pytest.mark.parametrize("consumer", [(0,), (1,)])
def test_the_first_failure_is_raised_and_nobody_waits(cluster, consumer):
    executor = line(cluster, consumer=consumer)
    with pytest.raises(ValueError, match="caught fire"):
        executor.run(0, arguments(items=3, fail_at=1))


def test_leases_are_free_after_a_failure(cluster):
    executor = line(cluster, consumer=(0,))
    with pytest.raises(ValueError, match="caught fire"):
        executor.run(0, arguments(items=3, fail_at=1))
    done = threading.Event()
    ticket = cluster.reserve_lease("someone else", (0, 1))
    threading.Thread(target=lambda: (ticket.acquire(), done.set())).start()
    assert done.wait(10)
    ticket.release()


def test_a_stage_took_as_long_as_its_slowest_worker_was_at_work():
    workers = [StageReport(None, *times, 0, 0, []) for times in ((5.0, 1.0), (9.0, 7.0))]
    assert StepReport({"actor": workers}, []).seconds("actor") == 4.0


def test_reports_say_what_a_stage_took(cluster):
    report = line(cluster).run(0, arguments(items=4))
    assert report.stages["producer"][0].items_out == 4
    assert report.stages["consumer"][0].items_in == 4
    assert 0 <= report.seconds("consumer") <= report.stages["consumer"][0].seconds
    assert {"lease", "stage", "transfer"} <= {event["cat"] for event in report.events}
