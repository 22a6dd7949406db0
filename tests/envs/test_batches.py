"""Simulators that step a whole batch: the same protocol, and what their faults do."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rlinf.envs.env_conformance import check_env
from rlinf.envs.results import FaultReason
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import RunFailure

ENVS, CHUNK = 6, 4


def actions(rounds: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.uniform(-1, 1, (rounds, ENVS, CHUNK, 2)).astype(np.float32)


@pytest.fixture
def batch(point):
    def make(misbehaviour: str = "none", **settings):
        return point(misbehaviour, **{"type": "point_batch", "processes": 1, **settings})

    return make


def play(config, rounds: int = 8, stages: int = 1) -> list:
    with SupervisedVectorEnv(config, num_envs=ENVS, seed=3, stages=stages) as env:
        size, steps = ENVS // stages, []
        for stage in range(stages):
            env.reset(stage)
        for chunk in actions(rounds):
            for stage in range(stages):
                env.send(chunk[stage * size : (stage + 1) * size], stage)
            steps.append([env.receive(stage) for stage in range(stages)])
    return steps


def test_a_batch_keeps_the_protocol(batch):
    results = check_env(batch())
    assert [result for result in results if not result.passed] == []
    details = {result.name: result.detail for result in results}
    assert "declared as not replayable" in details["save and resume"]


@pytest.mark.parametrize("horizon", [7, 8])
def test_a_batch_gives_the_episodes_of_single_envs(point, batch, horizon):
    """The same points, one at a time and together: equal in all that a rollout sees."""
    one = play(point(max_episode_steps=horizon))
    together = play(batch(max_episode_steps=horizon))
    for (single,), (joint,) in zip(one, together, strict=True):
        for name in ("terminations", "truncations", "final_mask", "episode_ids", "reset_seeds"):
            assert np.array_equal(getattr(single, name), getattr(joint, name)), name
        assert joint.valid.all()
        assert np.allclose(single.rewards, joint.rewards, atol=1e-6)
        assert np.allclose(single.observations["states"], joint.observations["states"], atol=1e-6)
        assert (single.final_observations is None) == (joint.final_observations is None)
        if single.final_observations is not None:
            assert np.allclose(
                single.final_observations["states"], joint.final_observations["states"], atol=1e-6
            )
        assert [(e.env, e.episode_len, e.success_once) for e in single.episodes] == [
            (e.env, e.episode_len, e.success_once) for e in joint.episodes
        ]


def test_without_auto_reset_its_rows_rest_as_single_envs_do(point, batch):
    def rollouts(config) -> list:
        with SupervisedVectorEnv(config, num_envs=ENVS, seed=3) as env:
            steps = []
            for number, chunk in enumerate(actions(8)):
                if number % 4 == 0:
                    env.reset()
                steps.append(env.chunk_step(chunk))
        return steps

    settings = {"max_episode_steps": 10, "auto_reset": False}
    one, together = rollouts(point(**settings)), rollouts(batch(**settings))
    for single, joint in zip(one, together, strict=True):
        for name in ("terminations", "truncations", "active", "valid", "reset_seeds"):
            assert np.array_equal(getattr(single, name), getattr(joint, name)), name
        assert np.allclose(single.rewards, joint.rewards, atol=1e-6)
        assert np.allclose(single.observations["states"], joint.observations["states"], atol=1e-6)
    assert {0, ENVS} <= {int(joint.active.sum()) for joint in together}
    assert sum(len(joint.episodes) for joint in together) == 2 * ENVS


@pytest.mark.parametrize("horizon", [10, 12])
def test_whole_chunks_give_what_single_actions_give(batch, horizon):
    """Where nothing ends an episode but its limit, which may lie within a chunk."""
    settings = {"ignore_terminations": True, "max_episode_steps": horizon, "reward_scale": 2.0}
    by_action = play(batch(**settings))
    by_chunk = play(batch(type="point_chunks", **settings))
    for (one,), (other,) in zip(by_action, by_chunk, strict=True):
        assert other.valid.all()
        for name in ("rewards", "truncations", "final_mask", "reset_seeds"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert np.array_equal(one.observations["states"], other.observations["states"])
        for first, second in zip(one.episodes, other.episodes, strict=True):
            assert (first.env, first.episode_len) == (second.env, second.episode_len)
            assert first.episode_return == pytest.approx(second.episode_return)


def test_whole_chunks_keep_the_protocol(batch):
    results = check_env(batch(type="point_chunks"))
    assert [result for result in results if not result.passed] == []


def test_a_seed_that_was_moved_on_from_is_told(batch):
    episodes = [(number, 20 + number) for number in range(6)]
    config = batch(type="point_chunks", max_episode_steps=4, ignore_terminations=True)
    with SupervisedVectorEnv(config, num_envs=ENVS, seed=3, episode_seeds=episodes) as env:
        env.reset()
        step = env.chunk_step(actions(1)[0])
    assert step.reset_seeds.tolist() == [20, 21, 23, 23, 24, 25]
    assert [(e.seed, e.seed_shift) for e in step.episodes] == [
        (20, 0), (21, 0), (22, 1), (23, 0), (24, 0), (25, 0),
    ]  # fmt: skip


def test_stages_are_batches_of_their_own(batch):
    whole, halves = play(batch()), play(batch(), stages=2)
    for (one,), (first, second) in zip(whole, halves, strict=True):
        states = np.concatenate([first.observations["states"], second.observations["states"]])
        assert np.array_equal(one.observations["states"], states)


def test_of_a_chunk_only_the_last_observations_are_read_and_those_of_an_end(batch):
    """The others stay where the simulator has them; all that a rollout sees is the same."""
    settings = {"max_episode_steps": 6, "ignore_terminations": True}
    given, read = play(batch(**settings)), play(batch(options={"reads": True}, **settings))
    for (one,), (other,) in zip(given, read, strict=True):
        assert np.array_equal(one.rewards, other.rewards)
        assert np.array_equal(one.observations["states"], other.observations["states"])
        assert np.array_equal(one.final_mask, other.final_mask)
    # Episodes of six end with the second action of every other chunk of four, once for all rows.
    counts = [step.observations["proprioception"].max() for (step,) in read]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8]
    ends = [
        step.final_observations["proprioception"].max() for (step,) in read if step.final_mask.any()
    ]
    assert ends == [2, 4, 6, 8]


def test_ignored_terminations_go_on_to_the_limit(batch):
    steps = play(batch(ignore_terminations=True, max_episode_steps=10))
    assert not any(step.terminations.any() for (step,) in steps)
    assert {e.episode_len for (step,) in steps for e in step.episodes} == {10}


@pytest.mark.parametrize("together", [False, True])
def test_a_list_of_episodes_is_played_once(batch, together):
    episodes = [(number, 100 + number) for number in range(15)]
    options = {"together": together}
    config = batch(max_episode_steps=5, ignore_terminations=together, options=options)
    with SupervisedVectorEnv(config, num_envs=ENVS, seed=3, episode_seeds=episodes) as env:
        env.reset()
        played = []
        while not env.exhausted():
            played += env.chunk_step(actions(1)[0]).episodes
    assert sorted((e.episode_id, e.seed) for e in played) == episodes


def test_a_row_that_is_not_finite_is_closed_alone(batch):
    config = batch("nan", one_in=4, max_fault_rate=1.0)
    steps = [step for (step,) in play(config)]
    faults = [fault for step in steps for fault in step.faults]
    assert faults
    assert {fault.reason for fault in faults} == {FaultReason.NOT_FINITE}
    for step in steps:
        assert np.isfinite(step.observations["states"]).all()
        assert set(np.flatnonzero(~step.valid)) == {fault.env for fault in step.faults}
        assert not step.rewards[~step.valid].any()


def test_rows_that_begin_together_are_closed_beside_one_that_broke(batch):
    settings = {"max_episode_steps": 8, "max_fault_rate": 1.0, "ignore_terminations": True}
    config = batch("nan", one_in=9, options={"together": True}, **settings)
    steps = [step for (step,) in play(config)]
    hit = [step for step in steps if step.faults]
    assert hit
    for step in hit:
        reasons = {fault.env: fault.reason for fault in step.faults}
        assert set(reasons) == set(range(ENVS))
        assert set(reasons.values()) == {FaultReason.NOT_FINITE, FaultReason.NOT_REPLAYABLE}
        assert not step.valid.any()
    whole = [each.episode_len for step in steps for each in step.episodes if each.valid]
    assert set(whole) == {8}


def assert_one_counts(step, reason: FaultReason) -> None:
    """What took a whole batch is the fault of one row."""
    reasons = [fault.reason for fault in step.faults]
    assert reasons == [reason] + [FaultReason.NOT_REPLAYABLE] * (len(reasons) - 1)


def test_a_batch_whose_simulator_raises_closes_its_episodes_and_goes_on(batch):
    config = batch("raise", one_in=9, max_fault_rate=1.0)
    steps = [step for (step,) in play(config)]
    hit = [step for step in steps if step.faults]
    assert hit
    for step in hit:
        assert_one_counts(step, FaultReason.EXCEPTION)
        assert all("the solver diverged" in fault.detail for fault in step.faults)
    assert any(step.valid.all() for step in steps)


def test_a_batch_that_is_replaced_for_its_memory_counts_as_one_fault(batch):
    """Its episodes cannot go on where they were, as those of single envs do."""
    config = batch(
        "leak", at_step=1, memory_limit_mb=200, max_fault_rate=0.0, max_episode_steps=CHUNK
    )
    with pytest.raises(RunFailure, match=r"^1 of the last \d+ episodes .*\(memory 1\)"):
        play(config)


def test_episodes_beside_a_row_whose_reset_fails_are_closed_with_it(batch):
    """Their simulator is gone: no row goes on in one that never began its episode."""
    config = batch("reset", one_in=9, max_fault_rate=1.0, ignore_terminations=True)
    steps = [step for (step,) in play(config)]
    hit = [step for step in steps if step.faults]
    assert hit
    for step in hit:
        assert not step.valid.any()
        assert {fault.env for fault in step.faults} == set(range(ENVS))
        reasons = {fault.reason for fault in step.faults} - {FaultReason.NOT_REPLAYABLE}
        assert reasons == {FaultReason.NOT_FINITE, FaultReason.EXCEPTION}
    assert any(step.valid.all() for step in steps)


@pytest.mark.parametrize(
    ("misbehaviour", "detail"),
    [
        ("shape", r"'states' is float32\(6, 1\) instead of float32\(6, 2\)"),
        ("dtype", "'states' is float64"),
        ("keys", "'state'"),
        ("rewards", r"`rewards` is float32\(5,\) instead of an array \(6,\)"),
    ],
)
def test_a_batch_of_another_form_is_malformed(batch, misbehaviour, detail):
    steps = [step for (step,) in play(batch(misbehaviour, one_in=9, max_fault_rate=1.0), rounds=5)]
    hit = [step for step in steps if step.faults]
    assert hit
    for step in hit:
        assert_one_counts(step, FaultReason.MALFORMED)
    assert re.search(detail, hit[0].faults[0].detail)
    assert any(step.valid.all() for step in steps)


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_a_lost_process_closes_the_episodes_of_its_batch(batch, kind):
    config = batch(kind, one_in=9, max_fault_rate=1.0, step_deadline=3.0)
    steps = [step for (step,) in play(config)]
    hit = [step for step in steps if step.faults]
    assert hit
    for step in hit:
        reasons = [fault.reason for fault in step.faults]
        assert reasons.count(FaultReason(kind)) == 1
        assert set(reasons) <= {FaultReason(kind), FaultReason.NOT_REPLAYABLE}
        assert len(reasons) == ENVS
        assert not step.valid.any()
    assert any(step.valid.all() for step in steps)


MANY = 16  # more than the faults that `max_fault_rate` allows by itself


@pytest.mark.parametrize("kind", ["point", "point_batch"])
def test_a_run_goes_on_in_simulators_that_cannot_be_replayed(point, kind):
    options = {"replays": False} if kind == "point" else {}
    config = point(type=kind, processes=1, options=options)
    still = np.zeros((MANY, CHUNK, 2), np.float32)
    with SupervisedVectorEnv(config, num_envs=MANY, seed=3) as env:
        env.reset()
        env.chunk_step(still)
        state = env.state_dict()
    with SupervisedVectorEnv(config, num_envs=MANY, seed=3) as env:
        env.load_state_dict(state)
        step = env.chunk_step(still)
        assert [fault.reason for fault in step.faults] == [FaultReason.NOT_REPLAYABLE] * MANY
        assert not step.valid.any()
        assert env.chunk_step(still).valid.all()


@pytest.mark.parametrize("kind", ["raise", "crash"])
def test_a_batch_that_was_lost_once_ends_no_run(batch, kind):
    with SupervisedVectorEnv(batch(kind, one_in=9), num_envs=MANY, seed=3) as env:
        env.reset()
        steps = [env.chunk_step(np.zeros((MANY, CHUNK, 2), np.float32)) for _ in range(4)]
    assert sum(len(step.faults) for step in steps) >= MANY


@pytest.mark.parametrize("kind", ["raise", "crash"])
def test_every_listed_episode_is_told_once_whatever_is_lost_beside_it(batch, kind):
    """Also one that ended in the chunk in which its batch was lost."""
    starts = {seed: np.random.default_rng(seed).uniform(-1, 1, 2) for seed in range(1, 2000)}
    there = next(seed for seed, start in starts.items() if np.linalg.norm(start) < 0.09)
    seeds = [there, 5000, *range(5001, 5011)]
    episodes = list(enumerate(seeds))
    config = batch(kind, one_in=5000, max_episode_steps=5, max_fault_rate=1.0)
    still = np.zeros((ENVS, CHUNK, 2), np.float32)
    with SupervisedVectorEnv(config, num_envs=ENVS, seed=3, episode_seeds=episodes) as env:
        env.reset()
        first = env.chunk_step(still)
        played = list(first.episodes)
        while not env.exhausted():
            played += env.chunk_step(still).episodes
    # A process is lost by the first of its rows.
    assert len(first.faults) == ENVS - (kind == "raise")
    assert first.valid.tolist() == [True] + [False] * (ENVS - 1)
    assert sorted((e.episode_id, e.seed) for e in played) == episodes
    assert (played[0].episode_id, played[0].episode_len, played[0].success_once) == (0, 1, True)


def test_what_follows_a_lost_process_is_not_played_with_old_actions(batch):
    """Where other rows rest, too, as the list holds no more for them."""
    episodes = [(number, 30 + number) for number in range(ENVS + 1)]
    config = batch("crash", one_in=36, max_fault_rate=1.0, max_episode_steps=6)
    begins = np.random.default_rng(36).uniform(-1, 1, 2).astype(np.float32)
    with SupervisedVectorEnv(config, num_envs=ENVS, seed=3, episode_seeds=episodes) as env:
        env.reset()
        steps = []
        while not env.exhausted():
            steps.append(env.chunk_step(np.ones((ENVS, CHUNK, 2), np.float32)))
    lost = [step for step in steps if step.faults]
    assert len(lost) > 1
    for step in lost[:-1]:
        assert np.array_equal(step.observations["states"][0], begins)
        assert not step.rewards.any()
