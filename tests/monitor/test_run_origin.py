"""A reward function's file may move: what it holds, and which function is meant, may not change."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rlinf.errors import ConfigError
from rlinf.monitor.run_origin import Origin
from rlinf.rewards.config import RewardConfig


def rewards(function: str) -> RewardConfig:
    return RewardConfig.model_validate(
        {"functions": {"mine": {"type": "function", "function": function}}}
    )


def test_a_function_may_move_and_neither_change_nor_be_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(sample): return 1.0\ndef other(sample): return 0.0\n")
    began = Origin(**json.loads(json.dumps(asdict(Origin.of(rewards(f"{file}:score"))))))

    def go_on(function: str) -> None:
        config = rewards(function)
        began.refuse_other_config(config, (), why="a resumed run")
        began.refuse_other_files(config)

    go_on(f"{file}:score")
    moved = file.rename(tmp_path / "moved.py")
    go_on(f"{moved}:score")
    with pytest.raises(ConfigError, match=r"not changeable: functions\.mine\.function = .*:other"):
        go_on(f"{moved}:other")
    with pytest.raises(ConfigError, match=r"not changeable: functions\.mine\.function = math:sin"):
        go_on("math:sin")
    with pytest.raises(ConfigError, match=r"say where it is: functions\.mine\.function=PATH:NAME"):
        go_on(f"{file}:score")
    moved.write_text("def score(sample): return 2.0\ndef other(sample): return 0.0\n")
    with pytest.raises(
        ConfigError, match=r"not what the run began with: moved\.py differs.* --changed-code, or "
    ):
        go_on(f"{moved}:score")
    began.refuse_other_files(rewards(f"{moved}:score"), changed_code=True)
