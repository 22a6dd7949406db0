"""Episodes that are chains of tasks: told by the length they reached, and not by task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf.cli.main import main
from tests.packages import write_entry_points

from . import support
from .support import metrics
from .test_several_simulators import ONE

TYPES = ("chains", "reach")
CHAINS = """
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import SimulatorEnv, observation_space


@dataclass(frozen=True)
class Options:
    pass


class Chains(SimulatorEnv):
    Options = Options
    task_descriptions = ("push", "pull", "lift")
    chain_length = 3

    def __init__(self, options):
        super().__init__(options)
        self.observation_space = observation_space({"states": (2,)})
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.length, self.task_id = seed % 4, 0  # how many of its tasks are carried out
        return {"states": np.zeros(2, np.float32)}, {}

    def step(self, action):
        earned = float(self.task_id < self.length)
        done = self.task_id == 2
        solved = bool(earned) and done
        self.task_id = min(self.task_id + 1, 2)
        return {"states": np.zeros(2, np.float32)}, earned, done, False, {"success": solved}


class Reach(Chains):
    task_descriptions = ("reach",)
    chain_length = 0

    def step(self, action):
        return {"states": np.zeros(2, np.float32)}, 1.0, True, False, {"success": True}
"""


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[list[str], set[str]]]:
    """Train and evaluate in the envs of a section; the lines shown, and the names of metrics."""
    (tmp_path / "outside_chains.py").write_text(CHAINS)
    points = {"rlinf.envs": {n: f"outside_chains:{n.title()}" for n in TYPES}}
    write_entry_points(tmp_path, "outside-chains", points)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(section: str) -> tuple[list[str], set[str]]:
        recipe = tmp_path / "chains.yaml"
        recipe.write_text(support.SMALL.replace(ONE, f"\n  train: {section}\n"))
        given = ["evaluation.walk=true", "evaluation.episodes=8", "evaluation.num_envs=4"]
        assert main(["train", str(recipe), *given, "--run-dir", str(tmp_path / "run")]) == 0
        names = {name for line in metrics(tmp_path / "run") for name in line}
        return capsys.readouterr().out.splitlines(), names

    return run


def test_chains_are_told_by_length_in_evaluations_and_by_no_task_in_training(train) -> None:
    shown, names = train("{type: chains, max_episode_steps: 9, processes: 1}")
    for share, length in (("0.750", 1), ("0.500", 2), ("0.250", 3)):
        assert any(
            line.startswith(f"  {share} (") and line.endswith(f"reached {length} of 3")
            for line in shown
        ), shown
    assert "  1.500  mean length of 3" in shown
    assert {"env/return", "eval/reached/1", "eval/reached/3"} <= names
    assert not [name for name in names if name.endswith(("/push", "/pull", "/lift"))]


def test_chains_beside_another_simulator_are_told_so_and_its_episodes_by_task(train) -> None:
    chains, reach = (f"{{type: {n}, max_episode_steps: 9, processes: 1}}" for n in TYPES)
    shown, names = train(f"[{chains}, {reach}]")
    lengths = [line for line in shown if " of 3" in line]
    assert [line.split("  ")[-1] for line in lengths[-4:]] == [
        "reached 1 of 3", "reached 2 of 3", "reached 3 of 3", "mean length of 3",
    ]  # fmt: skip
    assert ", n = 4)  reached" in lengths[-2]
    assert any(line.startswith("  1.000 (") and line.endswith("reach") for line in shown)
    assert not any("not played" in line for line in shown)
    told = {"env/success/reach", "env/return/reach", "eval/success/reach", "eval/reached/3"}
    assert told <= names
    assert not [name for name in names if name.endswith(("/push", "/pull", "/lift"))]
