"""Episodes that are chains of tasks: told by the length they reached, and not by task."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.main import main
from tests.packages import write_entry_points

from . import support
from .support import metrics
from .test_several_simulators import ONE

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
"""


def test_chains_are_told_by_length_in_evaluations_and_by_no_task_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside_chains.py").write_text(CHAINS)
    points = {"rlinf.envs": {"chains": "outside_chains:Chains"}}
    write_entry_points(tmp_path, "outside-chains", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    section = "\n  train: {type: chains, max_episode_steps: 9, processes: 1}\n"
    recipe = tmp_path / "chains.yaml"
    recipe.write_text(support.SMALL.replace(ONE, section))
    run = tmp_path / "run"
    given = ["evaluation.walk=true", "evaluation.episodes=8", "evaluation.num_envs=4"]
    assert main(["train", str(recipe), *given, "--run-dir", str(run)]) == 0
    shown = capsys.readouterr().out
    for share, length in (("0.750", 1), ("0.500", 2), ("0.250", 3)):
        assert any(
            line.startswith(f"  {share} (") and line.endswith(f"reached {length} of 3")
            for line in shown.splitlines()
        ), shown
    assert "  1.500  mean length of 3" in shown
    lines = metrics(run)
    names = {name for line in lines for name in line}
    assert {"env/return", "eval/reached/1", "eval/reached/3"} <= names
    assert not [name for name in names if name.endswith(("/push", "/pull", "/lift"))]
