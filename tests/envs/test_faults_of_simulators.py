"""Faults of real simulators: killed, hung, wrong data, too much memory, no picture, no reset.

Every simulator here misbehaves by the seed of the episode, in its own process and under its own
interpreter (`rlinf env install NAME`).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlinf.envs.base import REGISTRY
from rlinf.envs.config import EnvConfig
from rlinf.envs.installation import interpreter
from rlinf.envs.installation import variables as variables_of
from rlinf.envs.recording import record_episodes
from rlinf.envs.results import FaultReason
from rlinf.envs.supervised.failing_tasks import BEGUN, FAILED, REPLACED
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import RunFailure
from tests.packages import require_simulator, write_entry_points

REASONS = {
    "crash": FaultReason.CRASH,
    "hang": FaultReason.HANG,
    "raise": FaultReason.EXCEPTION,
    "nan": FaultReason.NOT_FINITE,
    "shape": FaultReason.MALFORMED,
    "dtype": FaultReason.MALFORMED,
    "black": FaultReason.BLACK,
}
SIMULATORS: dict[str, dict[str, Any]] = {
    "metaworld": {"task": "reach-v3", "images": True, "image_size": 64},
    "gymnasium_robotics": {"task": "FetchReachDense-v4"},
    "robosuite": {"task": "Lift", "images": True, "image_size": 64},
    "panda_gym": {"task": "PandaReachDense-v3"},
    # Of three tasks one built model may lie idle: the others are closed beside those at work.
    "libero": {
        "suite": "libero_spatial",
        "tasks": [0, 1, 2],
        "image_size": 64,
        "settle_steps": 1,
        "models": 1,
    },
    "calvin": {"images": False},
    "mjlab": {"task": "Mjlab-Cartpole-Balance"},
}
SINGLE = [name for name in SIMULATORS if name != "mjlab"]
REPLAYED = [name for name in SINGLE if REGISTRY.load(name).replayable]
CHUNK = 4


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Config maker of a simulator that misbehaves, as a package outside of the project."""
    source = Path(__file__).with_name("faulty_env.py").read_text()
    (tmp_path / "outside_faulty.py").write_text(source)
    classes = {"faulty": "FaultyEnv", "faulty_batch": "FaultyBatch"}
    points = {name: f"outside_faulty:{each}" for name, each in classes.items()}
    write_entry_points(tmp_path, "outside-faulty", {"rlinf.envs": points})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where other interpreters find it

    def make(name: str, *, inner: dict[str, Any] | None = None, **settings: Any) -> EnvConfig:
        require_simulator(name)
        own = {
            key: settings.pop(key) for key in ("kinds", "broken_task", "leak_mb") if key in settings
        }
        return EnvConfig(
            type="faulty_batch" if name == "mjlab" else "faulty",
            options={"inner": name, "options": {**SIMULATORS[name], **(inner or {})}, **own},
            python=interpreter(name),
            variables=variables_of(name),
            **{
                "max_episode_steps": 8,
                "processes": 1,
                "max_fault_rate": 1.0,
                "step_deadline": 25.0,
                "start_deadline": 600.0,
                **settings,
            },
        )

    return make


def actions(env: SupervisedVectorEnv) -> np.ndarray:
    return np.full((env.num_envs, CHUNK, env.env_spec.action_dim), 0.1, np.float32)


def play(config: EnvConfig, episodes: list[tuple[int, int]]) -> tuple[list, list, dict]:
    """Records and faults of listed episodes, and the last state that each was seen in."""
    records, faults, ends = [], [], {}
    with SupervisedVectorEnv(config, num_envs=2, seed=0, episode_seeds=episodes) as env:
        env.reset()
        while not env.exhausted():
            step = env.chunk_step(actions(env))
            records += step.episodes
            faults += step.faults
            if step.final_observations is not None:
                rows = np.flatnonzero(step.final_mask)
                shown = zip(rows, step.final_observations["states"], strict=True)
                ends.update({int(step.episode_ids[row]): states for row, states in shown})
    return records, faults, ends


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SINGLE)
def test_every_fault_of_a_simulator_closes_its_episode_and_no_other(faulty, name):
    kinds = [k for k in REASONS if k != "black" or "image_size" in SIMULATORS[name]]
    if name not in REPLAYED:  # a lost process takes the neighbours with it
        kinds = [kind for kind in kinds if kind not in ("crash", "hang")]
    listed = [kind for kind in kinds for kind in (kind, "none")]
    episodes = list(enumerate(range(len(listed))))
    records, faults, ends = play(faulty(name, kinds=listed), episodes)
    assert sorted((record.episode_id, record.seed) for record in records) == episodes
    for record in records:
        assert record.valid == (listed[record.seed] == "none"), listed[record.seed]
    # Each is tried twice.
    found = Counter((listed[fault.episode_id], fault.reason) for fault in faults)
    assert found == {(kind, REASONS[kind]): 2 for kind in kinds}
    details = {listed[fault.episode_id]: fault.detail for fault in faults}
    if name in REPLAYED:
        assert "SIGKILL" in details["crash"]
        assert "outside_faulty" in details["hang"]  # its stack
    assert "the gripper fell off" in details["raise"]
    _, none, undisturbed = play(faulty(name), [each for each in episodes if each[1] % 2])
    assert not none
    assert ends.keys() == undisturbed.keys()
    off = 0.0 if REGISTRY.load(name).deterministic else 1e-2
    for episode, states in ends.items():
        same = np.allclose(states, undisturbed[episode], rtol=0.0, atol=off)
        assert same, f"episode {episode} was disturbed"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", REPLAYED)
def test_a_simulator_that_leaks_is_replaced_and_loses_no_episode(faulty, name):
    def steps(config: EnvConfig) -> tuple[list, set]:
        with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
            env.reset()
            pids = set(env.process_ids)
            found = []
            for _ in range(6):
                found.append(env.chunk_step(actions(env)))
                pids |= set(env.process_ids)
            return found, pids

    with SupervisedVectorEnv(faulty(name), num_envs=2, seed=0) as env:
        env.reset()
        env.chunk_step(actions(env))
        held = psutil.Process(env.process_ids[0]).memory_info().rss >> 20
    sound, same = steps(faulty(name))
    leaking, pids = steps(faulty(name, leak_mb=80, memory_limit_mb=held + 220))
    assert len(same) == 1
    assert len(pids) > 1
    faults = [fault for step in leaking for fault in step.faults]
    assert {(fault.reason, fault.env) for fault in faults} == {(FaultReason.MEMORY, -1)}
    assert re.search(r"\d+ MB are held, memory_limit_mb allows", faults[0].detail)
    for one, other in zip(sound, leaking, strict=True):
        assert other.valid.all()
        assert np.array_equal(one.observations["states"], other.observations["states"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SINGLE)
def test_a_picture_that_a_simulator_cannot_draw_ends_no_episode(faulty, name):
    with SupervisedVectorEnv(faulty(name, kinds=["no picture"]), num_envs=2, seed=0) as env:
        env.reset()
        with pytest.raises(RunFailure, match="the graphics card fell off the bus"):
            env.render(0)
        assert env.chunk_step(actions(env)).valid.all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_of_a_simulator_that_cannot_be_reset_is_left_out(faulty):
    settings = {"inner": {"task": "MT10", "images": False}, "broken_task": 3}
    with (
        SupervisedVectorEnv(faulty("metaworld", **settings), num_envs=60, seed=0) as env,
        pytest.raises(RunFailure, match=r"task 3 of 10.*ValueError: the model has no such body"),
    ):
        env.reset()
    settings.update(leave_out_failing_tasks=True, max_fault_rate=0.0)
    with SupervisedVectorEnv(faulty("metaworld", **settings), num_envs=60, seed=0) as env:
        env.reset()
        seeds = [env.chunk_step(actions(env)).reset_seeds for _ in range(5)]
        counts = env.task_resets
    assert {int(seed) % 10 for seed in np.concatenate(seeds)} == set(range(10)) - {3}
    assert counts[3, FAILED] == 3
    assert counts[3, BEGUN] == 0
    assert counts[3, REPLACED] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_of_a_batch_closes_its_episodes(faulty):
    kinds = ["crash", "hang", "raise", "nan", "shape", "dtype"]
    listed = [kind for kind in kinds for kind in (kind, "none")]
    config = faulty("mjlab", kinds=listed, step_deadline=60.0)
    assert REGISTRY.load("mjlab").deterministic is False
    records, faults, _ = play(config, list(enumerate(range(len(listed)))))
    outcomes = {record.episode_id: record for record in records}
    assert outcomes.keys() == set(range(len(listed)))
    assert not any(record.valid for record in records if listed[record.seed] != "none")
    own = Counter(fault.reason for fault in faults if listed[fault.episode_id] != "none")
    assert {REASONS[kind] for kind in kinds} <= own.keys()


def test_an_episode_that_is_not_recorded_is_told_with_what_the_simulator_said(
    faulty, caplog: pytest.LogCaptureFixture
) -> None:
    config = faulty("metaworld", kinds=("raise",))
    still = np.zeros((1, 1, 4), np.float32)
    _, episodes = record_episodes(config, lambda _: lambda _: still, [(0, 1)], num_envs=1)
    assert episodes == []
    told = "an episode is left out (exception): ValueError: the gripper fell off"
    assert told in caplog.text
