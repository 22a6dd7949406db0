"""A run that was killed and resumed equals one that was not, to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .support import assert_equal_runs, metrics, write_recipe

START_SECONDS = 120.0
COMMAND = [sys.executable, "-c", "from rlinf.cli.main import main; raise SystemExit(main())"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def overrides(runtime: str, steps: int) -> list[str]:
    return [
        f"cluster.runtime={runtime}",
        f"runner.total_env_steps={steps * 128}",
        "checkpoint.keep_last=3",
        "checkpoint.keep_best=0",
    ]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*arguments: str) -> None:
    process = start(*arguments)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process: subprocess.Popen[str], run: Path, count: int) -> bool:
    """Wait until the run has logged that many lines; False where it ended before."""
    deadline = time.monotonic() + START_SECONDS
    while lines(run) < count:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, nothing of the process is left."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def kill_and_resume(tmp_path: Path, runtime: str, *, kills: int, steps: int, victim: str) -> None:
    """Kill a run again and again, then compare it with one that was left alone."""
    recipe = str(write_recipe(tmp_path))
    options = overrides(runtime, steps)
    finish("train", recipe, *options, "--run-dir", str(tmp_path / "whole"))
    run = tmp_path / "killed"
    moments = random.Random(20260101)
    arguments = ["train", recipe, *options, "--run-dir", str(run)]
    for _ in range(kills):
        process = start(*arguments)
        with ended(process):
            if not wait_for_lines(process, run, lines(run) + moments.randint(1, 3)):
                break
            time.sleep(moments.uniform(0, 0.15))
            kill(process, victim, moments)
        arguments = ["resume", str(run)]
    finish("resume", str(run))
    assert len(metrics(run)) == steps
    assert_equal_runs(tmp_path / "whole", run)


def kill(process: subprocess.Popen[str], victim: str, moments: random.Random) -> None:
    """Kill the driver, or one of its workers, after which the driver must end by itself."""
    if victim == "driver":
        process.kill()
        return
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if any(name in " ".join(child.cmdline()) for name in ("EnvW", "RolloutW", "ActorW"))
    ]
    assert workers, "no worker process was found"
    moments.choice(workers).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "died" in output or "killed" in output, output


def test_killed_driver_local(tmp_path):
    kill_and_resume(tmp_path, "local", kills=2, steps=8, victim="driver")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("runtime", "victim"), [("local", "driver"), ("ray", "driver"), ("ray", "worker")]
)
def test_killed_at_twenty_moments(tmp_path, runtime, victim):
    kill_and_resume(tmp_path, runtime, kills=20, steps=56, victim=victim)


def test_the_first_interrupt_commits_and_ends_cleanly(tmp_path):
    recipe = str(write_recipe(tmp_path))
    options = overrides("local", 400)
    run = tmp_path / "run"
    process = start("train", recipe, *options, "--run-dir", str(run))
    with ended(process):
        assert wait_for_lines(process, run, 2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert "rlinf resume" in output
    newest = (run / "checkpoints" / "latest").resolve().name
    assert newest == f"step_{len(metrics(run)):08d}"
