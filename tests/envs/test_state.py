"""Going on from a saved state equals never having stopped, bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.results import VectorStep
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import CheckpointError
from tests.packages import require_simulator

METAWORLD = ["reach-v3", "door-close-v3", "basketball-v3", "push-v3"]
MUJOCO = [
    f"{name}-v5"
    for name in (
        "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum",
        "InvertedPendulum", "Pusher", "Swimmer", "Walker2d",
    )
]  # fmt: skip
DM_CONTROL = [
    "cartpole-swingup", "dog-fetch", "finger-turn_hard", "fish-swim", "humanoid-run",
    "manipulator-insert_peg", "quadruped-escape", "stacker-stack_4", "walker-walk",
]  # fmt: skip
ROBOTICS = [
    "FetchPickAndPlace-v4", "HandReach-v3", "AdroitHandDoor-v1", "AdroitHandHammer-v1",
    "AdroitHandPen-v1", "AdroitHandRelocate-v1", "PointMaze_Medium-v3", "AntMaze_Medium-v5",
]  # fmt: skip


ROBOSUITE = ["Lift", "NutAssembly", "PickPlaceCan", "TwoArmLift", "Wipe"]
LIBERO = [
    ("libero_spatial", 3), ("libero_object", 0), ("libero_goal", 0),  # a drawer
    ("libero_90", 39), ("libero_10", 9), ("libero_goal_swap", 7),  # a stove that is on, a microwave
]  # fmt: skip


def plain(value) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    return isinstance(value, int | str) or (
        isinstance(value, np.ndarray) and not value.dtype.hasobject
    )


def assert_equal(found: VectorStep, expected: VectorStep) -> None:
    for name in vars(expected):
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(other, np.ndarray):
            assert np.array_equal(one, other), name
        elif isinstance(other, dict):
            assert all(np.array_equal(one[key], other[key]) for key in other), name
        else:
            assert one == other, name


def resume_equals_going_on(config: EnvConfig, chunk: int, stages: int = 1) -> dict:
    """Stop in the middle of the second episodes, go on in other processes for two more."""
    generator = np.random.default_rng(0)
    with SupervisedVectorEnv(config, num_envs=4, seed=2, stages=stages) as env:
        spec, size = env.env_spec, 4 // stages
        low, high = spec.action_low, spec.action_high
        shape = (24, 4, chunk, spec.action_dim)
        actions = generator.uniform(low, high, shape).astype(np.float32).round(3)
        if spec.choices:
            actions = actions.round()

        def play(target: SupervisedVectorEnv, rounds: range) -> list[VectorStep]:
            steps = []
            for number in rounds:
                for stage in range(stages):
                    rows = slice(stage * size, (stage + 1) * size)
                    target.send(actions[number, rows], stage)
                steps += [target.receive(stage) for stage in range(stages)]
            return steps

        for stage in range(stages):
            env.reset(stage)
        play(env, range(9))
        state = env.state_dict()
        expected = play(env, range(9, 24))
    assert plain(state)
    other_split = config.model_copy(update={"processes": 1 if config.processes == 2 else 2})
    with SupervisedVectorEnv(other_split, num_envs=4, seed=2, stages=stages) as env:
        env.load_state_dict(state)
        for stage in range(stages):
            rows = slice(stage * size, (stage + 1) * size)
            saved = {key: value[rows] for key, value in state["observation"].items()}
            assert all(np.array_equal(saved[k], v) for k, v in env.observations(stage).items())
        for found, wanted in zip(play(env, range(9, 24)), expected, strict=True):
            assert_equal(found, wanted)
    assert any(step.episodes for step in expected)
    assert all(step.valid.all() for step in expected)
    return state


@pytest.mark.parametrize(
    "task",
    [METAWORLD[0], *(pytest.param(task, marks=pytest.mark.slow) for task in METAWORLD[1:])],
)
def test_metaworld_by_the_state_of_the_simulator(task):
    hidden = task == "push-v3"
    config = EnvConfig(
        type="metaworld",
        options={"task": task, "partially_observable": hidden},
        max_episode_steps=25,
        processes=2,
    )
    state = resume_equals_going_on(config, chunk=4)
    assert state["simulator"]["size"].all()
    goals = state["observation"]["states"][:, -3:]
    assert goals.any() != hidden


@pytest.mark.parametrize(
    "name",
    ["Reacher-v5", *(pytest.param(name, marks=pytest.mark.slow) for name in MUJOCO)],
)
def test_tasks_of_gymnasium_on_mujoco_by_the_state_of_the_simulator(name: str) -> None:
    """The limit of Reacher is gymnasium's own."""
    options = {"id": name, "success_return": -4.0}
    config = EnvConfig(type="gymnasium", options=options, max_episode_steps=60, processes=2)
    state = resume_equals_going_on(config, chunk=8)
    assert state["simulator"]["size"].all()


def test_what_a_wrapper_keeps_is_replayed() -> None:
    options = {"id": "tests.runners.odd_envs:Remembers-v0"}
    config = EnvConfig(type="gymnasium", options=options, max_episode_steps=25, processes=2)
    assert not resume_equals_going_on(config, chunk=4)["simulator"]["size"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task"),
    [
        *(("dm_control", task) for task in DM_CONTROL),
        *(("gymnasium_robotics", task) for task in ROBOTICS),
    ],
)
def test_tasks_on_mujoco_by_the_state_of_the_simulator(name: str, task: str) -> None:
    require_simulator(name)
    config = EnvConfig(type=name, options={"task": task}, max_episode_steps=60, processes=2)
    state = resume_equals_going_on(config, chunk=8)
    assert state["simulator"]["size"].all()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("robosuite", {"task": task}) for task in ROBOSUITE),
        *(("libero", {"suite": suite, "tasks": (task,), "settle_steps": 1})
          for suite, task in LIBERO),
    ],
)  # fmt: skip
def test_tasks_of_robosuite_by_the_state_of_the_simulator(name: str, options: dict) -> None:
    require_simulator(name)
    pictures = {"images": True, "image_size": 32}
    config = EnvConfig(
        type=name, options={**options, **pictures}, max_episode_steps=30, processes=2,
        start_deadline=900.0, step_deadline=300.0,
    )  # fmt: skip
    state = resume_equals_going_on(config, chunk=4)
    assert state["simulator"]["size"].all()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("glows", [True, False])
def test_a_stove_glows_after_its_state_as_before(glows: bool) -> None:
    """The state is that of a turned knob, taken up by a simulator in which it was not, and back."""
    require_simulator("libero")
    config = EnvConfig(type="libero", max_episode_steps=1)
    done = subprocess.run(
        [str(config.interpreter), "-c", _STOVE, "1.0" if glows else "0.0"],
        cwd=Path(__file__).parents[2], env={**os.environ, **config.environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


_STOVE = """
import sys
import numpy as np
from rlinf.envs.libero import LiberoEnv, LiberoOptions

def step(knob):
    sim = env._present._env.sim
    sim.data.set_joint_qpos("flat_stove_1_button", knob)
    env.step_blind(np.zeros(7))
    return sim.model._model.site_rgba.copy(), env.observe()["main_images"]

env = LiberoEnv(LiberoOptions(suite="libero_goal", tasks=(7,), image_size=64, settle_steps=0))
env.reset(seed=0)
turned = float(sys.argv[1])
glow, shown = step(turned)
state = env.get_state()
assert not np.array_equal(step(1.0 - turned)[0], glow)
env.reset(seed=0)
env.set_state(state)
assert np.array_equal(env._present._env.sim.model._model.site_rgba, glow)
assert np.array_equal(env.observe()["main_images"], shown)
"""


@pytest.mark.parametrize(("name", "stages"), [("CartPole-v1", 1), ("Pendulum-v1", 2)])
def test_gymnasium_by_replaying_actions(name, stages):
    config = EnvConfig(type="gymnasium", options={"id": name}, max_episode_steps=25, processes=2)
    state = resume_equals_going_on(config, chunk=3, stages=stages)
    assert not state["simulator"]["size"].any()


def test_an_env_that_had_ended_stays_ended(point):
    config = point(auto_reset=False, max_episode_steps=4)
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        env.reset()
        env.chunk_step(np.ones((2, 4, 2)))
        state = env.state_dict()
        expected = env.reset()["states"]
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        env.load_state_dict(state)
        assert not env.chunk_step(np.ones((2, 4, 2))).active.any()
        assert np.array_equal(env.reset()["states"], expected)


def test_a_simulator_that_does_not_repeat_itself_is_noticed():
    """One logged action is changed, so that the replay leads elsewhere."""
    config = EnvConfig(type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=25)
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        env.reset()
        env.chunk_step(np.ones((2, 4, 1)))
        state = env.state_dict()
        state["log"][0, 1] += 0.5
        env.load_state_dict(state)
        step = env.chunk_step(np.ones((2, 4, 1)))
        assert step.valid.tolist() == [False, True]
        assert "could not be rebuilt" in step.faults[0].detail
        assert env.chunk_step(np.ones((2, 4, 1))).valid.all()


def test_the_state_of_other_envs_is_refused(point):
    with SupervisedVectorEnv(point(), num_envs=4, seed=0) as env:
        env.reset()
        state = env.state_dict()
    with (
        SupervisedVectorEnv(point(), num_envs=2, seed=0) as env,
        pytest.raises(CheckpointError, match="state of 4 envs from number 0"),
    ):
        env.load_state_dict(state)
    other = EnvConfig(type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=20)
    with (
        SupervisedVectorEnv(other, num_envs=4, seed=0) as env,
        pytest.raises(CheckpointError, match="'states' has shape"),
    ):
        env.load_state_dict(state)
