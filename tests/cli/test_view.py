"""``rlinf view`` on real runs: with a timeline and without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.cli.view import run_report
from rlinf.monitor.timeline import read_timeline

from ..runners.support import write_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some steps with env and rollout on devices of their own, and a timeline."""
    directory = tmp_path_factory.mktemp("view")
    words = [
        "train", str(write_recipe(directory)), "--run-dir", str(directory / "run"),
        "runner.timeline=true", "runner.total_env_steps=512", "cluster.cpu_devices_per_node=2",
        "cluster.component_placement={env: '0', rollout: '1', actor: '0-1'}",
        "evaluation.interval=2", "checkpoint.interval=0",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
        assert main(words) == 0
    return directory / "run"


def shown(text: str) -> dict[str, Any]:
    """The data that the script of a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_stages_say_whose_they_are(run: Path) -> None:
    stages = [e for e in read_timeline(run / "timeline.json") if e.get("cat") == "stage"]
    devices = {(e["args"]["component"], tuple(e["args"]["devices"])) for e in stages}
    assert devices == {("env", (0,)), ("rollout", (1,)), ("actor", (0,)), ("actor", (1,))}


def test_the_page_is_written_and_its_path_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--output", str(tmp_path / "page.html")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'page.html'}\n"
    assert captured.err == ""
    [panel] = shown((tmp_path / "page.html").read_text())["panels"]
    assert [row["label"] for row in panel["rows"] if row["kind"] == "device"] == [
        "device 0", "device 1",
    ]  # fmt: skip
    assert [step for step, _, _ in panel["steps"]] == [1, 2, 3, 4]
    # The evaluation in between is no step.
    begins, ends = [s[1] for s in panel["steps"]], [s[2] for s in panel["steps"]]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def test_waiting_explains_what_the_metrics_call_work(run: Path) -> None:
    """Two ways to the time of a component: the stage's own report, and spans without waits."""
    report = run_report(run)
    assert report.measured is not None
    assert report.curve is not None
    for line in report.curve.lines:
        step = int(line["step"])
        begin, end = report.measured.steps[step]
        assert end - begin <= line["time/step"] * 1.05
        for component in ("env", "rollout"):
            spans = [s for s in report.measured.spans if s.component == component]
            inside = [s for s in spans if begin <= s.begin < end]
            stage = sum(s.end - s.begin for s in inside if s.category == "stage")
            waits = sum(s.end - s.begin for s in inside if s.category == "wait")
            assert stage - waits == pytest.approx(line[f"time/{component}"], rel=0.1, abs=0.005)


def test_steps_can_be_chosen(run: Path) -> None:
    report = run_report(run, range(2, 4))
    assert report.measured is not None
    assert list(report.measured.steps) == [2, 3]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [("9-12", "the timeline has the steps 1-4"), ("x", "give a step or two"), ("3-2", "give a")],
)
def test_steps_that_are_not_there(
    run: Path, steps: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--steps", steps]) == 2
    assert expected in capsys.readouterr().err


def test_without_a_timeline_the_page_and_the_screen_say_how_to_get_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    text = (run / "config.yaml").read_text().replace("timeline: true", "timeline: false")
    (bare / "config.yaml").write_text(text)
    assert main(["view", str(bare)]) == 0
    captured = capsys.readouterr()
    assert "runner.timeline=true" in captured.err
    page = (bare / "report.html").read_text()
    assert f"rlinf resume {bare} runner.timeline=true" in page
    assert shown(page) == {"panels": [], "charts": []}
