"""Timelines that trace viewers load."""

import json
import textwrap

from rlinf.scheduler import Tracer
from tests.warm import Warm


def test_events_are_lines_and_one_document(tmp_path):
    tracer = Tracer(tmp_path / "trace" / "events.jsonl")
    tracer.record({"ph": "B", "name": "a", "ts": 1, "pid": 1, "tid": 1})
    tracer.record({"ph": "E", "name": "a", "ts": 2, "pid": 1, "tid": 1})
    assert tracer.finalize() == str(tmp_path / "trace" / "events.jsonl") == tracer.finalize()
    tracer.record({"ignored": True})
    lines = (tmp_path / "trace" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["ph"] for line in lines] == ["B", "E"]
    document = json.loads((tmp_path / "trace" / "events.json").read_text())
    assert len(document["traceEvents"]) == 2


def test_what_json_does_not_know_is_written_as_text(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl")
    tracer.record_all([{"args": {"path": tmp_path, ("a", 1): 2}}, {"ph": "E"}])
    tracer.finalize()
    document = json.loads((tmp_path / "events.json").read_text())
    assert document["traceEvents"] == [{"args": {"path": str(tmp_path)}}, {"ph": "E"}]


def test_nothing_is_recorded_without_a_tracer():
    @Tracer.trace_func("x")
    def function() -> int:
        with Tracer.trace_span("inner"):
            return 3

    Tracer.trace_begin("a")
    Tracer.trace_end("a")
    assert function() == 3


def test_functions_are_traced_with_and_without_a_category():
    recorded: list[dict] = []

    @Tracer.trace_func
    def bare() -> int:
        return 1

    @Tracer.trace_func(cat="named")
    def with_category() -> int:
        return 2

    Tracer.enable(recorded.extend)
    try:
        assert (bare(), with_category()) == (1, 2)
    finally:
        Tracer.disable()
    begun = [(event["name"], event["cat"]) for event in recorded if event["ph"] == "B"]
    assert begun == [("bare", "driver"), ("with_category", "named")]


PROGRAM = """
    import sys
    from rlinf.scheduler import Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Basic

    config = {"runtime": "local", "tracer": {"enable": True, "output_file": sys.argv[1]}}
    cluster = Cluster(cluster_cfg=config)
    group = Basic.create_group().launch(cluster, NodePlacementStrategy([0, 0]), "traced")
    group.work().wait()
    cluster.shutdown()
"""


def test_a_cluster_writes_the_timeline_of_its_workers(tmp_path):
    path = tmp_path / "events.jsonl"
    assert Warm(["-c", textwrap.dedent(PROGRAM), str(path)]).wait(120) == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [event for event in events if event["name"] == "inner"]
    assert sorted(event["ph"] for event in spans) == ["B", "B", "E", "E"]
    assert spans[0]["cat"] == "traced"
    named = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert [name for kind, name in named if kind == "process_name"] == ["rlinf"]
    assert {("thread_name", "traced:0"), ("thread_name", "traced:1")} <= set(named)


def test_a_process_of_one_worker_has_its_name(cluster, runtime):
    recorded: list[dict] = []
    Tracer.enable(recorded.extend)
    try:
        for _ in range(2):
            Tracer.trace_begin("a")
    finally:
        Tracer.disable()
    named = {event["name"]: event["args"]["name"] for event in recorded if event["ph"] == "M"}
    process = "rlinf" if runtime == "local" else "driver"
    assert named == {"process_name": process, "thread_name": "driver"}
    assert [event["ph"] for event in recorded] == ["M", "M", "B", "B"]


def test_a_trace_that_cannot_be_written_is_told_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    tracer = {"enable": True, "output_file": str(tmp_path / "file" / "events.jsonl")}
    program = f"""
        from rlinf.scheduler import Cluster
        try:
            Cluster(cluster_cfg={{"runtime": "local", "tracer": {tracer!r}}})
        except RuntimeError as error:
            assert "cannot be written" in str(error), error
            assert not Cluster.has_initialized()
            raise SystemExit(7)
    """
    assert Warm(["-c", textwrap.dedent(program)]).wait(120) == 7


def test_a_full_disk_ends_the_trace_and_not_what_it_is_of(caplog):
    tracer = Tracer("/dev/full")
    for _ in range(2):
        tracer.record({"ph": "B", "name": "a"})
    assert tracer.finalize() == "/dev/full"
    assert caplog.text.count("/dev/full is not continued: No space left") == 1
