"""Envs of several simulators in one batch: who is where, what is padded, what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig, Shares
from rlinf.envs.results import VectorStep
from rlinf.envs.spec import EnvSpec, joined
from rlinf.envs.supervised.mixture import MixedVectorEnv, divided, vector_env
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import CheckpointError, ConfigError, RunFailure

Make = Callable[..., EnvConfig]
ENVS = 12


@pytest.fixture
def sections(point: Make) -> dict[str, EnvConfig]:
    """Points of two and of three dimensions, the second in three quarters of the envs."""
    small = point(max_episode_steps=5, processes=1)
    large = point(
        options={"size": 3, "tasks": 2}, max_episode_steps=7, ratio=2.0, reward_scale=10.0,
        processes=1,
    )  # fmt: skip
    return {"env.train.0": small, "env.train.1": large}


def actions(time: int, numbers: Any) -> np.ndarray:
    """[n, 1, 3] of envs by their numbers."""
    phases = np.asarray(numbers, np.float32)[:, None, None] + np.arange(3, dtype=np.float32)
    return np.sin(phases + time)


@contextlib.contextmanager
def opened(sections: dict[str, EnvConfig], workers: int = 1, **settings: Any) -> Iterator[list]:
    size = ENVS // workers
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                MixedVectorEnv(
                    sections, num_envs=size, first_env=rank * size, total_envs=ENVS, seed=3,
                    **settings,
                )
            )
            for rank in range(workers)
        ]  # fmt: skip


def stepped(envs: list[MixedVectorEnv], time: int) -> list[VectorStep]:
    """One action in every env of all workers; a step per stage, in the order of env numbers."""
    found = []
    for env in envs:
        size = env.num_envs // env.stages
        for stage in range(env.stages):
            first = env.first_env + stage * size
            given = actions(time, range(first, first + size))
            env.send(given[:, :, : env.env_spec.action_dim], stage)
        found += [env.receive(stage) for stage in range(env.stages)]
    return found


def column(steps: list[VectorStep], name: str) -> np.ndarray:
    return np.concatenate(
        [step.observations.get(name, getattr(step, name, None)) for step in steps]
    )


def assert_equal_steps(left: list[VectorStep], right: list[VectorStep]) -> None:
    for name in ("states", "task_ids", "rewards", "valid", "episode_ids", "reset_seeds"):
        np.testing.assert_array_equal(column(left, name), column(right, name), name)
    one, other = ([e for step in steps for e in step.episodes] for steps in (left, right))
    assert one == other


def test_shares_are_a_pattern_over_the_numbers() -> None:
    def section(ratio: float) -> EnvConfig:
        options = {"id": "Pendulum-v1"}
        return EnvConfig(type="gymnasium", options=options, max_episode_steps=5, ratio=ratio)

    shares = Shares.of([section(0.25), section(0.75)], group_size=2)
    assert (shares.sizes, shares.unit) == ((2, 6), 8)
    assert [shares.section(number) for number in range(9)] == [0, 0, 1, 1, 1, 1, 1, 1, 0]
    assert [shares.count(0, total) for total in (0, 1, 2, 8, 9, 16)] == [0, 1, 2, 2, 3, 4]
    assert [shares.number(1, place) for place in range(8)] == [2, 3, 4, 5, 6, 7, 10, 11]
    assert Shares.of([section(1)], group_size=4).sizes == (4,)
    assert Shares.of([section(3.0), section(1.0), section(0.5)]).sizes == (6, 2, 1)


def test_what_a_policy_must_know_of_all(sections: dict[str, EnvConfig]) -> None:
    with opened(sections) as (env,):
        spec = env.env_spec
    assert spec.observation_shapes == {"states": (3,), "task_ids": (), "action_mask": (3,)}
    assert spec.task_descriptions == ("go to the origin", "task 0", "task 1")
    assert spec.task_sections == (0, 1, 1)
    assert (spec.action_dim, spec.action_low, spec.max_episode_steps) == (3, (-1.0,) * 3, 7)
    assert spec.section_limits == (((-1.0,) * 2, (1.0,) * 2), ((-1.0,) * 3, (1.0,) * 3))
    written = json.loads(json.dumps(spec.to_json()))
    assert EnvSpec.from_json(written) == spec
    del written["section_limits"]  # as in a run that was begun before
    assert EnvSpec.from_json(written) == replace(spec, section_limits=())


def test_each_section_goes_on_as_if_alone(sections: dict[str, EnvConfig]) -> None:
    """To the bit, whatever lies beside it; what is padded is zero."""
    shares = Shares.of(list(sections.values()))
    with opened(sections) as (env,):
        shown = [env.reset()]
        steps = [stepped([env], time)[0] for time in range(20)]
        shown += [step.observations for step in steps]
    for number, (key, config) in enumerate(sections.items()):
        own = [env for env in range(ENVS) if shares.section(env) == number]
        dim = 2 + number
        with SupervisedVectorEnv(
            config, num_envs=len(own), numbers=own, total_envs=ENVS, seed=3
        ) as alone:
            expected = [alone.reset()]
            results = [alone.chunk_step(actions(t, own)[:, :, :dim]) for t in range(20)]
            expected += [result.observations for result in results]
        for all_rows, wanted in zip(shown, expected, strict=True):
            np.testing.assert_array_equal(all_rows["states"][own, :dim], wanted["states"], key)
            assert not all_rows["states"][own, dim:].any()
            assert (all_rows["action_mask"][own] == (np.arange(3) < dim)).all()
            tasks = wanted.get("task_ids", np.zeros(len(own), np.int64)) + number
            np.testing.assert_array_equal(all_rows["task_ids"][own], tasks)
        for step, wanted in zip(steps, results, strict=True):
            for name in ("rewards", "truncations", "final_mask", "episode_ids", "reset_seeds"):
                np.testing.assert_array_equal(getattr(step, name)[own], getattr(wanted, name))
            ended = np.flatnonzero(step.final_mask)
            if wanted.final_observations is not None:
                finals = step.final_observations["states"][np.isin(ended, own)]
                np.testing.assert_array_equal(finals[:, :dim], wanted.final_observations["states"])
            records = [e for e in step.episodes if e.env in own]
            assert [(e.env, e.episode_return, e.task - number) for e in records] == [
                (e.env, e.episode_return, e.task) for e in wanted.episodes
            ]


@pytest.mark.parametrize(("workers", "stages"), [(1, 2), (2, 1), (2, 2)])
def test_workers_and_stages_change_nothing(
    sections: dict[str, EnvConfig], workers: int, stages: int
) -> None:
    with opened(sections) as whole:
        whole[0].reset()
        expected = [stepped(whole, time) for time in range(9)]
    with opened(sections, workers, stages=stages) as envs:
        for env in envs:
            for stage in range(stages):
                env.reset(stage)
        for time, steps in enumerate(expected):
            assert_equal_steps(stepped(envs, time), steps)


@pytest.mark.parametrize("after", [1, 2])
def test_going_on_from_a_state_perhaps_with_other_workers(
    sections: dict[str, EnvConfig], after: int
) -> None:
    with opened(sections) as envs:
        envs[0].reset()
        for time in range(6):
            stepped(envs, time)
        states = [env.state_dict() for env in envs]
        expected = [stepped(envs, time) for time in range(6, 14)]
    with opened(sections, after) as envs:
        for env, state in zip(envs, divided(states, after), strict=True):
            env.load_state_dict(state)
        for time, steps in enumerate(expected, start=6):
            assert_equal_steps(stepped(envs, time), steps)
    only = {"env.train": sections["env.train.0"]}
    with vector_env(only, num_envs=4, seed=3) as env, pytest.raises((CheckpointError, KeyError)):
        env.load_state_dict(states[0])


def test_listed_episodes_are_played_once_by_their_section(sections: dict[str, EnvConfig]) -> None:
    listed = [(100 + number, 7 * number) for number in range(20)]
    with opened(sections, purpose="eval", episode_seeds=listed) as (env,):
        env.reset()
        played: dict[int, Any] = {}
        time = 0
        while not env.exhausted():
            (step,) = stepped([env], time)
            played |= {episode.episode_id: episode for episode in step.episodes}
            time += 1
        env.assign_episodes(listed[:3])
        env.reset()
        again = [e for t in range(8) for e in stepped([env], t)[0].episodes]
    assert sorted(played) == [number for number, _ in listed]
    for place, (number, seed) in enumerate(listed):
        assert played[number].seed == seed
        assert (played[number].task == 0) == (place % 3 == 0)
        assert played[number].episode_len <= (5 if place % 3 == 0 else 7)
    assert sorted(e.episode_id for e in again) == [100, 101, 102]


def test_groups_share_their_seeds_within_a_section(point: Make) -> None:
    sections = {
        "a": point(group_size=2, processes=1),
        "b": point(group_size=2, options={"size": 3, "tasks": 2}, processes=1),
    }
    with MixedVectorEnv(sections, num_envs=8, seed=1) as env:
        tasks = env.reset()["task_ids"]
        (step,) = stepped([env], 0)
    assert (step.reset_seeds[::2] == step.reset_seeds[1::2]).all()
    assert len(set(step.reset_seeds[::2])) == 4
    assert (tasks[::2] == tasks[1::2]).all()
    assert (tasks == 0).tolist() == [True, True, False, False] * 2


def test_actions_are_clipped_to_the_limits_of_their_section(point: Make) -> None:
    pendulum = EnvConfig(
        type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=5, processes=1
    )
    sections = {"a": point(processes=1), "b": pendulum}
    with MixedVectorEnv(sections, num_envs=2, seed=0) as env:
        assert (env.env_spec.action_low, env.env_spec.action_high) == ((-2.0, -1.0), (2.0, 1.0))
        before = env.reset()["states"]
        after = env.chunk_step(np.full((2, 1, 2), 2.0, np.float32)).observations["states"]
    np.testing.assert_allclose(after[0, :2] - before[0, :2], 0.1, rtol=1e-5)
    assert before.shape == (2, 3)


def test_faults_say_where_and_each_section_has_its_own_bound(point: Make) -> None:
    bad = point("raise", max_fault_rate=1.0, processes=1)
    with opened({"env.train.0": point(processes=1), "env.train.1": bad}) as (env,):
        env.reset()
        steps = [stepped([env], time)[0] for time in range(3)]
    faults = [fault for step in steps for fault in step.faults]
    assert [(fault.section, fault.env) for fault in faults] == [(1, n) for n in range(1, ENVS, 2)]
    assert steps[-1].valid.tolist() == [True, False] * 6
    strict = point("raise", max_fault_rate=0.01, processes=1)
    with opened({"env.train.0": bad, "env.train.1": strict}) as (env,):
        env.reset()
        with pytest.raises(RunFailure, match=r"env\.train\.1: .*faulty(.|\n)*gripper fell off"):
            any(stepped([env], time) is None for time in range(3))


def test_equal_tasks_are_told_apart_and_every_env_renders(point: Make) -> None:
    sections = {"env.train.0": point(processes=1), "env.train.1": point(processes=1)}
    with opened(sections) as (env,):
        spec = env.env_spec
        env.reset()
        states = env.observations()["states"]
        for number in range(4):
            column, row = np.clip((states[number] + 1) * 16, 0, 31).astype(int)
            assert env.render(number)[row, column, 0] == 255
    assert spec.task_descriptions == (
        "go to the origin (env.train.0)",
        "go to the origin (env.train.1)",
    )
    assert "action_mask" not in spec.observation_shapes


def gymnasium(name: str, **kwargs: Any) -> EnvConfig:
    options = {"id": name, "kwargs": kwargs}
    return EnvConfig(type="gymnasium", options=options, max_episode_steps=5, processes=1)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (("Pendulum-v1", "CartPole-v1"), ["takes 2 discrete actions", "nearest: an environment"]),
        (("CartPole-v1", "Acrobot-v1"), ["takes 3 discrete actions, env.train.0 2 discrete"]),
    ],
)
def test_what_does_not_go_together_is_refused(ids: tuple[str, str], words: list[str]) -> None:
    sections = {f"env.train.{place}": gymnasium(name) for place, name in enumerate(ids)}
    with pytest.raises(ConfigError) as caught:
        MixedVectorEnv(sections, num_envs=4, seed=0)
    assert caught.value.key == "env.train.1"
    assert all(word in str(caught.value) for word in words)


def test_choices_that_are_numbered_otherwise_are_refused() -> None:
    one = EnvSpec(
        observation_shapes={"states": (2,)}, observation_dtypes={"states": "float32"},
        action_kind="discrete", action_dim=1, action_low=(0.0,), action_high=(3.0,),
        task_descriptions=("a",), max_episode_steps=5, action_start=(1.0,),
    )  # fmt: skip
    assert joined({"env.train.0": one, "env.train.1": one}).own_limits == ([1.0], [4.0])
    with pytest.raises(ConfigError, match=r"from \[0\.0\] on, env\.train\.0 from \[1\.0\]"):
        joined({"env.train.0": one, "env.train.1": replace(one, action_start=())})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": True, "states": False}, ["shows main_images", "states is not in both"]),
        ({"images": True, "image_size": 64}, ["main_images [64, 64, 3]", "nearest: [84, 84, 3]"]),
    ],
)
def test_pictures_must_be_alike(options: dict[str, Any], words: list[str]) -> None:
    first = {"images": True, "image_size": 84} if "image_size" in options else {}
    sections = {
        f"env.train.{place}": EnvConfig(
            type="metaworld", options={"task": "reach-v3", **each}, max_episode_steps=5,
            processes=1,
        )
        for place, each in enumerate((first, options))
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        MixedVectorEnv(sections, num_envs=4, seed=0)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_numbers_that_do_not_divide(sections: dict[str, EnvConfig]) -> None:
    with pytest.raises(ConfigError, match="nearest: 6, 12"):
        MixedVectorEnv(sections, num_envs=8, seed=0, stages=2)


def test_the_steps_before_are_padded_as_the_present_one(point: Make) -> None:
    several = {
        "env.train.0": point(observation_steps=2, processes=1),
        "env.train.1": point(observation_steps=2, processes=1, options={"size": 3}),
    }
    with MixedVectorEnv(several, num_envs=2, seed=0) as env:
        first = env.reset()["states"].copy()
        shown = env.chunk_step(actions(0, range(2))).observations
    assert shown["states@1"].shape == (2, 3)
    np.testing.assert_array_equal(shown["states@1"], first)
    assert not shown["states@1"][0, 2:].any()


@pytest.mark.parametrize("sections", [["env.train"], ["env.train.0", "env.train.1"]])
def test_what_an_adapter_refuses_while_it_plays_has_the_key_of_its_section(sections: list[str]):
    options = {"id": "InvertedPendulum-v5", "success_key": "reward_surviv"}
    config = EnvConfig(type="gymnasium", options=options, max_episode_steps=2, processes=1)
    expected = rf"^{sections[0]}\.options\.success_key: .* nearest: reward_survive"
    with vector_env(dict.fromkeys(sections, config), num_envs=2, seed=0) as env:
        env.reset()
        env.send(np.zeros((2, 2, 1), np.float32))  # a whole episode
        with pytest.raises(ConfigError, match=expected):
            env.receive()
