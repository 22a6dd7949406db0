"""A simulator that dies costs its episode, not the run."""

from __future__ import annotations

import psutil

from .killing import ended, start, wait_for_lines
from .support import metrics, write_recipe
from .test_resume import overrides


def test_a_killed_simulator_is_rebuilt_and_counted(tmp_path):
    recipe, run = str(write_recipe(tmp_path)), tmp_path / "run"
    process = start("train", recipe, *overrides("local", 30), "--run-dir", str(run))
    with ended(process):
        assert wait_for_lines(process, run, 2)
        psutil.Process(process.pid).children()[0].kill()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    lines = metrics(run)
    assert len(lines) == 30
    assert sum(line.get("env/faults/crash", 0) for line in lines) >= 1
    updates = {line["actor/optimizer_steps"] for line in lines}
    assert updates == {4.0}, "every training phase had all of its samples"
