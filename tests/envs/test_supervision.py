"""Faults on purpose: real crashes, hangs and wrong data in real processes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlinf.envs.results import FaultReason
from rlinf.envs.supervised.pool import EnvPool
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError, RunFailure
from tests.processes.ends import ended

CHUNK = 4


def kill(pid: int) -> None:
    """Kill a process, which is over then."""
    process = psutil.Process(pid)
    process.kill()
    assert ended(process)


def actions(rounds: int, envs: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.uniform(-1, 1, (rounds, envs, CHUNK, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("misbehaviour", "reason", "detail"),
    [
        ("raise", FaultReason.EXCEPTION, "the gripper fell off"),
        ("nan", FaultReason.NOT_FINITE, "NaN"),
        ("nan_reward", FaultReason.NOT_FINITE, "reward is nan"),
        ("shape", FaultReason.MALFORMED, r"'states' is float32\(1,\)"),
        ("dtype", FaultReason.MALFORMED, "'states' is float64"),
        ("keys", FaultReason.MALFORMED, "'state'"),
        ("reward", FaultReason.MALFORMED, "not a number"),
        ("values", FaultReason.MALFORMED, "^step returns 4 values, not observation, reward, term"),
        ("info", FaultReason.MALFORMED, "^step returns None as info, no mapping"),
        ("crash", FaultReason.CRASH, "SIGKILL"),
    ],
)
def test_a_faulty_episode_is_invalid_and_replaced(point, misbehaviour, reason, detail):
    config = point(misbehaviour, max_fault_rate=1.0, processes=1)
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        env.reset()
        step = env.chunk_step(actions(1, 1)[0])
        fresh = env.observations()
    assert not step.valid[0]
    assert [fault.reason for fault in step.faults] == [reason]
    assert re.search(detail, step.faults[0].detail)
    assert step.faults[0].episode_id == step.episode_ids[0]
    assert not step.rewards.any()
    assert not (step.terminations | step.truncations).any()
    assert [record.valid for record in step.episodes] == [False]
    assert np.isfinite(step.observations["states"]).all()
    assert np.array_equal(step.observations["states"], fresh["states"])


def test_a_hang_is_ended_at_the_deadline_and_shows_where(point):
    config = point("hang", max_fault_rate=1.0, processes=1, step_deadline=3.0)
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        env.reset()
        step = env.chunk_step(actions(1, 1)[0])
        assert [fault.reason for fault in step.faults] == [FaultReason.HANG]
        assert "_misbehave" in step.faults[0].detail
        assert not step.valid[0]


@pytest.mark.parametrize("stages", [1, 2])
def test_innocent_envs_of_a_crashed_process_go_on_as_if_nothing_had_happened(point, stages):
    """The episodes of the same envs without the crash are equal, bit for bit."""
    chunks = actions(6, 8)
    size = 8 // stages

    def play(misbehaviour: str) -> list:
        config = point(misbehaviour, one_in=4, at_step=6, max_fault_rate=1.0)
        with SupervisedVectorEnv(config, num_envs=8, seed=3, stages=stages) as env:
            for stage in range(stages):
                env.reset(stage)
            steps = []
            for chunk in chunks:
                for stage in range(stages):
                    env.send(chunk[stage * size : (stage + 1) * size], stage)
                steps += [env.receive(stage) for stage in range(stages)]
            return steps

    crashed, intact = play("crash"), play("none")
    broken = {fault.env for step in crashed for fault in step.faults}
    assert 0 < len(broken) < 8
    for number, (found, expected) in enumerate(zip(crashed, intact, strict=True)):
        first = (number % stages) * size
        mine = [row for row in range(size) if first + row not in broken]
        assert found.valid[mine].all()
        assert np.array_equal(found.rewards[mine], expected.rewards[mine])
        assert np.array_equal(
            found.observations["states"][mine], expected.observations["states"][mine]
        )
        assert np.array_equal(found.episode_ids[mine], expected.episode_ids[mine])


@pytest.mark.parametrize("misbehaviour", ["crash", "raise", "nan"])
def test_a_reset_that_fails_leads_to_another_episode(point, misbehaviour):
    config = point(misbehaviour, one_in=3, at_step=0, max_fault_rate=1.0, max_episode_steps=8)
    with SupervisedVectorEnv(config, num_envs=4, seed=0, stages=2) as env:
        started = [env.reset(stage)["states"] for stage in range(2)]
        assert np.isfinite(started).all()
        faults, valid, episodes = [], [], []
        for chunk in actions(6, 4):
            for stage in range(2):
                step = env.chunk_step(chunk[2 * stage : 2 * stage + 2], stage)
                assert np.isfinite(step.observations["states"]).all()
                assert (step.reset_seeds % 3 != 0).all()
                faults += step.faults
                valid += step.valid.tolist()
                episodes += step.episodes
    assert faults
    assert all(valid)  # the episodes that were played have nothing to do with it
    assert all(record.valid and record.seed % 3 for record in episodes)


def test_a_simulator_that_never_starts_stops_the_run(point):
    for misbehaviour in ("raise", "crash"):
        config = point(misbehaviour, at_step=0, max_fault_rate=1.0, processes=1)
        with (
            SupervisedVectorEnv(config, num_envs=1, seed=0) as env,
            pytest.raises(RunFailure, match="in a row"),
        ):
            env.reset()


def _dying_replacements(monkeypatch, number: int) -> None:
    """The first so many processes that replace a lost one die while they build their envs."""
    make, made = EnvPool._new_process, iter(range(1000))

    def new_process(pool, index):
        process = make(pool, index)
        if 0 < next(made) <= number:
            os.kill(process.process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(EnvPool, "_new_process", new_process)


def test_a_replacement_that_dies_while_it_starts_is_a_loss_and_another_one_is_tried(
    point, monkeypatch
):
    chunks = actions(3, 2)

    def play(misbehaviour: str) -> list:
        config = point(misbehaviour, one_in=2, max_fault_rate=1.0, processes=1)
        listed = list(enumerate([0, 1, 3, 5]))  # the first one misbehaves
        with SupervisedVectorEnv(config, num_envs=2, seed=0, episode_seeds=listed) as env:
            env.reset()
            return [env.chunk_step(chunk) for chunk in chunks]

    expected = play("none")
    _dying_replacements(monkeypatch, 2)
    found = play("crash")
    faults = [fault for step in found for fault in step.faults]
    # The episode is tried again, and its process is then replaced by one that lives.
    assert [fault.env for fault in faults] == [0, -1, -1, 0]
    assert {fault.reason for fault in faults} == {FaultReason.CRASH}
    assert not found[0].valid[0]
    for one, other in zip(expected, found, strict=True):
        assert other.valid[1]
        assert np.array_equal(one.observations["states"][1], other.observations["states"][1])


def test_replacements_that_all_die_while_they_start_stop_the_run(point, monkeypatch):
    _dying_replacements(monkeypatch, 100)
    config = point("crash", max_fault_rate=1.0, processes=1)
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        env.reset()
        with pytest.raises(RunFailure, match=r"lost 6 times in a row; the last time \(crash\)"):
            env.chunk_step(actions(1, 1)[0])


def test_processes_run_on_the_cores_they_are_given(point):
    core = sorted(os.sched_getaffinity(0))[-1]
    with SupervisedVectorEnv(point(processes=None), num_envs=2, seed=0, affinity=[core]) as env:
        affinities = [psutil.Process(number).cpu_affinity() for number in env.process_ids]
    assert affinities == [[core]]


@pytest.mark.parametrize("pinned", [True, False])
def test_several_processes_are_tied_to_a_core_each(point, pinned):
    cores = sorted(os.sched_getaffinity(0))
    config = point(processes=3, pin_processes=pinned)
    with SupervisedVectorEnv(config, num_envs=3, seed=0) as env:
        affinities = [psutil.Process(number).cpu_affinity() for number in env.process_ids]
    turns = [[cores[number % len(cores)]] for number in range(3)]
    assert affinities == (turns if pinned else [cores] * 3)


def test_the_processes_of_the_next_worker_begin_at_the_next_core(point):
    cores = sorted(os.sched_getaffinity(0))
    config = point(processes=2)
    with SupervisedVectorEnv(config, num_envs=3, first_env=3, total_envs=6, seed=0) as env:
        first = psutil.Process(env.process_ids[0]).cpu_affinity()
    assert first == [cores[2 % len(cores)]]


def test_too_many_faults_stop_the_run_with_the_first_one(point):
    config = point("raise", max_fault_rate=0.5, fault_window=8, processes=1)
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        env.reset()
        for chunk in actions(4, 1):
            env.chunk_step(chunk)
        with pytest.raises(RunFailure, match=r"(?s)5 of the last .*exception 5.*gripper fell off"):
            env.chunk_step(actions(1, 1)[0])


def test_faults_within_the_legal_rate_are_counted_over_the_window(point):
    config = point("raise", one_in=10, max_fault_rate=0.9, max_episode_steps=8)
    with SupervisedVectorEnv(config, num_envs=4, seed=0) as env:
        env.reset()
        steps = [env.chunk_step(chunk) for chunk in actions(12, 4)]
    invalid = sum(int((~step.valid).sum()) for step in steps)
    assert invalid == sum(len(step.faults) for step in steps) > 0


def test_a_start_that_fails_says_why(point):
    with pytest.raises(RunFailure, match="modules") as caught:
        SupervisedVectorEnv(point("modules"), num_envs=2, seed=0)
    loaded = str(caught.value)
    assert "numpy" in loaded
    for heavy in ("torch", "pydantic", "ray"):
        assert f"'{heavy}'" not in loaded


def test_another_interpreter_is_used(point, tmp_path, monkeypatch):
    marker = tmp_path / "used"
    wrapper = tmp_path / "other-python"
    wrapper.write_text(f'#!/bin/sh\ntouch "{marker}"\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where that interpreter finds the adapter
    with SupervisedVectorEnv(point(python=str(wrapper)), num_envs=2, seed=0) as env:
        env.reset()
        assert env.chunk_step(actions(1, 2)[0]).valid.all()
    assert marker.exists()


def test_an_interpreter_that_does_not_exist_is_refused(point):
    with pytest.raises(ConfigError, match="no executable file"):
        SupervisedVectorEnv(point(python="/no/such/python"), num_envs=2, seed=0)


def test_processes_and_memory_end_with_a_killed_parent(point, tmp_path):
    script = textwrap.dedent(
        """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from rlinf.envs.config import EnvConfig
        from rlinf.envs.supervised.vector import SupervisedVectorEnv
        config = EnvConfig(type="point", options={"misbehaviour": "hang"}, max_episode_steps=9,
                           processes=2)
        env = SupervisedVectorEnv(config, num_envs=2, seed=0)
        env.reset()
        import numpy as np
        env.send(np.ones((2, 4, 2)))
        print(*env.process_ids, flush=True)
        time.sleep(600)
        """
    )
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [psutil.Process(int(number)) for number in parent.stdout.readline().split()]
    assert len(children) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(map(ended, children))
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    assert not [path for path in after - before if "rlinf-envs" in path.name]


def test_close_leaves_no_process_even_of_one_that_hangs(point):
    env = SupervisedVectorEnv(point("hang"), num_envs=2, seed=0)
    processes = [psutil.Process(number) for number in env.process_ids]
    env.reset()
    env.send(actions(1, 2)[0])
    time.sleep(0.1)
    env.close()
    env.close()
    assert not any(process.is_running() for process in processes)


def test_a_process_that_ended_between_two_chunks_is_replaced_for_a_checkpoint(point):
    """What the others were asked for is answered, and the states are those of no loss."""
    chunks = actions(4, 4)

    def play(lost: tuple[int, ...]) -> tuple[dict, list]:
        with SupervisedVectorEnv(point(max_fault_rate=1.0, processes=2), num_envs=4, seed=3) as env:
            env.reset()
            for chunk in chunks[:2]:
                env.chunk_step(chunk)
            for number in lost:
                kill(env.process_ids[number])
            state = env.state_dict()
            return state, [env.chunk_step(chunk) for chunk in chunks[2:]]

    expected, sound = play(())
    for lost in ((0,), (1,), (0, 1)):
        state, steps = play(lost)
        for name, array in expected["episode"].items():
            assert np.array_equal(state["episode"][name], array), name
        assert np.array_equal(state["observation"]["states"], expected["observation"]["states"])
        for one, other in zip(sound, steps, strict=True):
            assert np.array_equal(one.observations["states"], other.observations["states"])


def test_a_process_that_holds_too_much_memory_is_replaced_and_its_envs_go_on(point):
    chunks = actions(6, 2)

    def play(**settings) -> tuple[list, list]:
        with SupervisedVectorEnv(
            point(max_fault_rate=1.0, processes=1, **settings), num_envs=2, seed=3
        ) as env:
            env.reset()
            before = env.process_ids
            steps = [env.chunk_step(chunk) for chunk in chunks]
            return steps, [before, env.process_ids]

    sound, processes = play()
    assert processes[0] == processes[1]
    # 64 MB more in every episode, at its first step.
    leaking, processes = play(misbehaviour="leak", at_step=1, memory_limit_mb=120)
    assert processes[0] != processes[1]
    faults = [fault for step in leaking for fault in step.faults]
    assert {fault.reason for fault in faults} == {FaultReason.MEMORY}
    assert {fault.env for fault in faults} == {-1}
    assert "memory_limit_mb allows 120" in faults[0].detail
    for one, other in zip(sound, leaking, strict=True):
        assert other.valid.all()
        assert np.array_equal(one.observations["states"], other.observations["states"])
        assert np.array_equal(one.rewards, other.rewards)


@pytest.mark.parametrize("where", ["start", "reset"])
def test_a_memory_limit_below_what_a_process_needs_is_refused(point, where):
    """At once where building the envs takes more; else when bringing them back does."""
    reset = {"misbehaviour": "leak", "at_step": 0}
    with SupervisedVectorEnv(point(processes=1), num_envs=1, seed=0) as env:
        held = psutil.Process(env.process_ids[0]).memory_info().rss >> 20
    limit = held - 20 if where == "start" else held + 32
    config = point(processes=1, memory_limit_mb=limit, **(reset if where == "reset" else {}))

    def play() -> None:
        with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
            env.reset()
            for chunk in actions(20, 1):
                env.chunk_step(chunk)

    with pytest.raises(ConfigError if where == "start" else RunFailure) as refused:
        play()
    assert re.search(
        rf"memory_limit_mb: {limit} MB are fewer than .* nearest: \d+", str(refused.value)
    )
    assert "\n" not in str(refused.value)


def test_a_picture_that_cannot_be_drawn_ends_no_env(point):
    config = point(processes=1, options={"draws": False})
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        env.reset()
        with pytest.raises(RunFailure, match="RuntimeError: no graphics"):
            env.render(0)
        assert env.chunk_step(actions(1, 2)[0]).valid.all()


def test_a_black_picture_of_a_camera_that_sees_something_closes_the_episode(point):
    """The renderer is lost: the env is built anew, with another one."""
    options = {"pictures": True}
    config = point("black", one_in=3, at_step=4, max_fault_rate=1.0, options=options)
    with SupervisedVectorEnv(config, num_envs=4, seed=0) as env:
        env.reset()
        steps = [env.chunk_step(chunk) for chunk in actions(6, 4)]
    faults = [fault for step in steps for fault in step.faults]
    assert faults
    assert {fault.reason for fault in faults} == {FaultReason.BLACK}
    assert "'main_images' is black: the renderer is lost" in faults[0].detail
    for step in steps:
        assert step.observations["main_images"].any(axis=(1, 2, 3)).all()
        assert (step.reset_seeds[~step.valid] % 3 == 0).all()


def test_an_env_whose_actions_must_not_be_repeated_gives_its_episode_up(point):
    """Its neighbour crashes; what would be replayed is closed as invalid instead."""
    options = {"replays": False}
    config = point("crash", one_in=2, at_step=3, max_fault_rate=1.0, processes=1, options=options)
    with SupervisedVectorEnv(config, num_envs=4, seed=3) as env:
        env.reset()
        steps = [env.chunk_step(chunk) for chunk in actions(4, 4)]
    faults = [fault for step in steps for fault in step.faults]
    reasons = [fault.reason for fault in faults]
    assert FaultReason.CRASH in reasons
    assert FaultReason.NOT_REPLAYABLE in reasons
    closed = [fault for fault in faults if fault.reason is FaultReason.NOT_REPLAYABLE]
    assert all("must not be repeated" in fault.detail for fault in closed)
    invalid = {record.episode_id for step in steps for record in step.episodes if not record.valid}
    assert {fault.episode_id for fault in faults} == invalid


def test_environment_variables_reach_the_env_processes(point, monkeypatch):
    monkeypatch.delenv("RLINF_TEST_VARIABLE", raising=False)
    config = point(variables={"RLINF_TEST_VARIABLE": "seen"}, processes=1)
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        (process,) = env.process_ids
        assert psutil.Process(process).environ()["RLINF_TEST_VARIABLE"] == "seen"


def test_a_process_that_is_replaced_for_its_memory_is_no_faulty_episode(point):
    config = point("leak", at_step=1, memory_limit_mb=300, processes=1, max_fault_rate=0.0)
    found, episodes = [], []
    with SupervisedVectorEnv(config, num_envs=2, seed=3) as env:
        env.reset()
        for chunk in actions(60, 2):
            step = env.chunk_step(chunk)
            found += [fault.reason for fault in step.faults]
            episodes += step.episodes
    assert len(found) >= 2
    assert set(found) == {FaultReason.MEMORY}
    assert episodes
    assert all(episode.valid for episode in episodes)


def test_no_listed_episode_is_forgotten_where_a_process_is_replaced_for_its_memory(point):
    """Though simulators that cannot be replayed lose what runs in it."""
    options = {"replays": False}
    config = point("leak", at_step=1, memory_limit_mb=200, processes=1, options=options,
                   max_episode_steps=3)  # fmt: skip
    episodes = [(number, 100 + number) for number in range(12)]
    with SupervisedVectorEnv(config, num_envs=2, seed=3, episode_seeds=episodes) as env:
        env.reset()
        played, reasons = [], []
        while not env.exhausted():
            step = env.chunk_step(np.zeros((2, CHUNK, 2), np.float32))
            reasons += [fault.reason for fault in step.faults]
            played += step.episodes
    assert FaultReason.MEMORY in reasons
    assert sorted((e.episode_id, e.seed) for e in played) == episodes
    assert all(e.valid for e in played)


@pytest.mark.parametrize("replays", [False, True])
def test_a_process_that_is_lost_between_two_chunks_repeats_no_result(point, replays):
    """Nor does the action that follows count, where the seed alone does not decide the start."""
    config = point("noise", processes=1, max_episode_steps=CHUNK, max_fault_rate=1.0,
                   options={"replays": replays})  # fmt: skip
    still = np.zeros((2, CHUNK, 2), np.float32)
    with SupervisedVectorEnv(config, num_envs=2, seed=3) as env:
        env.reset()
        first = env.chunk_step(still)
        kill(env.process_ids[0])
        second = env.chunk_step(still)
        third = env.chunk_step(still)
    assert [episode.valid for episode in first.episodes] == [True, True]
    assert not second.valid.any()
    assert not second.rewards.any()
    told = [e.episode_id for step in (first, second, third) for e in step.episodes]
    assert len(told) == len(set(told))


def test_a_lost_process_goes_on_from_the_last_states_and_repeats_what_came_after(point):
    """Its resets lead elsewhere each time, so that repeating all actions would, too."""
    options = {"states": True, "seconds": 0.26}  # four steps are long enough to keep a state
    config = point("noise", processes=1, max_fault_rate=1.0, options=options)
    chunks = actions(3, 2)
    with SupervisedVectorEnv(config, num_envs=2, seed=3) as env:
        position = env.reset()["states"]
        for given in (chunks[0], chunks[1][:, :1]):
            env.chunk_step(given)
        kill(env.process_ids[0])
        step = env.chunk_step(chunks[2][:, :1])
    assert [(fault.env, fault.reason) for fault in step.faults] == [(-1, FaultReason.CRASH)]
    assert step.valid.all()
    given = np.concatenate([chunks[0], chunks[1][:, :1], chunks[2][:, :1]], axis=1)
    expected = position + 0.1 * given.sum(1)
    assert np.allclose(step.observations["states"], expected, atol=1e-5)


def test_a_state_of_another_episode_brings_nothing_back(point):
    """The listed episode is tried again after a fault, under the same number and seed."""
    options = {"states": True, "seconds": 0.07, "replays": False}
    config = point("raise", at_step=17, processes=1, max_fault_rate=1.0, options=options)
    given = np.full((1, 18, 2), 0.01, np.float32)
    with SupervisedVectorEnv(config, num_envs=1, seed=3, episode_seeds=[(0, 100)]) as env:
        start = env.reset()["states"]
        env.chunk_step(given[:, :16])  # long enough to keep the state of its end
        env.chunk_step(given[:, 16:17])
        assert np.array_equal(env.observations()["states"], start)
        env.chunk_step(given[:, 17:])
        kill(env.process_ids[0])
        step = env.chunk_step(given[:, 17:])
    assert FaultReason.NOT_REPLAYABLE in [fault.reason for fault in step.faults]


def test_a_process_that_is_replaced_for_its_memory_tells_the_states_of_its_envs(point):
    """Which go on, though their actions must not be repeated."""
    options = {"replays": False, "states": True}
    config = point("leak", at_step=1, memory_limit_mb=200, processes=1, options=options)
    found, valid = [], []
    with SupervisedVectorEnv(config, num_envs=2, seed=3) as env:
        env.reset()
        for chunk in actions(20, 2):
            step = env.chunk_step(chunk)
            found += [fault.reason for fault in step.faults]
            valid.append(step.valid.all())
    assert set(found) == {FaultReason.MEMORY}
    assert all(valid)


def test_a_run_that_loses_all_episodes_to_its_memory_limit_ends(point):
    config = point("leak", at_step=1, memory_limit_mb=120, processes=1,
                   options={"replays": False})  # fmt: skip

    def play() -> None:
        with SupervisedVectorEnv(config, num_envs=2, seed=3) as env:
            env.reset()
            for _ in range(60):
                env.chunk_step(np.zeros((2, CHUNK, 2), np.float32))

    with pytest.raises(RunFailure, match=r"max_fault_rate=0\.1 .*memory \d+"):
        play()
