"""Every task of LIBERO is built, starts from its recorded states and steps; so does LIBERO-PRO."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.libero import ORIGINAL, instruction_in
from rlinf.envs.results import EpisodeRecord
from rlinf.envs.supervised.vector import SupervisedVectorEnv
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
    require_simulator("libero")
    python = EnvConfig(type="libero", max_episode_steps=STEPS).interpreter
    done = subprocess.run(
        [str(python), "-c", _WORDS, json.dumps([*ORIGINAL, *VARIANTS])],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout.rpartition("told ")[2])
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
