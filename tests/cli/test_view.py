"""``rlinf view`` on real runs: with a timeline and without."""

from __future__ import annotations

import json
import re
import shutil
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


def test_a_run_is_viewed_whose_training_is_refused_by_now(run: Path, tmp_path: Path) -> None:
    old = shutil.copytree(run, tmp_path / "old")
    config = (old / "config.yaml").read_text()
    assert "clip_log_ratio_max: null" in config
    (old / "config.yaml").write_text(
        config.replace("clip_log_ratio_max: null", "clip_log_ratio_max: 0.1")
    )
    assert main(["view", str(old)]) == 0
    assert main(["resume", str(old)]) == 2


def test_waiting_explains_what_the_metrics_call_work(run: Path) -> None:
    """Two ways to the time of a component: the stage's own report, and spans without waits."""
    report = run_report(run)
    assert report.measured is not None
    assert report.curve is not None
    for component in ("env", "rollout"):
        stages = waits = metrics = 0.0
        for line in report.curve.lines:
            begin, end = report.measured.steps[int(line["step"])]
            assert end - begin <= line["time/step"] * 1.05
            spans = [s for s in report.measured.spans if s.component == component]
            inside = [s for s in spans if begin <= s.begin < end]
            stage = sum(s.end - s.begin for s in inside if s.category == "stage")
            wait = sum(s.end - s.begin for s in inside if s.category == "wait")
            # The report's time begins before the span and ends after it, and their clocks differ.
            assert stage - wait <= line[f"time/{component}"] + 0.001
            stages, waits = stages + stage, waits + wait
            metrics += line[f"time/{component}"]
        assert metrics < stages
        assert metrics - (stages - waits) < 0.5 * waits


def test_steps_can_be_chosen(run: Path) -> None:
    for wanted, found in ((range(2, 4), [2, 3]), (range(3, 10**12), [3, 4])):
        report = run_report(run, wanted)
        assert report.measured is not None
        assert list(report.measured.steps) == found


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("9-12", "the timeline has the steps 1-4"),
        ("9-99999999999999999999", "the timeline has the steps 1-4"),
        ("x", "give a step or two"),
        ("3-2", "give a"),
    ],
)
def test_steps_that_are_not_there(
    run: Path, steps: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--steps", steps]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("none/page.html", "there is no directory"),
        ("", "is a directory; give a file"),
        ("/proc/page.html", "cannot be written"),
    ],
)
def test_where_no_page_can_be_written(
    output: str, expected: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--output", str(tmp_path / output)]) == 2
    assert expected in capsys.readouterr().err


def copied(run: Path, directory: Path, *changes: tuple[str, str]) -> Path:
    """A run with other words in its config."""
    other = directory / "run"
    other.mkdir()
    for name in ("config.yaml", "timeline.json", "metrics.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    text = (other / "config.yaml").read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (other / "config.yaml").write_text(text)
    return other


def write_profile(run: Path) -> None:
    """Times of the components of the run above."""
    from rlinf.planner.profile import ComponentProfile, Fingerprints, Measurement

    parts = {
        name: ComponentProfile(
            measurements=tuple(
                Measurement(items=8, devices=devices, seconds=seconds, origin="a test")
                for devices in (1, 2)
            )
        )
        for name, seconds in (("env", 0.5), ("rollout", 0.25), ("actor", 0.25))
    }
    here = Fingerprints(hardware="here", model="model", config="config")
    here.profile(parts).save(run / "profile.json")


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
    (bare / "end.json").write_text("{}")
    assert main(["view", str(bare)]) == 0
    told = capsys.readouterr().err
    assert "rlinf train RECIPE runner.timeline=true" in told
    assert "resume" not in told  # it has no steps left


def test_a_run_is_predicted_from_its_first_steps(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of the first steps, simulated under the same plan, gives about the same step."""
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    assert run_report(run).predicted is None  # it was too short
    other = copied(run, tmp_path)
    write_profile(other)
    report = run_report(other)
    assert report.predicted_seconds == pytest.approx(1.0)
    assert report.predicted is not None
    assert [share.device for share in report.predicted.shares()] == [0, 1]
    assert list(report.predicted.steps) == [1, 2, 3]


def test_a_run_over_a_slow_network_is_not_predicted_as_if_there_were_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = "{enabled: true, crossdc_pairs: [{src: 'env:0', dst: 'rollout:0', delay_ms: 20}]}"
    slow = ("\ncluster:\n", f"\ncluster:\n  net_emulation: {links}\n")
    other = copied(run, tmp_path, ("\n  net_emulation: null", ""), slow)
    write_profile(other)
    assert run_report(other).predicted is None
    told = "note: nothing is predicted: cluster.net_emulation: slows links"
    assert told in " ".join(capsys.readouterr().err.split())


def test_what_a_run_does_ahead_is_predicted_to_overlap(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    apart = ("rollout: '1'\n    actor: 0-1", "rollout: '0'\n    actor: '1'")
    found = {}
    text = (run / "config.yaml").read_text()
    # What is asked of PPO alone.
    own = ("importance_sampling", "proximal:")
    kept = [(f"{line}\n", "") for line in text.splitlines() if line.strip().startswith(own)]
    for staleness in (0, 1):
        directory = tmp_path / str(staleness)
        directory.mkdir()
        ahead = ("max_staleness: 0", f"max_staleness: {staleness}")
        other = copied(run, directory, apart, ahead, ("type: ppo", "type: decoupled_ppo"), *kept)
        write_profile(other)
        report = run_report(other)
        assert report.predicted is not None
        (_, first), (second, _), _ = report.predicted.steps.values()
        found[staleness] = report.predicted_seconds, second < first
    assert found[0] == (pytest.approx(1.0), False)
    assert found[1] == (pytest.approx(0.75), True)


def test_the_plan_that_a_run_keeps_is_shown(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf.flow.plan import PLAN_FILE, Plan

    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    assert Plan.load(run / PLAN_FILE).components["actor"].devices == (0, 1)
    other = copied(run, tmp_path)
    assert run_report(other).plan["actor"]["devices"] == "0-1"
    parts = {name: {"devices": 1} for name in ("env", "rollout", "actor")}
    Plan.model_validate({"components": parts}).save(other / PLAN_FILE)
    report = run_report(other)
    assert report.plan["actor"]["devices"] == "1"
    assert report.plan_file.startswith("version: 1\ncomponents:\n  env:\n    devices: '1'\n")


def test_a_longer_run_leaves_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf.planner.profile import Profile

    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    words = [
        "train", str(write_recipe(tmp_path)), "--run-dir", str(tmp_path / "run"),
        "runner.total_env_steps=1536", "evaluation.interval=0",
        "evaluation.stop_at_success=null", "checkpoint.interval=0",
    ]  # fmt: skip
    assert main(words) == 0
    profile = Profile.load(tmp_path / "run" / "profile.json")
    for component in ("env", "rollout", "actor"):
        [measured] = profile.components[component].measurements
        assert (measured.samples, measured.items) == (8, 8)
        assert "first steps of run" in measured.origin
    report = run_report(tmp_path / "run")
    assert report.predicted_seconds is not None
    assert report.curve is not None
    steps = sorted(line["time/step"] for line in report.curve.lines[2:10])
    assert 0.5 * steps[0] < report.predicted_seconds < 2 * steps[-1]


def test_synchronisation_has_a_row_of_its_own(run: Path, tmp_path: Path) -> None:
    assert main(["view", str(run), "--output", str(tmp_path / "page.html")]) == 0
    [panel] = shown((tmp_path / "page.html").read_text())["panels"]
    [row] = [row for row in panel["rows"] if row["label"] == "sync weights"]
    assert {panel["kinds"][bar[2]] for bar in row["bars"]} == {"sync"}
