"""Tasks whose resets always fail: named, left out where that is wanted, never averaged away."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from rlinf.envs.supervised.failing_tasks import BEGUN, FAILED, REPLACED
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import RunFailure

TASKS = 3
BROKEN = {"one_in": TASKS, "at_step": 0}  # a seed that 3 divides is one of task 0


def broken(point, misbehaviour: str = "raise", **settings):
    settings = {"leave_out_failing_tasks": True, "processes": 1, **BROKEN, **settings}
    return point(misbehaviour, options={"tasks": TASKS}, **settings)


def zeros(env) -> np.ndarray:
    return np.zeros((env.num_envs, 4, 2), np.float32)


def test_a_task_whose_resets_always_fail_stops_the_run_in_one_line(point):
    config = broken(point, leave_out_failing_tasks=False, max_fault_rate=1.0)
    with (
        SupervisedVectorEnv(config, num_envs=12, seed=0) as env,
        pytest.raises(RunFailure) as failure,
    ):
        env.reset()
    message = str(failure.value)
    assert "task 0 of 3 (task 0) could not be reset 3 times in a row, and never was" in message
    assert "ValueError: the gripper fell off" in message
    assert "env.train.leave_out_failing_tasks=true" in message
    assert "\n" not in message


@pytest.mark.parametrize("misbehaviour", ["raise", "crash"])
def test_the_other_tasks_go_on_where_that_is_wanted(point, caplog, misbehaviour):
    """No fault is allowed, but those that found the task out do not count."""
    config = broken(point, misbehaviour, max_fault_rate=0.0, max_episode_steps=4)
    with caplog.at_level(logging.WARNING), SupervisedVectorEnv(config, num_envs=12, seed=0) as env:
        env.reset()
        steps = [env.chunk_step(zeros(env)) for _ in range(4)]
        counts = env.task_resets
    assert all(step.valid.all() for step in steps)
    assert {seed % TASKS for step in steps for seed in step.reset_seeds.tolist()} == {1, 2}
    assert counts[0, FAILED] == 3
    assert counts[0, BEGUN] == 0
    assert counts[0, REPLACED] > 0
    assert (counts[1:, [FAILED, REPLACED]] == 0).all()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "task 0 of 3 (task 0) could not be reset" in warning
    assert "it is left out" in warning


def test_a_group_shares_the_seed_that_takes_the_place_also_in_fixed_states(point):
    config = broken(
        point, max_fault_rate=0.0, group_size=2, use_fixed_reset_states=True, max_episode_steps=4
    )
    with SupervisedVectorEnv(config, num_envs=12, seed=0) as env:
        env.reset()
        env.reset()  # some began before the task was found out
        step = env.chunk_step(zeros(env))
    assert np.array_equal(step.reset_seeds[0::2], step.reset_seeds[1::2])
    assert (step.reset_seeds % TASKS != 0).all()


def test_a_resumed_run_knows_what_was_left_out(point):
    config = broken(point, max_fault_rate=0.0, max_episode_steps=4)
    with SupervisedVectorEnv(config, num_envs=12, seed=0) as env:
        env.reset()
        state = env.state_dict()
        unbroken = [env.chunk_step(zeros(env)) for _ in range(3)]
    with SupervisedVectorEnv(config, num_envs=12, seed=0) as env:
        env.load_state_dict(state)
        resumed = [env.chunk_step(zeros(env)) for _ in range(3)]
        assert env.task_resets[0, FAILED] == 3
    for one, other in zip(unbroken, resumed, strict=True):
        assert np.array_equal(one.reset_seeds, other.reset_seeds)
        assert np.array_equal(one.observations["states"], other.observations["states"])
        assert not other.faults


def test_no_task_that_is_left_ends_the_run(point):
    config = broken(point, one_in=1)
    with (
        SupervisedVectorEnv(config, num_envs=12, seed=0) as env,
        pytest.raises(RunFailure, match="no task is left: every reset of task 0 of 3"),
    ):
        env.reset()


def played(config, episodes) -> list:
    with SupervisedVectorEnv(config, num_envs=4, seed=0, episode_seeds=episodes) as env:
        env.reset()
        records = list(env.chunk_step(zeros(env)).episodes)
        while not env.exhausted():
            records += env.chunk_step(zeros(env)).episodes
    return records


def test_an_evaluation_reports_every_episode_of_a_task_that_is_left_out(point):
    episodes = [(number, 30 + number) for number in range(20)]
    records = played(broken(point, max_fault_rate=0.0, max_episode_steps=4), episodes)
    assert sorted((record.episode_id, record.seed) for record in records) == episodes
    assert {record.task for record in records if not record.valid} == {0}
    assert all(record.valid == bool(record.seed % TASKS) for record in records)


def test_listed_episodes_that_cannot_begin_are_reported_once(point):
    """Also the first of an env, and those that follow an episode which ended in the same chunk."""
    episodes = [(number, 40 + number) for number in range(16)]
    config = point(
        "raise", one_in=5, at_step=0, max_fault_rate=1.0, max_episode_steps=4, processes=1
    )
    records = played(config, episodes)
    assert sorted((record.episode_id, record.seed) for record in records) == episodes
    assert all(record.valid == bool(record.seed % 5) for record in records)


def test_a_batch_cannot_leave_tasks_out(point):
    with pytest.raises(ValueError, match="resets a batch together"):
        point(type="point_batch", leave_out_failing_tasks=True)
