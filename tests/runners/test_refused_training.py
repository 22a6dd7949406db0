"""What stands against a training alone leaves alone what a run has trained."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from rlinf.cli.tasks import read_config
from rlinf.errors import ConfigError

from . import off_policy_support, reasoning_support, support

GROUPS = ("~algorithm", "algorithm.type=grpo", "env.train.group_size=2")
SMALLER = "actor.global_batch_size=32"


@pytest.mark.parametrize(
    ("small", "overrides", "words"),
    [
        (support, ("algorithm.critic_warmup_steps=8",), "critic_warmup_steps.*nearest: 7"),
        (support, ("algorithm.clip_log_ratio_max=0.1",), "clip_log_ratio_max.*nearest: 0.1824"),
        (
            support,
            ("model={type: squashed_mlp}", "algorithm.entropy_bonus=0.01"),
            "entropy_bonus.*nearest: 0",
        ),
        (
            support,
            (*GROUPS, SMALLER, "rollout.steps=20"),
            "rollout.steps.*whole episodes.*nearest: 25",
        ),
        (off_policy_support, ("env.train.auto_reset=false",), "auto_reset.*nearest: true"),
        (
            reasoning_support,
            ("algorithm={type: grpo, dynamic_sampling: true, max_resample: 0}",),
            "max_resample.*nearest: 1",
        ),
        (
            reasoning_support,
            ("rollout.group_size=1", "algorithm={type: reinforce_pp, dynamic_sampling: true}"),
            "group_size.*at least 2",
        ),
        (
            reasoning_support,
            ("algorithm={type: ppo, critic_warmup_steps: 4}", "critic={}"),
            "critic_warmup_steps.*nearest: 3",
        ),
    ],
)
def test_only_training_is_refused(
    tmp_path: Path, small: ModuleType, overrides: tuple[str, ...], words: str
) -> None:
    recipe = str(small.write_recipe(tmp_path))
    with pytest.raises(ConfigError, match=words):
        read_config(recipe, overrides)
    read_config(recipe, overrides, evaluated=True)
