"""Which of the placements that a run was under is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.planner.auto import Setting, fastest
from rlinf.runners.reasoning import Reasoning
from tests.runners.reasoning_support import small_config


def setting(directory: Path, label: str, seconds: list[float], *overrides: str) -> Setting:
    config = small_config(directory, "cluster.cpu_devices_per_node=2", *overrides)
    found = Setting.of(label, config, Reasoning.flow(config))
    found.seconds += seconds
    return found


def test_a_switch_is_never_what_makes_steps_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    together = "cluster.component_placement={'rollout,reward,actor': '0'}"
    apart = "cluster.component_placement={rollout: '1', 'reward,actor': '0'}"
    offloaded = "cluster.residency={'rollout,actor': offload}"
    kept = setting(tmp_path, "kept", [1.0, 1.1, 1.2], together)
    away = setting(tmp_path, "away", [0.9, 1.0, 1.1], together, offloaded)
    other = setting(tmp_path, "other", [0.9, 1.0, 1.1], apart, offloaded)
    assert away.median < kept.median
    assert fastest([kept, away]) is kept
    assert fastest([kept, other]) is other
