"""The page is one file, says everything, and a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlinf.monitor.curve import Curve
from rlinf.monitor.decisions import Decision, note_decision, read_decisions
from rlinf.monitor.report.charts import chart_data
from rlinf.monitor.report.flow_picture import Arrow, Graph, NodeBox, StageBox, draw_graph
from rlinf.monitor.report.page import RunReport, render, write_report

from .test_report_trace import trace_of, two_steps

GRAPH = Graph(
    nodes=(
        NodeBox(
            "rollout",
            (StageBox("env", "env", "interact"), StageBox("rollout", "rollout", "generate")),
        ),
        NodeBox("train", (StageBox("actor", "actor", "train"),)),
    ),
    arrows=(
        Arrow("observations", "env", "rollout"),
        Arrow("actions", "rollout", "env"),
        Arrow("trajectories", "env", "actor"),
    ),
)

PLAN = {
    name: {
        "devices": devices,
        "processes": 1,
        "residency": "resident",
        "pipeline_stages": 1,
        "predicted_seconds": None,
        "reason": reason,
    }
    for name, devices, reason in (
        ("env", "0", "hand-written placement"),
        ("rollout", "0", "</script><b>bold</b>"),
        ("actor", "0-1", "hand-written placement"),
    )
}

LINES = [
    {
        "step": step, "time": 1.0 * step, "time/step": 0.5, "env/steps": 100.0 * step,
        "env/return": -3.0 + step, "env/success_once": 0.1 * step,
        "eval/success": 0.1 * step, "eval/success_low": 0.0, "eval/success_high": 0.9,
    }
    for step in range(1, 6)
]  # fmt: skip


def whole_report(directory: Path) -> RunReport:
    events = [e for number in range(5) for e in two_steps(10.0 * number, number)]
    trace = trace_of(directory, events)
    decision = Decision(
        step=3, what="switch", reason="predicted 20 % faster", cost_seconds=0.4,
        gain_predicted=0.1, gain_measured=-0.02, numbers={"step_seconds_predicted": 0.4},
    )  # fmt: skip
    return RunReport(
        name="quickstart/2026", task="embodied", graph=GRAPH, plan=PLAN, mode="hybrid",
        plan_file="version: 1",
        config="task: embodied\n", measured=trace, predicted=trace.of_steps([1]),
        curve=Curve(LINES), decisions=(decision,),
    )  # fmt: skip


class Page(HTMLParser):
    """Collects what a page refers to and how its elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.data = ""
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href")]
        self._in_data = dict(attrs).get("id") == "data"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [v or "" for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = render(whole_report(tmp_path))
    page = Page(text)
    assert page.open == []
    assert page.references == []
    allowed = {"http://www.w3.org/2000/svg"}  # the name of SVG, not an address to load
    assert set(re.findall(r"https?://[^\"'\s<>]+", text)) <= allowed
    data = json.loads(page.data)
    assert [panel["title"] for panel in data["panels"]] == ["measured", "predicted"]
    assert [chart["title"] for chart in data["charts"]][:2] == ["success rate", "return"]


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    text = render(whole_report(tmp_path))
    assert "<b>bold</b>" not in text
    assert "&lt;b&gt;bold" in text


def test_plan_idle_shares_and_decisions_are_on_the_page(tmp_path: Path) -> None:
    text = render(whole_report(tmp_path))
    for expected in (
        "hybrid placement", "0-1", "hand-written placement", "predicted 20 % faster", "+0.1 s",
        "-0.02 s", "step_seconds_predicted 0.4", "seconds per step", "50.0 %",
    ):  # fmt: skip
        assert expected in text, expected
    # The measured column: a rollout of 4 s that waited for one of them.
    assert "<td>3 s</td>" in text


def test_a_run_without_timeline_says_how_to_get_one() -> None:
    report = RunReport(
        name="a", task="embodied", graph=GRAPH, plan=PLAN, mode="hybrid",
        plan_file="version: 1",
        config="",
        timeline_hint="rlinf resume a runner.timeline=true",
    )  # fmt: skip
    text = render(report)
    assert "rlinf resume a runner.timeline=true" in text
    assert "No metrics yet" in text
    assert Page(text).open == []


def test_predicted_shares_are_shown_without_a_timeline(tmp_path: Path) -> None:
    report = replace(whole_report(tmp_path), measured=None)
    shares = render(report).partition('<section id="idle">')[2].partition("</section>")[0]
    assert "<h3>predicted</h3>" in shares
    assert "<h3>measured</h3>" not in shares


def test_every_stage_and_stream_of_the_graph_is_drawn() -> None:
    text = draw_graph(GRAPH, {"env": "#1", "rollout": "#2", "actor": "#3"}, {"env": "device 0"})
    names = re.findall(r">([^<>]+)</text>", text)
    assert {"env", "rollout", "actor", "loop: rollout", "device 0"} <= set(names)
    assert {"observations", "actions", "trajectories"} <= set(names)
    boxes = re.findall(r'class="stage" x="(\d+)" y="(\d+)"', text)
    assert len(set(boxes)) == 3
    assert boxes[0][0] == boxes[1][0] < boxes[2][0]


def test_decisions_are_appended_and_survive_a_kill(tmp_path: Path) -> None:
    assert read_decisions(tmp_path) == []
    first = Decision(step=1, what="start", reason="hand-written", plan={"components": {}})
    note_decision(tmp_path, first)
    with open(tmp_path / "decisions.jsonl", "ab") as file:
        file.write(b'{"step": 2, "what": "sw')
    second = Decision(step=2, what="keep", reason="5 % faster", gain_measured=0.1)
    note_decision(tmp_path, second)
    assert read_decisions(tmp_path) == [first, second]


def test_a_decision_is_appended_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision, read = Decision(step=1, what="rescale", reason="one worker less"), []
    for _ in range(2):
        note_decision(tmp_path, decision)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
        note_decision(tmp_path, decision)
    assert not read
    assert read_decisions(tmp_path) == 3 * [decision]


def test_of_moves_of_workers_the_page_shows_the_newest(tmp_path: Path) -> None:
    moves = [Decision(step=n, what="rescale", reason=f"move {n}.") for n in range(203)]
    start = Decision(step=0, what="start", reason="hand-written")
    report = replace(whole_report(tmp_path), decisions=[start, *moves])
    page = render(report)
    assert "hand-written" in page
    assert [n for n in range(203) if f"<td>move {n}.</td>" in page] == list(range(3, 203))
    assert "Left out are the 3 oldest of kind rescale" in page
    assert "Left out are" not in render(whole_report(tmp_path))


def test_lines_that_are_no_decisions_are_left_out(tmp_path: Path) -> None:
    decision = Decision(step=1, what="start", reason="hand-written", numbers={"seconds": 2.0})
    with open(tmp_path / "decisions.jsonl", "ab") as file:
        for line in (
            b"3", b"null", b"[1, 2]", b'"text"', b"{}", b'{"step": 1}', b"\xff\xfe", b"",
            b'{"step": "one", "what": "start", "reason": "a step that is no number"}',
            b'{"step": 1, "what": "start", "reason": "numbers that are none", "numbers": [1]}',
            b'{"step": 1, "what": "rest", "reason": "of no known kind"}',
        ):  # fmt: skip
            file.write(line + b"\n")
    note_decision(tmp_path, decision)
    assert read_decisions(tmp_path) == [decision]


# -- in a browser -------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=3000",
    "--window-size=1400,2200",
)  # fmt: skip


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser is installed (Debian: apt-get install chromium)"
)


def in_a_browser(page: Path) -> str:
    """A page after its scripts ran."""
    found = subprocess.run(
        [str(BROWSER), *SWITCHES, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom",
         page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Uncaught" not in found.stderr, found.stderr
    return found.stdout


@needs_browser
def test_a_browser_draws_timeline_and_charts(tmp_path: Path) -> None:
    page = write_report(whole_report(tmp_path), tmp_path / "report.html")
    drawn = in_a_browser(page)
    gantt = drawn.partition('id="gantt"')[2].partition("</section>")[0]
    assert gantt.count("<figure") == 2
    for label in ("device 0", "device 1", "rollout:0", "actor:0", "step 5"):
        assert f">{label}</text>" in gantt, label
    # The last step alone is shown at first: one bar of the actor per row that it has, not five.
    assert "step 1<" not in gantt.partition("</figure>")[0]
    assert 8 <= gantt.count("<rect") <= 60
    charts = drawn.partition('id="charts"')[2].partition("</section>")[0]
    assert charts.count("<polyline") >= 4


CLICKS = """
const seen = [];
for (const where of ["previous", "next"]) for (let n = 0; n < 5; n += 1) {
  document.querySelector(`[data-gantt="${where}"]`).click();
  const labels = [...document.querySelectorAll("#gantt text")].map((label) => label.textContent);
  seen.push(labels.find((label) => label.startsWith("step ")));
}
document.getElementById("gantt-where").textContent = `seen: ${seen}.`;
"""


@needs_browser
def test_next_and_previous_reach_every_step_where_steps_overlap(tmp_path: Path) -> None:
    events = [e for number in range(5) for e in two_steps(3.0 * number, number)]
    overlapping = tmp_path / "overlapping"
    overlapping.mkdir()
    measured = trace_of(overlapping, events)
    report = replace(whole_report(tmp_path), measured=measured, predicted=None)
    page = tmp_path / "report.html"
    page.write_text(render(report).replace("</body>", f"<script>{CLICKS}</script></body>"))
    found = re.search(r"seen: (.*?)\.", in_a_browser(page))
    assert found is not None
    steps = [int(label.removeprefix("step ")) for label in found[1].split(",")]
    assert steps == [4, 3, 2, 1, 1, 2, 3, 4, 5, 5]


def test_charts_of_a_supervised_run_show_both_losses() -> None:
    lines = [
        {"step": float(step), "train/loss": 2.0 / step, "time/step": 0.1}
        | ({"validation/loss": 2.5 / step} if step % 2 == 0 else {})
        for step in range(1, 7)
    ]
    (chart,) = [each for each in chart_data(Curve(lines)) if each["title"] == "loss"]
    assert [each["label"] for each in chart["series"]] == ["loss", "validation"]
    assert [x for x, _ in chart["series"][1]["points"]] == [2, 4, 6]
