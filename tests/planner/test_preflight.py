"""Memory: what processes and devices held, what would fit, and that a real run holds the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlinf.cli.main import main
from rlinf.errors import ConfigError, RunFailure
from rlinf.flow.executor import StepReport
from rlinf.flow.planning_traits import Knob
from rlinf.flow.stage_worker import StageCost, StageReport, WorkerPlace
from rlinf.monitor.memory import (
    MemoryWatch,
    ProcessMemory,
    TreeWatch,
    process_memory,
    reset_peaks,
    tree_memory,
)
from rlinf.planner import preflight
from rlinf.planner.preflight import measure_worst_step
from rlinf.runners.embodied import Embodied
from tests.planner.failing_steps import MIB, Broken, Full, Gone, Greedy, Wrong, allocate
from tests.runners import reasoning_support, support


def test_a_peak_that_is_over_is_remembered() -> None:
    reset_peaks()
    before = process_memory(os.getpid())
    block = allocate(96 * MIB)
    del block
    after = process_memory(os.getpid())
    assert after.peak - before.peak > 80 * MIB
    assert after.now - before.now < 40 * MIB
    reset_peaks()
    assert process_memory(os.getpid()).peak < after.peak - 60 * MIB


def test_growth_of_a_shared_process_is_sampled() -> None:
    with MemoryWatch(own_process=False) as watch:
        block = allocate(96 * MIB)
        time.sleep(0.1)
        del block
        held = watch.held()
    assert held.peak > 80 * MIB
    assert held.resident < 60 * MIB


def holding(mib: int, seconds: float) -> list[str]:
    """A process that holds so much for a while."""
    words = f"import time; block = b'x' * ({mib} * 2**20); time.sleep({seconds})"
    return [sys.executable, "-c", words]


def test_processes_that_ended_count() -> None:
    with TreeWatch(interval=0.05) as watch:
        child = subprocess.Popen(holding(96, 0.7))
        child.wait()
    [found] = [process for process in watch.processes if process.pid == child.pid]
    assert found.peak > 90 * MIB


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_held_together_is_held_at_the_same_time(at_once: bool) -> None:
    # A server for forks, which other tests leave behind, is of the tree as well.
    own = sum(process.now for process in tree_memory())
    with TreeWatch(interval=0.05) as watch:
        children = [subprocess.Popen(holding(160, 1.5))]
        if not at_once:
            children[0].wait()
        children.append(subprocess.Popen(holding(160, 1.5)))
        for child in children:
            child.wait()
    beside = watch.together - own
    assert {child.pid for child in children} <= {process.pid for process in watch.processes}
    if at_once:
        assert beside > 2 * 150 * MIB
    else:
        assert 150 * MIB < beside < 250 * MIB


@pytest.mark.parametrize(
    ("limit", "expected", "most_tries"),
    [(0.91, "k=14", 2), (0.9, "k=12", 2), (0.55, "k=4", 2), (0.31, "k=1", 1), (0.2, None, 1)],
)
def test_the_largest_value_that_fits_is_found_in_few_measurements(
    limit: float, expected: str | None, most_tries: int
) -> None:
    """Memory is 0.25 of what 16 items take, and the rest in proportion."""
    tried = []

    def measured(value: int) -> preflight.MemoryReport:
        tried.append(value)
        total = round(1000 * (0.25 + 0.75 * value / 16))
        return preflight.MemoryReport((), total, round(1000 * limit))

    knob = Knob("k", 16)
    report = preflight.MemoryReport((), 1000, round(1000 * limit))
    values = [value for value in range(15, 0, -1) if value in {14, 12, 8, 7, 4, 2, 1}]
    found = preflight._largest_fitting(values, knob, report, measured)
    assert (found and found.change) == expected
    assert len(tried) <= most_tries


def test_smaller_values_are_divisors_and_halves() -> None:
    assert Knob("a", 12).smaller() == (6, 4, 3, 2, 1)
    assert Knob("a", 50).smaller() == (25, 12, 10, 6, 5, 3, 2, 1)
    assert Knob("a", 1).smaller() == ()


def stage(peak: int, resident: int) -> list[StageReport]:
    cost = StageCost(peak_bytes=peak, resident_bytes=resident)
    return [StageReport(None, 1.0, 0.0, 0, 0, [], cost)]


def _found() -> tuple[list[StepReport], list[WorkerPlace]]:
    """One step on two devices of 100 bytes."""
    stages = {"env": stage(5, 4), "rollout": stage(40, 30), "actor": stage(70, 50)}
    places = [
        WorkerPlace("actor:0", 1, (0,), {0: 100}),
        WorkerPlace("env:0", 2, (1,), {1: 100}),
    ]
    return [StepReport(stages, [])], places


def test_a_device_holds_what_works_and_what_rests_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    config = support.small_config(
        tmp_path, "cluster.cpu_devices_per_node=2",
        "cluster.component_placement={env: '1', rollout: '0', actor: '0'}",
    )  # fmt: skip
    flow = Embodied.flow(config)
    first, second = preflight.device_peaks(config, flow, *_found())
    assert (first.device, first.peak) == (0, 100)  # 70 of the actor, and 30 that rest
    assert (second.device, second.peak) == (1, 5)
    report = preflight.MemoryReport((), 10, 100, (first, second))
    assert report.fits
    assert report.excess == pytest.approx(1.0)


def test_a_device_holds_the_processes_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    config = support.small_config(
        tmp_path, "cluster.cpu_devices_per_node=2", "env.num_envs=8",
        "cluster.component_placement={env: '0:0-2,1:3', 'rollout,actor': '0'}",
    )  # fmt: skip
    first, second = preflight.device_peaks(config, Embodied.flow(config), *_found())
    assert first.peak == 3 * 4 + 30 + 70  # environments and policy rest while the actor trains
    assert second.peak == 5


def test_processes_belong_to_the_workers_that_started_them() -> None:
    def process(pid: int, parent: int, peak: int, *command: str) -> ProcessMemory:
        return ProcessMemory(pid, parent, command, peak, peak)

    me, envs = os.getpid(), "rlinf.envs.supervised.process"
    found = preflight.Processes(
        [
            process(me, 1, 10, "python"),
            process(-2, me, 40, "ray::EnvWorker.run"),
            process(-6, -2, 3, "python", "rlinf.processes.template", "7", envs),
            process(-3, -6, 30, "python", "rlinf.processes.template", "7", envs),
            process(-4, me, 50, "ray::ActorWorker"),
            process(-5, me, 5, "/usr/bin/raylet", "--x"),
        ],
        [
            WorkerPlace("env:0", -2, (0,), {}),
            WorkerPlace("actor:0", -4, (0, 1), {}),
            WorkerPlace("thread:0", me, (0,), {}),
        ],
        driver=me,
    )
    assert [(p.role, p.peak) for p in found.peaks()] == [
        ("actor:0", 50), ("env:0", 40), ("rlinf.envs.supervised.process of env:0", 30),
        ("driver", 10), ("raylet, process -5", 5), ("rlinf.envs.supervised.process of env:0", 3),
    ]  # fmt: skip
    assert [(d.device, d.peak) for d in found.slots(1000)] == [(0, 98), (1, 25)]


@pytest.mark.parametrize(
    ("runner", "why"), [(Greedy, "memory of the host"), (Full, "memory was full")]
)
def test_a_step_that_runs_out_of_memory_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: type[Greedy], why: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    config = support.small_config(tmp_path)
    found = measure_worst_step(config, runner, Embodied.flow, 900 * MIB)
    assert found.ended is not None
    assert why in found.ended
    report = preflight.MemoryReport((), found.together, 2**60, (), found.ended)
    assert not report.fits
    assert report.share == "more than 101 %"
    if runner is Greedy:
        # Ended soon after it held too much: what it may take is not a multiple of the limit.
        assert 900 * MIB < found.together < 1500 * MIB
        assert max(process.peak for process in found.processes) > 600 * MIB
        assert not psutil.pid_exists(found.driver)
    assert not list(tmp_path.glob("rlinf-preflight-*"))


@pytest.mark.parametrize(
    ("runner", "error", "words"),
    [
        (Wrong, ConfigError, "a.key"),
        (Broken, RunFailure, "IndexError: a mistake"),
        (Gone, RunFailure, "status 3"),
    ],
)
def test_a_step_that_fails_otherwise_says_so(
    tmp_path: Path, runner: type[Greedy], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        measure_worst_step(support.small_config(tmp_path), runner, Embodied.flow, 2**40)


PROGRAM = [sys.executable, "-c", "from rlinf.cli.main import main; raise SystemExit(main())"]


def watched(*words: str) -> int:
    """Most memory of a program and all that it starts [bytes]."""
    process = subprocess.Popen([*PROGRAM, *words], stdout=subprocess.DEVNULL)
    with TreeWatch(process.pid) as watch:
        assert process.wait() == 0
    return watch.together


@pytest.mark.slow
@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_the_preflight_holds_what_the_run_holds(task: str, tmp_path: Path) -> None:
    support_of: Any = {"embodied": support, "reasoning": reasoning_support}[task]
    recipe = str(support_of.write_recipe(tmp_path))
    # A program of its own, as this one may hold what other tests have imported.
    plan = [*PROGRAM, "plan", recipe, "--memory"]
    shown = subprocess.run(plan, capture_output=True, text=True, check=True).stdout
    [told] = re.findall(r"all at the same time: ([\d,]+) MiB", shown)
    before = int(told.replace(",", "")) * MIB
    run = watched("train", recipe, "--run-dir", str(tmp_path / "run"))
    assert 1 / 1.15 <= before / run <= 1.15


def test_nothing_is_left_of_a_preflight_that_is_killed(tmp_path: Path) -> None:
    recipe = support.write_recipe(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    words = [*PROGRAM, "plan", str(recipe), "--memory"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as program:
        process, children = psutil.Process(program.pid), set()
        end = time.monotonic() + 60
        while not any(scratch.rglob("config.yaml")) and not any(scratch.rglob("run")):
            assert time.monotonic() < end
            assert program.poll() is None
            time.sleep(0.02)
        children = set(process.children(recursive=True))
        program.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    while any(scratch.glob("rlinf-preflight-*")):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(support.write_recipe(tmp_path))
    assert main(["plan", recipe, "--memory", "--limit", "1M"]) == 2
    captured = capsys.readouterr()
    assert "it does not fit" in captured.out
    assert "env.num_envs=" in captured.out
    assert "nothing" not in captured.err
    assert "no smaller" in captured.err
    assert main(["plan", recipe, "--memory", "--limit", "64G"]) == 0
    out = capsys.readouterr().out
    assert "it fits" in out
    assert "KiB" not in out  # of what only watches for the end of a process
