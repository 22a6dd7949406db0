"""Chunks, resets, stages and episode lists of the vector env."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError

NO_MOTION = np.zeros((4, 2), np.float32)


def towards_origin(observations: dict[str, np.ndarray], chunk: int) -> np.ndarray:
    """Return actions [n, C, 2] that walk to the origin, planned open loop from one observation."""
    position = observations["states"].copy()
    columns = []
    for _ in range(chunk):
        columns.append(np.clip(-10 * position, -1, 1))
        position += 0.1 * columns[-1]
    return np.stack(columns, axis=1)


def test_a_chunk_stops_at_the_end_of_an_episode(point):
    """Hand calculation: the example env walks at most 0.1 per coordinate and step."""
    with SupervisedVectorEnv(point(), num_envs=4, seed=1) as env:
        start = env.reset()["states"].astype(np.float64)
        step = env.chunk_step(towards_origin({"states": start}, 15))
    for row in range(4):
        position, expected = start[row].copy(), np.zeros(15)
        for column in range(15):
            position = position + np.clip(-10 * position, -1, 1) * 0.1
            distance = np.linalg.norm(position)
            expected[column] = -distance
            if distance < 0.1:
                break
        np.testing.assert_allclose(step.rewards[row], expected, atol=1e-5)
        assert step.terminations[row].tolist() == [False] * 14 + [True]
        record = step.episodes[row]
        assert (record.episode_len, record.success_once, record.valid) == (column + 1, True, True)
        assert record.episode_return == pytest.approx(expected.sum(), abs=1e-5)
        assert record.reward == pytest.approx(record.episode_return / record.episode_len)
    assert step.final_mask.all()
    assert (np.linalg.norm(step.final_observations["states"], axis=1) < 0.1).all()
    assert (np.linalg.norm(step.observations["states"], axis=1) > 0.1).all()
    assert not step.truncations.any()


def test_only_truncation_ends_an_episode_when_terminations_are_ignored(point):
    config = point(ignore_terminations=True, max_episode_steps=20)
    with SupervisedVectorEnv(config, num_envs=2, seed=1) as env:
        first = env.chunk_step(towards_origin(env.reset(), 15))
        assert not (first.terminations | first.truncations).any()
        assert first.episodes == ()
        second = env.chunk_step(np.zeros((2, 15, 2), np.float32))
    assert second.truncations[:, -1].all()
    assert not second.terminations.any()
    assert not second.rewards[:, 5:].any()
    assert all(record.success_once and record.episode_len == 20 for record in second.episodes)


@pytest.mark.parametrize("kind", ["point", "point_batch"])
@pytest.mark.parametrize("at_end", [False, True])
def test_success_may_be_that_of_the_last_step_alone(point, kind, at_end):
    """Through the origin and on; or there at last."""
    config = point(
        type=kind, ignore_terminations=True, max_episode_steps=15, processes=1,
        options={"at_end": at_end},
    )  # fmt: skip
    with SupervisedVectorEnv(config, num_envs=2, seed=1) as env:
        through = towards_origin(env.reset(), 15)
        through[:, -3:] = 1.0
        passed = env.chunk_step(through).episodes
        stayed = env.chunk_step(towards_origin(env.reset(), 15)).episodes
    assert [each.success_once for each in passed] == [not at_end] * 2
    assert not any(each.success_at_end for each in passed)
    assert all(each.success_once and each.success_at_end for each in stayed)


@pytest.mark.parametrize(("over", "succeeds"), [(-0.01, True), (0.01, False)])
def test_a_return_below_zero_counts_when_the_episode_is_over(over, succeeds):
    """Each of the steps before had a higher one."""

    def played(bound: float | None):
        section = {"id": "Pendulum-v1", "success_return": bound}
        config = EnvConfig(type="gymnasium", options=section, max_episode_steps=10, processes=1)
        with SupervisedVectorEnv(config, num_envs=1, seed=1) as env:
            env.reset()
            return env.chunk_step(np.zeros((1, 10, 1), np.float32)).episodes[0]

    reached = played(None).episode_return
    record = played(reached + over)
    assert (record.success_once, record.success_at_end) == (succeeds, succeeds)


def test_without_auto_reset_an_ended_env_rests_until_the_next_reset(point):
    config = point(auto_reset=False, max_episode_steps=4)
    with SupervisedVectorEnv(config, num_envs=4, seed=1) as env:
        env.reset()
        first = env.chunk_step(np.zeros((4, 4, 2)))
        assert first.truncations[:, -1].all()
        assert first.active.all()
        assert not first.final_mask.any()
        assert first.final_observations is None
        assert len(first.episodes) == 4
        second = env.chunk_step(np.ones((4, 4, 2)))
        assert not second.active.any()
        assert not second.rewards.any()
        assert not second.truncations.any()
        assert second.episodes == ()
        assert np.array_equal(first.observations["states"], second.observations["states"])
        env.reset()
        assert env.chunk_step(np.ones((4, 4, 2))).active.all()


@pytest.mark.parametrize("auto_reset", [False, True])
def test_what_a_reset_would_cut_is_told_as_it_is(point, auto_reset):
    config = point(auto_reset=auto_reset, max_episode_steps=4)
    with SupervisedVectorEnv(config, num_envs=4, seed=1, stages=2) as env:
        for stage in (0, 1):
            env.reset(stage)
        assert env.unfinished() == []  # nothing was done yet
        taken = env.chunk_step(np.ones((2, 3, 2)), stage=1)
        cut = env.unfinished()
        assert [record.env for record in cut] == [2, 3]
        assert [record.episode_len for record in cut] == [3, 3]
        assert [record.episode_id for record in cut] == taken.episode_ids.tolist()
        assert [record.seed for record in cut] == taken.reset_seeds.tolist()
        np.testing.assert_allclose(
            [record.episode_return for record in cut], taken.rewards.sum(axis=1), rtol=1e-6
        )
        assert len(env.chunk_step(np.ones((2, 1, 2)), stage=1).episodes) == 2
        assert env.unfinished() == []


def test_rewards_are_scaled_and_returns_are_not(point):
    def first_step(scale: float):
        config = point(reward_scale=scale, max_episode_steps=3)
        with SupervisedVectorEnv(config, num_envs=2, seed=1) as env:
            env.reset()
            return env.chunk_step(np.ones((2, 3, 2)))

    plain, scaled = first_step(1.0), first_step(5.0)
    np.testing.assert_allclose(scaled.rewards, 5 * plain.rewards, rtol=1e-6)
    assert scaled.episodes == plain.episodes


@pytest.mark.parametrize("kind", ["point", "point_batch"])
def test_every_executed_action_costs_the_penalty_in_training_alone(point, kind):
    """An episode of four steps: of its second chunk of three, one action is executed."""

    def rollout(penalty: float) -> tuple[np.ndarray, list[float]]:
        config = point(
            type=kind, step_penalty=penalty, reward_scale=2.0, max_episode_steps=4, auto_reset=False
        )
        with SupervisedVectorEnv(config, num_envs=2, seed=1) as env:
            env.reset()
            steps = [env.chunk_step(np.ones((2, 3, 2))) for _ in range(2)]
        rewards = np.concatenate([step.rewards for step in steps], axis=1)
        return rewards, [each.episode_return for each in steps[1].episodes]

    (plain, returns), (paid, same) = rollout(0.0), rollout(0.25)
    np.testing.assert_allclose(plain - paid, 0.25 * np.array([[1, 1, 1, 1, 0, 0]] * 2), atol=1e-6)
    assert same == returns


def test_episodes_do_not_depend_on_the_split_over_workers_stages_and_processes(point):
    chunks = np.random.default_rng(0).uniform(-1, 1, (5, 8, 3, 2)).astype(np.float32)

    def observations(splits: int, stages: int, processes: int) -> np.ndarray:
        found = []
        for part in range(splits):
            size = 8 // splits
            rows = slice(part * size, (part + 1) * size)
            config = point(processes=processes, max_episode_steps=7)
            with SupervisedVectorEnv(
                config, num_envs=size, first_env=part * size, total_envs=8, seed=5, stages=stages
            ) as env:
                for stage in range(stages):
                    env.reset(stage)
                mine = []
                for chunk in chunks:
                    for stage, actions in enumerate(np.split(chunk[rows], stages)):
                        env.send(actions, stage)
                    results = [env.receive(stage) for stage in range(stages)]
                    mine.append(np.concatenate([r.observations["states"] for r in results]))
                found.append(np.stack(mine))
        return np.concatenate(found, axis=1)

    whole = observations(1, 1, 1)
    for split in ((1, 2, 3), (2, 1, 2), (2, 2, 1)):
        assert np.array_equal(whole, observations(*split))


def test_envs_of_a_group_share_reset_states_and_groups_do_not(point):
    with SupervisedVectorEnv(point(group_size=4, max_episode_steps=2), num_envs=8, seed=0) as env:
        first = env.reset()["states"]
        assert len(np.unique(first, axis=0)) == 2
        assert (first[:4] == first[0]).all()
        second = env.chunk_step(np.zeros((8, 2, 2))).observations["states"]
        assert len(np.unique(second, axis=0)) == 2
        assert not (second == first).all(axis=1).any()
        third = env.reset()["states"]
        assert not (third == first).all(axis=1).any()


def test_fixed_reset_states_are_those_of_every_epoch_and_of_another_run_of_the_seed(point):
    config = point(group_size=2, use_fixed_reset_states=True, auto_reset=False)

    def epochs(seed: int) -> list[np.ndarray]:
        with SupervisedVectorEnv(config, num_envs=4, seed=seed) as env:
            return [env.reset()["states"] for _ in range(3)]

    first = epochs(0)
    assert all(np.array_equal(first[0], other) for other in first + epochs(0))
    assert not np.array_equal(first[0], epochs(1)[0])


def test_training_and_evaluation_never_share_seeds(point):
    states = []
    for purpose in ("train", "eval"):
        with SupervisedVectorEnv(point(), num_envs=4, seed=0, purpose=purpose) as env:
            states.append(env.reset()["states"])
    assert not (states[0] == states[1]).any()


@pytest.mark.parametrize(("num_envs", "stages", "processes"), [(1, 1, 1), (4, 2, 2), (8, 1, 3)])
def test_a_list_of_episodes_is_walked_exactly_once(point, num_envs, stages, processes):
    episodes = [(100 + number, 7 * number) for number in range(5)]
    config = point(processes=processes, max_episode_steps=6, auto_reset=False)
    records = {}
    with SupervisedVectorEnv(
        config, num_envs=num_envs, seed=0, stages=stages, purpose="eval", episode_seeds=episodes
    ) as env:
        for wanted in (episodes, [(number, seed + 1) for number, seed in episodes[:3]]):
            records.clear()
            env.assign_episodes(wanted)
            for stage in range(stages):
                env.reset(stage)
            while not all(env.exhausted(stage) for stage in range(stages)):
                for stage in range(stages):
                    size = num_envs // stages
                    for record in env.chunk_step(np.ones((size, 4, 2)), stage).episodes:
                        assert record.episode_id not in records
                        records[record.episode_id] = record
            assert [(r.episode_id, r.seed) for _, r in sorted(records.items())] == wanted
    for number, seed in wanted:
        generator = np.random.default_rng(seed)
        position = generator.uniform(-1, 1, 2).astype(np.float32)
        total = 0.0
        for _ in range(records[number].episode_len):
            position = position + np.float32(0.1)
            total -= float(np.linalg.norm(position))
        assert records[number].episode_return == pytest.approx(total, rel=1e-5)


def test_a_listed_episode_that_always_fails_is_reported_invalid_after_a_second_try(point):
    episodes = [(number, number) for number in range(4)]
    config = point("raise", one_in=2, max_fault_rate=1.0, max_episode_steps=6, processes=1)
    with SupervisedVectorEnv(
        config, num_envs=2, seed=0, purpose="eval", episode_seeds=episodes
    ) as env:
        env.reset()
        records, faults = [], []
        while not env.exhausted():
            step = env.chunk_step(np.ones((2, 3, 2)))
            records += step.episodes
            faults += step.faults
    assert {record.episode_id: record.valid for record in records} == {
        0: False,
        1: True,
        2: False,
        3: True,
    }
    assert len(faults) == 4


def test_step_has_the_form_of_gymnasium(point):
    with SupervisedVectorEnv(point(max_episode_steps=1), num_envs=4, seed=0) as env:
        observations = env.reset()
        assert env.single_observation_space.contains({"states": observations["states"][0]})
        assert env.single_action_space.shape == (2,)
        observations, rewards, terminated, truncated, infos = env.step(NO_MOTION)
    assert rewards.shape == terminated.shape == truncated.shape == (4,)
    assert truncated.all()
    assert infos["_final_observation"].all()
    assert infos["final_observation"]["states"].shape == observations["states"].shape


def test_results_are_not_overwritten_by_the_next_step(point):
    with SupervisedVectorEnv(point(), num_envs=4, seed=0) as env:
        env.reset()
        step = env.chunk_step(np.ones((4, 2, 2)))
        kept = (step.observations["states"].copy(), step.rewards.copy())
        env.chunk_step(-np.ones((4, 2, 2)))
    assert np.array_equal(step.observations["states"], kept[0])
    assert np.array_equal(step.rewards, kept[1])


def test_wrong_use_is_told(point):
    with SupervisedVectorEnv(point(), num_envs=4, seed=0, stages=2, max_chunk=3) as env:
        for stage in (0, 1):
            env.reset(stage)
        with pytest.raises(ValueError, match=r"must be \[2, C, 2\], are \(4, 1, 2\)"):
            env.send(np.zeros((4, 1, 2)))
        with pytest.raises(ValueError, match="max_chunk=3"):
            env.send(np.zeros((2, 4, 2)))
        with pytest.raises(ValueError, match="nothing is in flight in stage 1"):
            env.receive(1)
        env.send(np.zeros((2, 1, 2)), 1)
        for call in (lambda: env.send(np.zeros((2, 1, 2)), 1), env.state_dict):
            with pytest.raises(ValueError, match="stage 1 is in flight"):
                call()
        env.receive(1)


def test_envs_that_do_not_divide_are_refused(point):
    with pytest.raises(ConfigError, match="5 envs do not divide into 2 stages"):
        SupervisedVectorEnv(point(), num_envs=5, seed=0, stages=2)
    with pytest.raises(ConfigError, match="nearest: 4"):
        SupervisedVectorEnv(point(group_size=4), num_envs=6, seed=0)


def test_pictures_come_from_the_wanted_env(point):
    with SupervisedVectorEnv(point(), num_envs=3, seed=0) as env:
        states = env.reset()["states"]
        for number in range(3):
            column, row = np.clip((states[number] + 1) * 16, 0, 31).astype(int)
            assert env.render(number)[row, column].tolist() == [255, 255, 255]


def test_observations_say_which_of_several_tasks_an_env_is_in(point):
    config = point(options={"tasks": 3}, max_episode_steps=4, processes=2)
    with SupervisedVectorEnv(config, num_envs=6, seed=1) as env:
        assert env.env_spec.task_descriptions == ("task 0", "task 1", "task 2")
        first = env.reset()
        seeds = None
        for _ in range(4):
            step = env.chunk_step(np.zeros((6, 1, 2), np.float32))
            seeds = step.reset_seeds if seeds is None else seeds
        assert first["task_ids"].dtype == np.int64
        assert np.array_equal(first["task_ids"], seeds % 3)
        # After two steps the task of the example changes; the last step shows that one.
        assert step.final_observations is not None
        assert np.array_equal(step.final_observations["task_ids"], (seeds + 1) % 3)


def test_one_task_is_no_observation(point):
    with SupervisedVectorEnv(point(), num_envs=1, seed=1) as env:
        assert "task_ids" not in env.reset()
        assert env.env_spec.task_descriptions == ("go to the origin",)
