"""Kills runs of the command line at random moments and continues them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rlinf.cli.main import main
from tests.warm import Warm

START_SECONDS = 120.0
COMMAND = [
    "-c",
    # The tests may run under nohup.
    "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
    "from rlinf.__main__ import main; raise SystemExit(main())",
]


@dataclass(frozen=True)
class Task:
    """A run that can be killed.

    Args:
        write_recipe: Writes its recipe into a directory.
        overrides: For a runtime and a number of steps.
        workers: Beginnings of the names of its worker processes on ray.
        pause: Longest time between a step and the kill, in seconds; about that of a step.
        compare: Asserts that two runs are equal, to the bit.
    """

    write_recipe: Callable[[Path], Path]
    overrides: Callable[[str, int], list[str]]
    workers: tuple[str, ...]
    pause: float
    compare: Callable[[Path, Path], None]


def start(*arguments: str) -> Warm:
    """A command, in a process group of its own."""
    return Warm([*COMMAND, *arguments], merged=True)


def finish(*arguments: str) -> None:
    """Run a command to its end, which must be a good one, in this process."""
    torch.set_num_threads(1)
    assert main(list(arguments)) == 0


def lines(run: Path) -> int:
    """Steps that a run has logged."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process: Warm, run: Path, count: int) -> bool:
    """Wait until the run has logged that many lines; False where it ended before."""
    deadline = time.monotonic() + START_SECONDS
    while lines(run) < count:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def ended(process: Warm) -> Iterator[None]:
    """Whatever happens, nothing of the process is left."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def train_without_a_simulator(recipe: Path, run: Path, options: Sequence[str]) -> None:
    """Train to the end; on the way the first env process is killed."""
    process = start("train", str(recipe), *options, "--run-dir", str(run))
    with ended(process):
        assert wait_for_lines(process, run, 2)
        (template,) = psutil.Process(process.pid).children()
        template.children()[0].kill()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output


def kill_and_resume(
    task: Task, tmp_path: Path, runtime: str, *, kills: int, steps: int, victim: str
) -> None:
    """Kill a run again and again, then compare it with one that was left alone."""
    recipe = str(task.write_recipe(tmp_path))
    options = task.overrides(runtime, steps)
    finish("train", recipe, *options, "--run-dir", str(tmp_path / "whole"))
    run = tmp_path / "killed"
    moments = random.Random(20260101)
    arguments = ["train", recipe, *options, "--run-dir", str(run)]
    for _ in range(kills):
        process = start(*arguments)
        with ended(process):
            if not wait_for_lines(process, run, lines(run) + moments.randint(1, 3)):
                break
            time.sleep(moments.uniform(0, task.pause))
            kill(process, task, victim, moments)
        arguments = ["resume", str(run)]
    finish("resume", str(run))
    assert lines(run) == lines(tmp_path / "whole") >= steps
    task.compare(tmp_path / "whole", run)


def kill(process: Warm, task: Task, victim: str, moments: random.Random) -> None:
    """Kill the driver, or one of its workers, after which the driver must end by itself."""
    if victim == "driver":
        process.kill()
        return
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if any(name in " ".join(child.cmdline()) for name in task.workers)
    ]
    assert workers, "no worker process was found"
    moments.choice(workers).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output.decode()
    assert b"died" in output or b"killed" in output, output.decode()
