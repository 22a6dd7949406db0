"""A warm-up of the critic ends before the run does, and the step that memory is looked at with has
none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import ConfigError

from . import reasoning_support, support

WARM_UP = "algorithm.critic_warmup_steps=1"


def test_a_policy_that_would_never_be_trained_is_refused(tmp_path: Path) -> None:
    assert support.small_config(tmp_path, "algorithm.critic_warmup_steps=7").training_steps == 8
    with pytest.raises(ConfigError, match="8 leaves none of the 8 training steps") as found:
        support.small_config(tmp_path, "algorithm.critic_warmup_steps=8")
    assert "algorithm.critic_warmup_steps" in str(found.value)
    assert "nearest: 7" in str(found.value)


@pytest.mark.parametrize(
    ("small_config", "overrides"),
    [
        (support.small_config, (WARM_UP,)),
        (reasoning_support.small_config, ("algorithm.type=ppo", "critic={}", WARM_UP)),
    ],
    ids=["embodied", "reasoning"],
)
def test_the_worst_step_trains_the_policy(
    tmp_path: Path, small_config: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    config = small_config(tmp_path, *overrides)
    worst = small_config(tmp_path, *overrides, *config.planning.worst_case)
    assert worst.training_steps == 1
    assert worst.algorithm.critic_warmup_steps == 0
