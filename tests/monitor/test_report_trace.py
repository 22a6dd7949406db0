"""What the report reads out of a timeline: steps, who has which device, idle shares."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlinf.monitor.report import trace as traces
from rlinf.monitor.report.charts import gantt_panel
from rlinf.monitor.report.trace import Trace, common, length, minus, union
from rlinf.monitor.timeline import TimelineFile, read_events

SECOND = 1_000_000_000
ORIGIN = 1_800_000_000 * SECOND


def event(
    track: str, name: str, begin: float, end: float, category: str = "stage", **arguments: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "begin_ns": ORIGIN + round(begin * SECOND),
        "end_ns": ORIGIN + round(end * SECOND),
        "process": "host 1",
        "thread": track,
        "args": arguments,
    }


def two_steps(first: float = 0.0, step: int = 0) -> list[dict[str, Any]]:
    """A rollout of 4 s on device 0 that waits for 1 s, then training for 4 s on both devices."""
    return [
        event("rollout:0", "wait actions", first + 1, first + 2, "wait"),
        event(
            "rollout:0", "rollout.generate", first, first + 4,
            step=step, component="rollout", devices=[0],
        ),
        event("train-node_0", "lease train", first, first + 4, "lease"),
        event("actor:0", "onload", first + 4, first + 5, "residency"),
        event(
            "actor:0", "train.train", first + 5, first + 8,
            step=step, component="actor", devices=[0, 1],
        ),
    ]  # fmt: skip


def trace_of(path: Path, events: list[dict[str, Any]]) -> Trace:
    with TimelineFile(path / "timeline.json") as file:
        file.write(events)
    return traces.trace_of(read_events(path / "timeline.json"), ("rollout", "train"))


def test_intervals_against_a_grid() -> None:
    """Against sets of whole seconds: an independent way to the same numbers."""
    generator = random.Random(0)

    def draw() -> list[tuple[float, float]]:
        starts = [generator.randrange(40) for _ in range(generator.randrange(6))]
        return [(float(a), float(a + generator.randrange(8))) for a in starts]

    def grid(intervals: list[tuple[float, float]]) -> set[int]:
        return {second for a, b in intervals for second in range(int(a), int(b))}

    for _ in range(300):
        one, other = draw(), draw()
        left, right = union(one), union(other)
        assert all(a[1] < b[0] for a, b in pairwise(left))
        assert length(left) == len(grid(one))
        assert length(minus(left, right)) == len(grid(one) - grid(other))
        assert length(common(left, right)) == len(grid(one) & grid(other))


def test_shares_of_devices_add_up(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, two_steps())
    first, second = trace.shares()
    assert first.busy == pytest.approx({"rollout": 3 / 8, "actor": 4 / 8})
    assert (first.waiting, first.idle) == pytest.approx((1 / 8, 0))
    assert second.busy == pytest.approx({"actor": 4 / 8})
    assert (second.waiting, second.idle) == pytest.approx((0, 4 / 8))
    for share in (first, second):
        assert sum(share.busy.values()) + share.waiting + share.idle == pytest.approx(1)


def test_two_workers_of_a_device_at_once_are_busy_once(tmp_path: Path) -> None:
    events = [
        event("env:0", "rollout.interact", 0, 3, step=0, component="env", devices=[0]),
        event("rollout:0", "rollout.generate", 1, 4, step=0, component="rollout", devices=[0]),
    ]
    [share] = trace_of(tmp_path, events).shares()
    assert share.busy == pytest.approx({"env": 3 / 4, "rollout": 3 / 4})
    assert share.bars == pytest.approx({"env": 1 / 2, "rollout": 1 / 2})
    assert share.idle == pytest.approx(0)


def test_time_between_steps_does_not_count(tmp_path: Path) -> None:
    evaluation = event(
        "rollout:0", "evaluation.evaluate", 8, 20, step=0, component="rollout", devices=[0]
    )
    trace = trace_of(tmp_path, [*two_steps(), evaluation, *two_steps(20, step=1)])
    assert list(trace.steps) == [1, 2]
    assert [share.idle for share in trace.shares()] == pytest.approx([0, 0.5])


def test_steps_are_counted_as_the_metrics_count_them_and_can_be_chosen(tmp_path: Path) -> None:
    events = [e for number in range(5) for e in two_steps(10.0 * number, number)]
    trace = trace_of(tmp_path, events)
    assert list(trace.steps) == [1, 2, 3, 4, 5]
    assert list(trace.of_steps([2, 3]).steps) == [2, 3]
    assert trace.last_steps(3, most_spans=1000) == (3, 4, 5)
    assert trace.last_steps(5, most_spans=11) == (4, 5)
    assert trace.last_steps(5, most_spans=1) == (5,)
    assert trace.of_steps([99]).spans == ()


def test_a_step_that_a_resumed_run_repeated_counts_once(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [*two_steps(0, 0), *two_steps(100, 0)])
    begin, end = trace.steps[1]
    assert end - begin == pytest.approx(8)


def test_devices_of_a_moved_worker_are_those_of_the_time(tmp_path: Path) -> None:
    moved = two_steps(10, 1)
    moved[1]["args"]["devices"] = [1]
    trace = trace_of(tmp_path, [*two_steps(), *moved])
    waits = [span for span in trace.spans if span.category == "wait"]
    assert [span.devices for span in waits] == [(0,), (1,)]
    stages = [span for span in trace.spans if span.name == "rollout.generate"]
    assert [span.devices for span in stages] == [(0,), (1,)]


def test_a_trace_without_owners_takes_them_from_the_plan(tmp_path: Path) -> None:
    events = two_steps()
    for each in events:
        each["args"] = {k: v for k, v in each["args"].items() if k == "step"}
    trace = traces.trace_of(events, ("rollout", "train"), {"rollout": [0], "actor": [0, 1]})
    assert trace.devices == (0, 1)
    assert trace.shares()[1].idle == pytest.approx(0.5)


def test_bars_keep_times_to_the_microsecond(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, two_steps())
    panel = gantt_panel("measured", trace, {"rollout": "#111111", "actor": "#222222"})
    rows = {row["label"]: row for row in panel["rows"]}
    assert list(rows) == ["device 0", "rollout:0", "actor:0", "device 1", "lease train"]
    assert panel["steps"] == [[1, 0, 8_000_000]]
    assert panel["end"] == 8_000_000
    [lease] = rows["lease train"]["bars"]
    assert (lease[0], lease[1], panel["kinds"][lease[2]]) == (0, 4_000_000, "lease")
    computed = [(bar[0], bar[1]) for bar in rows["device 0"]["bars"]]
    assert computed == [(0, 1_000_000), (2_000_000, 2_000_000), (4_000_000, 4_000_000)]
    # Waiting is drawn over the stage that waits.
    assert [panel["kinds"][bar[2]] for bar in rows["rollout:0"]["bars"]] == ["stage", "wait"]
