"""Every task of dm_control starts where its seed says, whatever was played before, and steps."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.dm_control.adapter import TASKS
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from tests.packages import require_simulator

STEPS = 3


def test_there_are_as_many_tasks_as_dm_control_has() -> None:
    assert len(set(TASKS)) == len(TASKS) == 51 + 25


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", TASKS)
def test_a_task_starts_from_its_seed_alone_and_steps(task: str) -> None:
    require_simulator("dm_control")
    vision = task.endswith("_vision")
    options = {"task": task, **({"images": True, "image_size": 32} if vision else {})}
    config = EnvConfig(
        type="dm_control", options=options, max_episode_steps=STEPS, processes=1,
        step_deadline=200.0,
    )  # fmt: skip
    starts, records = [], []
    listed = [(0, 1), (1, 2), (2, 1)]
    with SupervisedVectorEnv(config, num_envs=1, seed=0, episode_seeds=listed) as env:
        seen = env.reset()
        spec = env.env_spec
        actions = np.clip(0.3, spec.action_low, spec.action_high).astype(np.float32)
        while len(records) < len(listed):
            starts.append({key: value.copy() for key, value in seen.items()})
            step = env.chunk_step(np.broadcast_to(actions, (1, STEPS, spec.action_dim)).copy())
            assert not step.faults, step.faults
            records += step.episodes
            seen = step.observations
    assert all(record.valid and record.episode_len == STEPS for record in records)
    for key in starts[0]:
        assert np.array_equal(starts[0][key], starts[2][key])
    assert not np.array_equal(starts[0]["states"], starts[1]["states"])
    assert records[0].episode_return == records[2].episode_return
