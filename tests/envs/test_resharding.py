"""Envs divided among other workers go on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.supervised.block import reshard
from rlinf.envs.supervised.vector import SupervisedVectorEnv

CONFIG = EnvConfig.model_validate(
    {
        "type": "gymnasium", "options": {"id": "Pendulum-v1"}, "max_episode_steps": 7,
        "processes": 1,
    }
)  # fmt: skip


def workers(count: int) -> list[SupervisedVectorEnv]:
    size = 4 // count
    return [
        SupervisedVectorEnv(CONFIG, num_envs=size, first_env=rank * size, total_envs=4, seed=3)
        for rank in range(count)
    ]


def step(envs: list[SupervisedVectorEnv], time: int) -> tuple[np.ndarray, np.ndarray]:
    """Observations and rewards of all envs after the action of a time."""
    actions = np.sin(np.arange(4, dtype=np.float32) + time).reshape(4, 1, 1)
    size = 4 // len(envs)
    results = [env.chunk_step(actions[i * size : (i + 1) * size]) for i, env in enumerate(envs)]
    observations = np.concatenate([next(iter(r.observations.values())) for r in results])
    return observations.copy(), np.concatenate([r.rewards for r in results]).copy()


def close(envs: list[SupervisedVectorEnv]) -> None:
    for env in envs:
        env.close()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_training_goes_on_bitwise_with_other_workers(before: int, after: int) -> None:
    first = workers(before)
    try:
        for env in first:
            env.reset()
        for time in range(5):
            step(first, time)
        states = [env.state_dict() for env in first]
        expected = [step(first, time) for time in range(5, 12)]
    finally:
        close(first)
    second = workers(after)
    try:
        for env, state in zip(second, reshard(states, after), strict=True):
            env.load_state_dict(state)
        for time, (observations, rewards) in enumerate(expected, start=5):
            found = step(second, time)
            assert np.array_equal(found[0], observations)
            assert np.array_equal(found[1], rewards)
    finally:
        close(second)


def state(first: int, size: int, steps: int, outcomes: list[bool]) -> dict[str, Any]:
    return {
        "num_envs": size,
        "episode": {"steps": np.full(size, steps)},
        "observation": {"state": np.arange(first, first + size)},
        "log": np.ones((size, steps, 2), np.float32),
        "simulator": {"state": np.ones((size, steps), np.uint8), "size": np.full(size, steps)},
        "first_env": first,
        "carried_invalid": np.zeros(size, bool),
        "fault_watch": {"outcomes": np.array(outcomes, bool), "counts": {"crash": 1}},
    }


def test_counts_of_faults_stay_and_lengths_may_differ() -> None:
    parts = reshard([state(0, 2, 3, [True]), state(2, 2, 5, [False, True, False])], 1)
    [whole] = parts
    assert whole["fault_watch"]["counts"] == {"crash": 2}
    assert whole["fault_watch"]["outcomes"].tolist() == [True, False, True, False]
    assert whole["log"].shape == (4, 5, 2)
    back = reshard(parts, 2)
    assert [part["first_env"] for part in back] == [0, 2]
    assert [part["log"].shape for part in back] == [(2, 3, 2), (2, 5, 2)]
    assert sum(len(part["fault_watch"]["outcomes"]) for part in back) == 4
    assert [part["fault_watch"]["counts"] for part in back] == [{"crash": 2}, {}]


def test_envs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        reshard([state(0, 3, 1, [])], 2)
