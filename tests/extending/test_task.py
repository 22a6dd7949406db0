"""A package outside adds a task: one file, and it trains, runs ahead, resumes and is planned."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.cli.tasks import read_config, task_of_run
from rlinf.flow.graph import Stage
from rlinf.flow.stream import Emit
from rlinf.monitor.decisions import read_decisions
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.run import Run

from .conftest import PACKAGE

pytestmark = pytest.mark.usefixtures("installed")

RECIPE = str(PACKAGE / "bandit.yaml")


@pytest.fixture(autouse=True)
def _own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(run: Path, *overrides: str) -> Path:
    assert main(["train", RECIPE, *overrides, "--run-dir", str(run)]) == 0
    return run


def untimed(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time")} for line in lines]


class StopAfter(threading.Event):
    """Set once it was asked so many times."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self._left = questions

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_it_is_listed_explained_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "tasks"]) == 0
    assert "Learns which arm of a bandit pays best" in capsys.readouterr().out
    assert main(["explain", "payoffs"]) == 0
    assert "Mean reward of each arm" in capsys.readouterr().out
    assert main(["train", RECIPE, "puls=3", "--dry-run"]) == 2
    assert "did you mean `pulls`?" in capsys.readouterr().err


def test_arguments_for_a_component_that_is_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf_example.bandit import Bandit

    monkeypatch.setattr(Bandit, "arguments", lambda _, step: {"playr": {"step": step}})
    assert main(["train", RECIPE, "--run-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "task `bandit` is broken: it has arguments for `playr`; did you mean `player`?" in told


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["train", "dry run"])
@pytest.mark.parametrize(
    ("placed", "key"),
    [
        ("cluster.component_placement={player: 0-1, learner: 1}", "cluster.component_placement"),
        ("cluster.plan=plan.yaml", "cluster.plan.components.player.processes"),
    ],
)
def test_processes_that_its_planning_forbids_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    placed: str,
    key: str,
    dry: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("components: {player: {devices: 0-1}, learner: {devices: '1'}}\n")
    command = ["train", RECIPE, "cluster.cpu_devices_per_node=2", placed, *dry]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert key in told
    assert "places 2 processes of player" in told
    assert "nearest: 1" in told


@pytest.mark.parametrize(
    ("owner", "name", "value", "told"),
    [
        ("Bandit", "steps", lambda _: 3, "Bandit.steps is a method; nearest: @property before it"),
        ("Bandit", "step", lambda _, flow, config: None, "Bandit.step lacks @classmethod"),
        (
            "Bandit",
            "step",
            classmethod(lambda _, flow: None),
            r"called as step\(flow, config\): too",
        ),
        ("Bandit", "step", classmethod(lambda _, flow, config: None), "its step has no stage"),
        (
            "Bandit",
            "metrics",
            lambda _, report, number: {},
            r"Bandit.metrics cannot be called as metrics\(report, step=…, seconds=…\): missing",
        ),
        (
            "Bandit",
            "__init__",
            lambda _, config: None,
            r"called as __init__\(config, directory\): too",
        ),
        (
            "Player",
            "__init__",
            lambda _: None,
            r"Player.__init__ .* __init__\(config, context\): too",
        ),
        ("Bandit", "config_class", None, "config_class is None, expected a subclass of Placed"),
        ("Bandit", "groups", None, "groups is None, expected a dict of worker classes"),
        ("Bandit", "groups", {"player": 3}, "groups is .*, expected a dict of worker classes"),
        ("Bandit", "weights", ("learner",), "weights is .*, expected who sends and who receives"),
        ("Bandit", "changeable", "runner", "changeable is 'runner', expected a tuple of keys"),
        ("Bandit", "figures", None, "figures is None, expected triples of label, metric and"),
        (
            "Bandit",
            "figures",
            ("reward", "bandit/reward", ".3f"),
            "figures is .*, expected triples",
        ),
        ("Bandit", "figures", (("reward", "bandit/reward", ".3q"),), "expected triples of label"),
    ],
)
def test_what_a_run_could_not_call_is_refused_before_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    value: Any,
    told: str,
) -> None:
    from rlinf_example import bandit

    monkeypatch.setattr(getattr(bandit, owner), name, value)
    assert main(["train", RECIPE, "--dry-run"]) == 2
    assert re.search(f"task `bandit` is broken: .*{told}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("components", None, "components of BanditConfig is None, expected a tuple of names"),
        ("components", "player", "components of BanditConfig is 'player', expected a tuple"),
        ("components", (1, 2), r"components of BanditConfig is \(1, 2\), expected a tuple"),
        ("planning", None, "planning of BanditConfig is of type NoneType, expected PlanningTraits"),
    ],
)
def test_what_a_config_does_not_say_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    told: str,
) -> None:
    from rlinf_example.bandit import BanditConfig

    monkeypatch.setattr(BanditConfig, name, property(lambda _: value))
    assert main(["train", RECIPE, "--dry-run"]) == 2
    assert re.search(f"is broken: {told}", capsys.readouterr().err)


def test_a_task_without_its_config_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf_example.bandit import Bandit

    monkeypatch.delattr(Bandit, "config_class")
    assert main(["train", RECIPE, "--dry-run"]) == 2
    assert "Bandit has no `config_class`" in capsys.readouterr().err


def receives_nothing(player: Any) -> None:
    """Takes the weights, and forgets to say which version they are."""
    player._preferences, _ = player.recv("learner", 0)


@pytest.mark.parametrize(
    ("owner", "name", "value", "told"),
    [
        ("Bandit", "steps", None, "its steps is None, no whole number"),
        ("Bandit", "ahead", None, "its ahead is None, no whole number"),
        ("Bandit", "state_dict", lambda _: None, r"its state_dict\(\) returns NoneType"),
        ("Bandit", "arguments", lambda _, step: {"player": 3}, "has int for arguments of `player`"),
        (
            "Bandit",
            "metrics",
            lambda _, report, *, step, seconds: None,
            r"metrics\(\) returns None",
        ),
        ("Player", "receive_weights", receives_nothing, r"receive_weights\(\) returns NoneType"),
        ("Bandit", "arguments", lambda _, step: None, "has NoneType for arguments of its stages"),
        (
            "Learner",
            "state",
            lambda _: {"own": print},
            "/learner/own: a builtin_function_or_",
        ),
        ("Bandit", "arguments", lambda _, step: {"player": {"number": 1}}, r"pull\(number=…\): "),
    ],
)
def test_what_a_task_returns_wrongly_is_told_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    value: Any,
    told: str,
) -> None:
    from rlinf_example import bandit

    monkeypatch.setattr(getattr(bandit, owner), name, value)
    assert main(["train", RECIPE, "--run-dir", str(tmp_path / "run")]) != 0
    shown = capsys.readouterr().err
    assert re.search(told, shown)
    assert "trace ends in" not in shown


def test_a_step_that_asks_for_what_its_groups_have_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_player.py").write_text("import torhc\n\nclass Player: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    task, _, _ = read_config(RECIPE, [])
    player, learner = task.groups["player"], task.groups["learner"]
    wrong: list[tuple[str, Any, str]] = [
        ("groups", {"player": player, "lerner": learner}, "no component `learner`; did you mean"),
        ("groups", {"player": learner, "learner": learner}, "Learner has no method `pull`"),
        ("groups", {"player": "own_player:Player", "learner": learner}, "no module torhc"),
        ("groups", {"player": "own_palyer:Player", "learner": learner}, "no module own_palyer"),
        ("weights", ("lerner", "player"), "weights: groups has no component `lerner`; did you"),
        ("weights", ("player", "learner"), "weights: Player has no method `send_weights`"),
        (
            "step",
            classmethod(lambda cls, flow, config: flow.stage("one", Stage("player", "pul"))),
            "Player has no method `pul`; did you mean `pull`?",
        ),
        (
            "step",
            classmethod(
                lambda cls, flow, config: flow.stage(
                    "one", Stage("player", "pull", outputs=("pulls",))
                )
            ),
            "edge 'pulls' has 1 producers and 0 consumers",
        ),
    ]
    for name, value, message in wrong:
        with monkeypatch.context() as patch:
            patch.setattr(task, name, value)
            assert main(["train", RECIPE, "--dry-run"]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(task.config_class, "components", property(lambda config: ("player",)))
    assert main(["train", RECIPE, "--dry-run"]) == 2
    lacking = "components of BanditConfig lacks `learner`; known: player"
    assert lacking in " ".join(capsys.readouterr().err.split())


def test_a_result_for_an_edge_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _, _ = read_config(RECIPE, [])

    def pull(self: Any, *, step: int) -> Any:
        yield Emit("pull", 0, step)

    monkeypatch.setattr(task.groups["player"], "pull", pull)
    assert main(["train", RECIPE, "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert "Player.pull emits `pull`, no output of its stage; did you mean `pulls`?" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("pull", "wrong"),
    [
        (lambda self, *, step: {"pulls": step}, "Player.pull returns dict, and a stage is a"),
        (lambda self, *, step: (each for each in [("pulls", 0, step)]), "yields tuple and no Emit"),
        (
            lambda self, *, step: (each for each in [Emit("pulls", 1, step)]),
            "emits an item of sub-batch 1, and they are numbered from 0 to 0",
        ),
    ],
)
def test_a_stage_that_yields_nothing_it_could_hand_over_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pull: Any,
    wrong: str,
) -> None:
    task, _, _ = read_config(RECIPE, [])
    monkeypatch.setattr(task.groups["player"], "pull", pull)
    assert main(["train", RECIPE, "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert wrong in message
    assert "Traceback" not in message


@pytest.mark.parametrize("staleness", [0, 2])
def test_it_learns_and_resumes_as_if_it_had_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], staleness: int
) -> None:
    ahead = f"max_staleness={staleness}"
    whole = train(tmp_path / "whole", ahead)
    assert "after 3072 pulls arm 1 is preferred" in capsys.readouterr().out
    lines = untimed(whole)
    assert len(lines) == 12
    assert lines[-1]["bandit/reward"] > lines[0]["bandit/reward"] + 0.2
    task, _, config = read_config(RECIPE, [ahead])
    with RunDirectory.create(tmp_path, "cut", path=tmp_path / "cut") as directory:
        directory.write_config((whole / "config.yaml").read_text())
        Run(task, config, directory, StopAfter(5)).run()
    assert 0 < len(untimed(tmp_path / "cut")) < 12
    assert main(["resume", str(tmp_path / "cut")]) == 0
    assert untimed(tmp_path / "cut") == lines
    assert task_of_run(tmp_path / "cut") is task


def test_it_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--measure"]) == 0
    out = capsys.readouterr().out
    assert "plan for 1 node" in out
    assert {"player", "learner"} <= {word for line in out.splitlines() for word in line.split()}
    run = train(tmp_path / "run", "cluster.plan=auto")
    assert read_decisions(run)[0].what == "start"
    assert untimed(run) == untimed(train(tmp_path / "plain"))


def test_what_it_does_not_say_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", "runner.total_steps=1")
    assert main(["eval", str(run)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"runs of task 'bandit' are not evaluated; nearest: rlinf view {run}" in told


def _lost(self: Any) -> int:
    return 0


def _twice(self: Any) -> int:
    for _ in range(2):
        self.send((self._preferences, self._version), "player", 0)
    return int(self._version)


@pytest.mark.parametrize(
    ("owner", "name", "value", "told"),
    [
        ("Player", "receive_weights", _lost, "version 1, and receive_weights() of rank 0 0: it"),
        ("Learner", "send_weights", _twice, "version 1, and receive_weights() of rank 0 0: it"),
        ("Player", "receive_weights", lambda _: None, "receive_weights() returns NoneType"),
    ],
)
def test_weights_that_do_not_arrive_end_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    value: Any,
    told: str,
) -> None:
    from rlinf_example import bandit

    monkeypatch.setattr(getattr(bandit, owner), name, value)
    words = ["cluster.runtime=local", "cluster.timeout_minutes=0.02", "--run-dir"]
    assert main(["train", RECIPE, *words, str(tmp_path / "run")]) == 1
    assert told in capsys.readouterr().err


def test_weights_that_are_never_sent_are_told_before_the_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf_example import bandit

    monkeypatch.setattr("rlinf.runners.groups._HANDOVER_SECONDS", 0.2)
    monkeypatch.setattr(bandit.Learner, "send_weights", lambda self: self._version)
    words = ["cluster.runtime=local", "cluster.timeout_minutes=0.02", "--run-dir"]
    assert main(["train", RECIPE, *words, str(tmp_path / "run")]) == 1
    log = (tmp_path / "run" / "run.log").read_text()
    assert "The weights were sent 0 s ago, and not all who receive them are done" in log
    assert "player:0: waiting for a message from learner:0" in log
