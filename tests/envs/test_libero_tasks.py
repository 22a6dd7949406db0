"""Every task of LIBERO is built, starts from its recorded states and steps; so does LIBERO-PRO."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
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


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_simulator("libero")


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
