"""Memory in the profiles that runs leave behind: watched in steps that warm up, in no other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlinf.flow.executor import StepReport
from rlinf.monitor.memory import Held, MemoryWatch
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner.measure import PROFILE_FILE, WARM_UP_STEPS, StepRecorder
from rlinf.planner.profile import Profile
from rlinf.runners.embodied import Embodied
from rlinf.runners.run import Run
from tests.runners.support import small_config

SLOTS = "cluster.cpu_devices_per_node=2"
SPLIT = ("rollout.block_size=4", SLOTS)
AUTO = "cluster.plan={auto: {steps: 1, least_gain: 0.0}}"
AHEAD = (
    "rollout.max_staleness=1", "cluster.component_placement={'env,rollout': '0', actor: '1'}",
)  # fmt: skip
HELD = 1000


@pytest.fixture(autouse=True)
def _two_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[list[StepReport]]:
    """The reports of a run, a list for each placement; every stage that is watched held as much.

    How far this process grows during a stage depends on the tests before.
    """
    found: list[list[StepReport]] = []
    recorders: list[StepRecorder] = []
    observe = StepRecorder.observe

    def record(recorder: StepRecorder, report: StepReport, seconds: float | None = None) -> None:
        if not any(recorder is other for other in recorders):
            recorders.append(recorder)
            found.append([])
        found[-1].append(report)
        observe(recorder, report, seconds)

    monkeypatch.setattr(StepRecorder, "observe", record)
    monkeypatch.setattr(MemoryWatch, "held", lambda watch: Held(HELD, HELD // 2))
    return found


def train(directory: Path, *overrides: str) -> Profile:
    config = small_config(
        directory, *SPLIT, "evaluation.interval=0", "evaluation.stop_at_success=null", *overrides
    )
    with RunDirectory.create(directory, "small", path=directory / "run") as run:
        Run(Embodied, config, run, threading.Event()).run()
    return Profile.load(run.path / PROFILE_FILE)


@pytest.mark.parametrize(
    ("overrides", "warm_up"),
    [
        (("runner.total_env_steps=1280",), WARM_UP_STEPS),
        (("runner.total_env_steps=2048", AUTO), WARM_UP_STEPS),
        # The first step under a placement may have been generated under the one before.
        (("runner.total_env_steps=1408", *AHEAD), WARM_UP_STEPS + 1),
        pytest.param(
            ("runner.total_env_steps=4096", *AHEAD, AUTO),
            WARM_UP_STEPS + 1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "auto", "ahead", "ahead and auto"],
)
def test_every_measurement_of_a_run_has_memory_and_no_step_that_counts_is_watched(
    tmp_path: Path, reports: list[list[StepReport]], overrides: tuple[str, ...], warm_up: int
) -> None:
    profile = train(tmp_path, *overrides)
    assert set(profile.components) == {"env", "rollout", "actor"}
    for name, part in profile.components.items():
        assert part.resident_bytes > 0, name
        assert all(measured.peak_bytes >= HELD for measured in part.measurements), name
    assert (len(reports) > 1) == (AUTO in overrides)
    for of_placement in reports:
        for report in of_placement[warm_up:]:
            stages = [stage for workers in report.stages.values() for stage in workers]
            assert all(stage.cost.peak_bytes == 0 for stage in stages)


@pytest.mark.slow
def test_workers_with_a_process_of_their_own_hold_what_that_holds(tmp_path: Path) -> None:
    profile = train(tmp_path, "runner.total_env_steps=1280", "cluster.runtime=ray")
    for part in profile.components.values():
        [measured] = part.measurements
        assert measured.peak_bytes > 50 * 2**20  # an interpreter with torch
