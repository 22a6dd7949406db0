"""A whole run whose engine is killed: the same metrics and weights as one that was left alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("transformers")

from tests.runners.reasoning_support import train, untimed, weights

# That a kill changes no bit of what one engine answers is tested in test_process.py.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


PROCESS = ("rollout.engine.process={max_restarts: 5}", "runner.total_steps=16")


def engine_processes(*, with_weights: bool = False) -> list[int]:
    """Engine processes below this one, or those of them that were given weights."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            serves = "rlinf.engines.process.child" in child.cmdline()
            maps = Path(f"/proc/{child.pid}/maps").read_text() if with_weights else ""
        except (psutil.Error, OSError):
            continue
        if serves and (not with_weights or "memfd:rlinf-engine-weights" in maps):
            found.append(child.pid)
    return found


def test_a_run_survives_kills_of_its_engine(tmp_path: Path) -> None:
    # In a process, too: numbers are rounded otherwise where weights lie elsewhere in memory.
    undisturbed = train(tmp_path / "undisturbed", *PROCESS)
    ended = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        """Kill three processes, each a moment after it was given weights."""
        while not ended.is_set() and len(killed) < 3:
            for number in engine_processes(with_weights=True):
                if number not in killed:
                    time.sleep(0.1 + 0.15 * len(killed))
                    os.kill(number, signal.SIGKILL)
                    killed.append(number)
            time.sleep(0.02)

    watcher = threading.Thread(target=kill)
    watcher.start()
    try:
        disturbed = train(tmp_path / "killed", *PROCESS)
    finally:
        ended.set()
        watcher.join()
    assert killed
    assert engine_processes() == []
    lines, expected = untimed(disturbed), untimed(undisturbed)
    restarts = [line.pop("rollout/engine_restarts") for line in lines[1:]]
    # One that is killed after the last completion is not replaced.
    assert sum(restarts) in {len(killed), max(1, len(killed) - 1)}
    assert [line.pop("rollout/engine_restarts") for line in expected[1:]] == [0.0] * len(restarts)
    assert expected == lines
    after = weights(disturbed)
    assert all(np.array_equal(value, after[name]) for name, value in weights(undisturbed).items())
