"""A simulator that dies costs its episode, not the run."""

from __future__ import annotations

from .killing import train_without_a_simulator
from .support import metrics, write_recipe
from .test_resume import overrides


def test_a_killed_simulator_is_rebuilt_and_counted(tmp_path):
    run = tmp_path / "run"
    train_without_a_simulator(write_recipe(tmp_path), run, overrides("local", 12))
    lines = metrics(run)
    assert len(lines) == 12
    assert sum(line.get("env/faults/crash", 0) for line in lines) >= 1
    updates = {line["actor/optimizer_steps"] for line in lines}
    assert updates == {4.0}, "every training phase had all of its samples"
