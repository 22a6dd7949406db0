"""A trace of several processes and threads opens in Perfetto, also after a kill."""

import json
import multiprocessing
import pickle
import threading
import time

import pytest

from rlinf.monitor.timeline import Timeline, TimelineFile, read_timeline


def complete(path):
    return [event for event in read_timeline(path) if event["ph"] == "X"]


def names(path, kind):
    return [e["args"]["name"] for e in read_timeline(path) if e["name"] == kind]


def test_a_span_is_written_with_its_names_and_times(tmp_path):
    timeline = Timeline(process="node 0", thread="env:0")
    before = time.time_ns()
    with timeline.span("env.interact", category="stage", step=3):
        time.sleep(0.001)
    after = time.time_ns()
    with TimelineFile(tmp_path / "t" / "timeline.json") as file:
        file.write(timeline.drain())
    [event] = complete(file.path)
    assert (event["name"], event["cat"], event["args"]) == ("env.interact", "stage", {"step": 3})
    assert before / 1000 <= event["ts"]
    assert event["ts"] + event["dur"] <= after / 1000 + 1
    assert event["dur"] >= 1000
    assert names(file.path, "process_name") == ["node 0"]
    assert names(file.path, "thread_name") == ["env:0"]
    assert timeline.drain() == []


def test_times_are_exact(tmp_path):
    timeline = Timeline(process="p", thread="t")
    begin = 1_800_000_000_000_000_123
    timeline.record("transfer", begin, begin + 2_500, category="transfer", bytes=64)
    timeline.record("clock went back", begin, begin - 5)
    with TimelineFile(tmp_path / "t.json") as file:
        file.write(timeline.drain())
    first, second = complete(file.path)
    assert first["dur"] == 2.5
    assert second["dur"] == 0
    assert first["ts"] == pytest.approx(begin / 1000, abs=0.5)


def test_a_failed_span_is_marked_and_raises_on():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("lease"):
        raise KeyError
    [event] = timeline.drain()
    assert event["args"] == {"failed": "KeyError"}


def test_switched_off_it_records_nothing_and_makes_no_file(tmp_path):
    timeline = Timeline(enabled=False)
    with timeline.span("a", category="b", c=1):
        timeline.record("x", 0, 1)
    assert timeline.drain() == []
    assert timeline.span("a") is timeline.span("b")
    with TimelineFile(tmp_path / "t.json", enabled=False) as file:
        file.write([{"anything": 1}])
    assert not file.path.exists()


def test_threads_share_a_timeline_without_loss(tmp_path):
    timeline = Timeline(process="p")

    def work():
        for step in range(500):
            with timeline.span("work", step=step):
                pass

    threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    collected = []
    while any(thread.is_alive() for thread in threads):
        collected += timeline.drain()
    collected += timeline.drain()
    with TimelineFile(tmp_path / "t.json") as file:
        file.write(collected)
    assert len(complete(file.path)) == 2000
    assert sorted(names(file.path, "thread_name")) == [f"worker-{i}" for i in range(4)]
    assert len({event["tid"] for event in complete(file.path)}) == 4


def in_another_process(queue):
    timeline = Timeline(thread="rollout:0")
    with timeline.span("rollout.generate"):
        pass
    queue.put(timeline.drain())


def test_events_of_other_processes_are_merged(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=in_another_process, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    drained = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    local = Timeline()
    with local.span("driver"):
        pass
    with TimelineFile(tmp_path / "t.json") as file:
        for events in (*drained, local.drain()):
            file.write(pickle.loads(pickle.dumps(events)))
    assert len({event["pid"] for event in complete(file.path)}) == 3
    assert len(set(names(file.path, "process_name"))) == 3
    spans = {event["name"]: event for event in complete(file.path)}
    assert spans["rollout.generate"]["ts"] < spans["driver"]["ts"]


def test_a_cut_off_file_is_readable_and_continued(tmp_path):
    path = tmp_path / "t.json"

    def write(name):
        timeline = Timeline(process="run", thread="main")
        timeline.record(name, 1000, 2000)
        with TimelineFile(path) as file:
            file.write(timeline.drain())

    write("before")
    with open(path, "a") as file:
        file.write('{"ph": "X", "na')
    assert [event["name"] for event in complete(path)] == ["before"]
    write("after")
    assert [event["name"] for event in complete(path)] == ["before", "after"]
    # A viewer accepts the array without its end; with it, the file is plain JSON.
    assert len(json.loads(path.read_text().rstrip().rstrip(",") + "]")) == 6
    assert len({event["pid"] for event in complete(path)}) == 2


def test_a_file_without_events_is_continued(tmp_path):
    for _ in range(3):
        TimelineFile(tmp_path / "t.json").close()
    assert (tmp_path / "t.json").read_text() == "[\n"
    assert not list(read_timeline(tmp_path / "t.json"))


def test_of_a_file_that_is_continued_only_the_names_of_processes_are_read(tmp_path, monkeypatch):
    timeline, read = Timeline(process="run"), []
    for _ in range(100):
        timeline.record("work", 1000, 2000)
    with TimelineFile(tmp_path / "t.json") as file:
        file.write(timeline.drain())
    monkeypatch.setattr(
        json, "loads", lambda line, found=json.loads: read.append(line) or found(line)
    )
    TimelineFile(tmp_path / "t.json").close()
    assert len(read) == 1
