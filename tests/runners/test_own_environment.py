"""An environment of one's own with stacked grey pictures and several choices a step, in a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlinf.cli.main import main

from .support import metrics

ENVIRONMENT = '''
import gymnasium
import numpy as np
from gymnasium import spaces


class Quarter(gymnasium.Env):
    """Which row and column of a grey picture is bright."""

    observation_space = spaces.Box(0, 255, (32, 32), np.uint8)
    action_space = spaces.MultiDiscrete([2, 3], start=[0, 5])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.integers([2, 3])
        return self.drawn(), {}

    def drawn(self):
        picture, (row, column) = np.zeros((32, 32), np.uint8), self.place
        picture[16 * row : 16 * row + 16, 10 * column : 10 * column + 10] = 255
        return picture

    def step(self, action):
        assert self.action_space.contains(action), action
        right = bool(np.array_equal(action - [0, 5], self.place))
        return self.drawn(), float(right), True, False, {"is_success": right}


def stacked():
    return gymnasium.wrappers.FrameStackObservation(Quarter(), 2)


gymnasium.register("Quarter-v0", entry_point=stacked)
'''
RECIPE = """
base: embodied/cartpole_ppo
runner: {total_env_steps: 128}
env:
  num_envs: 8
  train:
    options: {id: "quarter:Quarter-v0", success_key: is_success, render_mode: null}
    max_episode_steps: 5
without: [env.train.options.success_return]
rollout: {steps: 8}
model:
  {type: categorical_cnn, use_states: false, kernel_sizes: [4], strides: [4], channels: [4],
   image_features: 16}
actor: {global_batch_size: 64, micro_batch_size: 64}
evaluation: {episodes: 8, interval: 2, periodic_episodes: 8}
"""


def test_it_is_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quarter.py").write_text(ENVIRONMENT, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", "mine.yaml", "--run-dir", "run"]) == 0
    rows = metrics(tmp_path / "run")
    # Two choices of 2 and 3: at the start they are about equally likely.
    entropy = next(row["actor/entropy"] for row in rows if "actor/entropy" in row)
    assert entropy == pytest.approx(math.log(2) + math.log(3), rel=0.1)
    assert main(["eval", "run", "--episodes", "4"]) == 0
