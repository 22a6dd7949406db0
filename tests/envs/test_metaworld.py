"""The MetaWorld adapter against MetaWorld itself."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.envs.metaworld import MetaWorldEnv, MetaWorldOptions, task_names
from rlinf.envs.wire import decode_tree, encode_tree

mujoco = pytest.importorskip("mujoco")
env_dict = pytest.importorskip("metaworld.env_dict")

SOME = ["reach-v3", "door-close-v3", "button-press-topdown-v3", "lever-pull-v3", "stick-push-v3"]


def original(task: str):
    env = env_dict.ALL_V3_ENVIRONMENTS[task]()
    env._set_task_called = True
    env._freeze_rand_vec = True
    env._partially_observable = False
    env.__dict__.pop("sawyer_observation_space", None)
    return env


def assert_same_episodes(task: str) -> None:
    """Three episodes of the adapter and of MetaWorld given the same positions, bit for bit.

    A second env of the process is used in between, and the second episode goes on in a new env
    from a saved state.
    """
    light = MetaWorldEnv(MetaWorldOptions(task=task))
    other, reference = MetaWorldEnv(MetaWorldOptions(task=task)), original(task)
    generator = np.random.default_rng(1)
    for episode, seed in enumerate((3, 4, 3)):
        observation, _ = light.reset(seed=seed)
        reference._last_rand_vec = light._task._env._last_rand_vec
        expected, _ = reference.reset()
        assert np.array_equal(observation["states"], expected.astype(np.float32))
        other.reset(seed=seed + 100)
        for number in range(50):
            action = generator.uniform(-1, 1, 4).astype(np.float32)
            if number % 20 == 10:
                other.step(action)
            observation, reward, _, _, info = light.step(action)
            expected, expected_reward, _, _, expected_info = reference.step(action)
            assert np.array_equal(observation["states"], expected.astype(np.float32)), number
            assert reward == float(expected_reward), number
            assert info.pop("success") == bool(expected_info.pop("success"))
            assert info == expected_info
            if episode == 1 and number == 30:
                state = decode_tree(encode_tree(light.get_state()))
                light = MetaWorldEnv(MetaWorldOptions(task=task))
                light.reset(seed=seed)
                light.set_state(state)


@pytest.mark.parametrize("task", SOME)
def test_episodes_are_those_of_metaworld(task):
    assert_same_episodes(task)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [task for task in env_dict.ALL_V3_ENVIRONMENTS if task not in SOME]
)
def test_episodes_of_the_other_tasks_are_those_of_metaworld(task):
    assert_same_episodes(task)


def test_task_names_are_those_of_the_installed_package():
    assert sorted(task_names()) == sorted(env_dict.ALL_V3_ENVIRONMENTS)


def test_quaternions_are_those_of_scipy():
    from scipy.spatial.transform import Rotation

    from rlinf.envs.metaworld_task import QuickRotation

    for quaternion in np.random.default_rng(0).normal(size=(500, 4)):
        matrix = np.zeros(9)
        mujoco.mju_quat2Mat(matrix, quaternion / np.linalg.norm(quaternion))
        matrix = matrix.reshape(3, 3)
        expected = Rotation.from_matrix(matrix).as_quat()
        assert QuickRotation.from_matrix(matrix).as_quat() == tuple(expected)


def test_goals_differ_between_seeds_and_not_between_resets_of_a_seed():
    env = MetaWorldEnv(MetaWorldOptions(task="reach-v3"))
    goals = [env.reset(seed=seed)[0]["states"][-3:] for seed in (1, 2, 1)]
    assert not np.array_equal(goals[0], goals[1])
    assert np.array_equal(goals[0], goals[2])


def test_pictures_show_the_scene_upright():
    """The floor is light and the sky is off (black), so the lower half is the brighter one."""
    options = MetaWorldOptions(task="door-close-v3", images=True, image_size=64, states=False)
    env = MetaWorldEnv(options)
    picture = env.reset(seed=0)[0]["main_images"]
    assert (picture.shape, picture.dtype) == ((64, 64, 3), np.uint8)
    assert picture[32:].mean() > 2 * picture[:16].mean()
    assert env.render().shape == (320, 320, 3)
    again = env.observe()["main_images"]
    assert np.array_equal(picture, again)


def test_a_blind_step_is_the_same_step():
    actions = np.random.default_rng(0).uniform(-1, 1, (10, 4)).astype(np.float32)
    env = MetaWorldEnv(MetaWorldOptions(task="push-v3"))
    env.reset(seed=0)
    seen = [env.step(action) for action in actions]
    env.reset(seed=0)
    rewards = [env.step_blind(action)[0] for action in actions]
    assert rewards == [step[1] for step in seen]
    assert np.array_equal(env.observe()["states"], seen[-1][0]["states"])
