"""The MetaWorld adapter against MetaWorld itself."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest

from rlinf.envs.metaworld.adapter import (
    MT10,
    MetaWorldEnv,
    MetaWorldOptions,
    task_names,
    tasks_of,
)
from rlinf.errors import ConfigError
from rlinf.processes.wire import decode_tree, encode_tree

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


def action_of(kind: str, policy, observation: np.ndarray, generator) -> np.ndarray:
    """Return an action [4]: at random, at or beyond the limits, or one that solves the task."""
    if kind == "random":
        return generator.uniform(-1, 1, 4).astype(np.float32)
    if kind == "extreme":
        return np.sign(generator.uniform(-1, 1, 4)).astype(np.float32)
    if kind == "beyond":
        return generator.normal(0, 3, 4).astype(np.float32)
    planned = np.clip(policy.get_action(observation), -1, 1)
    if kind == "noisy":
        return (planned + generator.normal(0, 0.3, 4)).astype(np.float32)
    return planned if kind == "double" else planned.astype(np.float32)


def assert_same_bits(found: object, expected: object, where: str) -> None:
    """The same type, and the same doubles to the last bit."""
    assert type(found) is type(expected), where
    bits = [np.asarray(value, np.float64).tobytes() for value in (found, expected)]
    assert bits[0] == bits[1], f"{where}: {found} instead of {expected}"


def assert_same_bits_in_episodes(task: str, kinds: tuple[str, ...], steps: int) -> None:
    """One episode per kind of action: observation, reward, info and state of the simulator."""
    from metaworld.policies import ENV_POLICY_MAP

    from rlinf.envs.metaworld.task import MetaWorldTask, physics

    light, reference = MetaWorldTask(task, partially_observable=False), original(task)
    policy, generator = ENV_POLICY_MAP[task](), np.random.default_rng(2)
    for seed, kind in enumerate(kinds):
        observation = light.reset(seed)
        reference._last_rand_vec = light._env._last_rand_vec
        expected, _ = reference.reset()
        assert_same_bits(observation, expected, "reset")
        for number in range(steps):
            where = f"{kind}, step {number}"
            action = action_of(kind, policy, expected, generator)
            observation, reward, info = light.step(action)
            expected, expected_reward, _, _, expected_info = reference.step(action)
            assert_same_bits(observation, expected, where)
            assert_same_bits(reward, float(expected_reward), where)
            assert list(info) == list(expected_info)
            for name, value in info.items():
                assert_same_bits(value, expected_info[name], f"{where}, {name}")
            assert_same_bits(physics(light._env), physics(reference), where)


@pytest.mark.parametrize("task", [*SOME, "pick-place-v3"])
def test_steps_are_those_of_metaworld_to_the_last_bit(task):
    assert_same_bits_in_episodes(task, ("noisy", "beyond"), steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("task", env_dict.ALL_V3_ENVIRONMENTS)
def test_whole_episodes_are_those_of_metaworld_to_the_last_bit(task):
    kinds = ("random", "extreme", "beyond", "script", "noisy", "script", "double")
    assert_same_bits_in_episodes(task, kinds, steps=500)


def test_a_hidden_goal_is_hidden():
    from rlinf.envs.metaworld.task import MetaWorldTask

    light, reference = MetaWorldTask("push-v3", partially_observable=True), original("push-v3")
    reference._partially_observable = True
    observation = light.reset(1)
    reference._last_rand_vec = light._env._last_rand_vec
    assert_same_bits(observation, reference.reset()[0], "reset")
    action = np.ones(4, np.float32)
    observation = light.step(action)[0]
    assert_same_bits(observation, reference.step(action)[0], "step")
    assert not observation[-3:].any()


def test_an_episode_does_not_go_on_beyond_its_limit():
    from rlinf.envs.metaworld.task import MetaWorldTask

    task = MetaWorldTask("reach-v3", partially_observable=False)
    task.reset(0)
    task._env.curr_path_length = task._env.max_path_length
    with pytest.raises(ValueError, match="500 steps"):
        task.step(np.zeros(4, np.float32))


def test_quick_rewards_are_those_of_metaworld():
    from metaworld.utils import reward_utils

    from rlinf.envs.metaworld import quick

    generator = np.random.default_rng(3)
    kinds = (float, np.float64, np.float32)
    for _ in range(3000):
        x, y, lower, width, margin = np.abs(generator.normal(0, [1, 1, 0.5, 0.5, 1]))
        margin *= generator.random() < 0.9
        as_x, as_y, as_margin = (kinds[index] for index in generator.integers(0, 3, 3))
        sigmoid = ("long_tail", "gaussian")[int(generator.random() < 0.1)]
        call = (as_x(x), (lower, float(lower + width)), as_margin(margin), sigmoid)
        assert_same_bits(quick.tolerance(*call), reward_utils.tolerance(*call), str(call))
        pair = as_x(min(x, 1)), as_y(min(y, 1) * (generator.random() < 0.9))
        assert_same_bits(
            quick.hamacher_product(*pair), reward_utils.hamacher_product(*pair), str(pair)
        )
    for value in (np.inf, np.nan, 1e200):
        call = (value, (0, 0.1), 1e-3, "long_tail")
        with np.errstate(over="ignore"):
            assert_same_bits(quick.tolerance(*call), reward_utils.tolerance(*call), str(call))
    for function in (quick.tolerance, reward_utils.tolerance):
        with pytest.raises(ValueError, match="Lower bound"):
            function(0.5, (1, 0), 1.0, "long_tail")
        with pytest.raises(ValueError, match="margin"):
            function(0.5, (0, 1), -1.0, "long_tail")
    for product in (quick.hamacher_product, reward_utils.hamacher_product):
        with pytest.raises(ValueError, match="between 0 and 1"):
            product(1.5, np.float64(0.5))


def test_quick_array_functions_are_those_of_numpy():
    from rlinf.envs.metaworld import quick

    generator = np.random.default_rng(4)
    for size in (1, 2, 3, 4, 7):
        for _ in range(50):
            wide = generator.normal(size=(2 * size, 2))
            vectors = (wide[:size, 0], wide[0].copy(), wide[::-1, 1], wide[0].astype(np.float32))
            for vector in (*vectors, wide, wide[0, 0], float(wide[0, 0]), 3):
                assert_same_bits(quick.norm(vector), np.linalg.norm(vector), repr(vector))
            assert_same_bits(quick.norm(vectors[2], ord=2), np.linalg.norm(vectors[2], ord=2), "2")
            for parts in (vectors[:3], (wide[0, 0], wide[1, 1]), (1.0, wide[0]), vectors):
                assert_same_bits(quick.hstack(parts), np.hstack(parts), repr(parts))


def test_simulations_are_released():
    """The views that an env keeps must not keep the simulation alive beyond the env."""
    env = MetaWorldEnv(MetaWorldOptions(task="reach-v3"))
    data = weakref.ref(env._task._env.data)
    env.reset(seed=0)
    env.close()
    del env
    # The model knows the env that used it last.
    MetaWorldEnv(MetaWorldOptions(task="reach-v3")).reset(seed=0)
    gc.collect()
    assert data() is None


def test_task_names_are_those_of_the_installed_package():
    assert sorted(task_names()) == sorted(env_dict.ALL_V3_ENVIRONMENTS)


def test_quaternions_are_those_of_scipy():
    from scipy.spatial.transform import Rotation

    from rlinf.envs.metaworld.quick import QuickRotation

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


def test_the_sparse_reward_is_success_which_ends_the_episode():
    dense, sparse = (
        MetaWorldEnv(MetaWorldOptions(task="drawer-close-v3", reward=kind))
        for kind in ("dense", "sparse")
    )
    act = MetaWorldEnv.expert(dense.options)
    seen, _ = dense.reset(seed=1)
    assert np.array_equal(seen["states"], sparse.reset(seed=1)[0]["states"])
    for _ in range(100):
        action = act(seen)
        seen, shaped, ended, _, info = dense.step(action)
        others = sparse.step(action)
        assert np.array_equal(seen["states"], others[0]["states"])
        assert not ended
        assert others[1:4] == (float(info["success"]), info["success"], False)
        assert others[4] == info
        if info["success"]:
            break
    assert info["success"]
    assert shaped not in (0.0, 1.0)


def test_tasks_are_told_by_name_or_in_the_sentences_of_published_sets():
    names, sentences = (
        MetaWorldEnv(MetaWorldOptions(task="MT50", instructions=kind)).task_descriptions
        for kind in ("name", "sentence")
    )
    told = dict(zip(names, sentences, strict=True))
    assert len(told) == 50
    assert told["pick place"] == "Pick and place a puck to a goal"
    assert told["bin picking"] == "Grasp the puck from one bin and place it into another bin"
    twice = {name for name in names if sentences.count(told[name]) > 1}
    assert twice == {"push", "push back"}


@pytest.mark.parametrize(("option", "known"), [("reward", "sparse"), ("instructions", "sentence")])
def test_an_unknown_reward_or_wording_is_refused(option, known):
    with pytest.raises(ConfigError, match=known) as caught:
        MetaWorldEnv.check(MetaWorldOptions(task="push-v3", **{option: f"{known}s"}), 100)
    assert caught.value.key == f"options.{option}"


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


def test_pictures_with_effects_are_those_of_metaworld(monkeypatch):
    from rlinf.envs.metaworld.task import PHYSICS, physics

    options = MetaWorldOptions(task="push-v3", images=True, image_size=64, effects=True)
    env = MetaWorldEnv(options)
    picture = env.reset(seed=0)[0]["main_images"].astype(np.float64)
    window = type(env._task._shared.painter(effects=True)._window)
    monkeypatch.setenv("MUJOCO_GL", window.__module__.split(".")[1])
    drawn = {"render_mode": "rgb_array", "camera_name": "corner2", "width": 64, "height": 64}
    reference = env_dict.ALL_V3_ENVIRONMENTS["push-v3"](**drawn)
    reference._set_task_called = True
    reference._freeze_rand_vec = False
    reference.reset()
    own = env._task._env
    reference.model.body_pos[:] = own.model.body_pos
    reference.model.site_pos[:] = own.model.site_pos
    mujoco.mj_setState(reference.model, reference.data, physics(own), PHYSICS)
    mujoco.mj_forward(reference.model, reference.data)
    turned = reference.render()[::-1, ::-1]  # its camera stands on its head
    assert np.abs(picture - turned).mean() < 0.1
    reference.close()


def test_a_blind_step_is_the_same_step():
    actions = np.random.default_rng(0).uniform(-1, 1, (10, 4)).astype(np.float32)
    env = MetaWorldEnv(MetaWorldOptions(task="push-v3"))
    env.reset(seed=0)
    seen = [env.step(action) for action in actions]
    env.reset(seed=0)
    rewards = [env.step_blind(action)[0] for action in actions]
    assert rewards == [step[1] for step in seen]
    assert np.array_equal(env.observe()["states"], seen[-1][0]["states"])


def test_a_set_of_tasks_is_that_of_metaworld_and_the_seed_tells_which_is_played():
    assert tuple(env_dict.MT10_V3) == MT10
    assert set(tasks_of("ML45-train")) == set(env_dict.ML45_V3["train"])
    assert set(tasks_of("ML45-test")) == set(env_dict.ML45_V3["test"])
    assert tasks_of("MT50") == task_names()
    many = MetaWorldEnv(MetaWorldOptions(task="MT10"))
    assert many.task_descriptions[1] == "push"
    for seed in (21, 3, 21):
        one = MetaWorldEnv(MetaWorldOptions(task=MT10[seed % 10]))
        expected, _ = one.reset(seed=seed)
        observation, _ = many.reset(seed=seed)
        assert many.task_id == seed % 10
        assert np.array_equal(observation["states"], expected["states"])
        action = np.array([0.3, -0.2, 0.1, 1.0], np.float32)
        assert many.step(action)[1:] == one.step(action)[1:]


def test_the_expert_says_nothing_of_what_it_would_have_done_beyond_the_box():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        act = MetaWorldEnv.expert(MetaWorldOptions(task="drawer-close-v3"))
        action = act({"states": np.full(39, 0.5, np.float32)})
    assert np.abs(action).max() == 1.0


def test_the_expert_of_a_set_of_tasks_acts_for_the_present_one():
    options = MetaWorldOptions(task="MT10")
    act = MetaWorldEnv.expert(options)
    assert act is not None
    seen = {"states": MetaWorldEnv(options).reset(seed=5)[0]["states"]}
    for number, name in ((5, "drawer-close-v3"), (0, "reach-v3")):
        alone = MetaWorldEnv.expert(MetaWorldOptions(task=name))
        assert alone is not None
        told = act({**seen, "task_ids": np.array(number)})
        assert np.array_equal(told, alone(seen))


def test_the_robot_may_be_shown_what_it_knows_of_itself_alone():
    pictures = {"task": "push-v3", "images": True, "image_size": 32}
    whole, own = (
        MetaWorldEnv(MetaWorldOptions(**pictures, robot_states=only)) for only in (False, True)
    )
    assert own.observation_space["states"].shape == (4,)
    seen = [env.reset(seed=3)[0] for env in (whole, own)]
    for _ in range(5):
        assert np.array_equal(seen[0]["states"][:4], seen[1]["states"])
        action = np.array([0.5, -0.2, 0.1, 1.0], np.float32)
        seen = [env.step(action)[0] for env in (whole, own)]
    hand = own._task._env.get_endeff_pos()
    assert np.allclose(seen[1]["states"][:3], hand)
    assert MetaWorldEnv.expert(own.options) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"robot_states": True}, "nothing shows where the objects are"),
        (
            {"robot_states": True, "images": True, "partially_observable": True},
            "has no effect with robot_states",
        ),
    ],
)
def test_states_of_the_robot_go_with_pictures(options, reason):
    with pytest.raises(ConfigError, match=reason):
        MetaWorldEnv.check(MetaWorldOptions(task="push-v3", **options), 100)


WITHOUT_SCIPY = """
import sys
import numpy as np
from rlinf.envs.metaworld.adapter import MetaWorldEnv, MetaWorldOptions
env = MetaWorldEnv(MetaWorldOptions(task="coffee-push-v3"))
env.reset(seed=0)
env.step(np.zeros(4, np.float32))
assert not [name for name in sys.modules if name.startswith("scipy")]
from metaworld.envs import sawyer_coffee_push_v3
from scipy.spatial.transform import Rotation
turned = Rotation.from_euler("z", 90, degrees=True).as_matrix()
theirs = sawyer_coffee_push_v3.Rotation.from_matrix(turned)
assert type(theirs) is Rotation
"""


def test_an_env_process_starts_without_scipy_and_metaworld_has_it_when_it_asks():
    subprocess.run([sys.executable, "-c", WITHOUT_SCIPY], check=True)


def test_after_a_fault_another_painter_draws() -> None:
    """The envs of a process share one, which a lost graphics card leaves useless."""
    options = MetaWorldOptions(task="reach-v3")
    env, beside = MetaWorldEnv(options), MetaWorldEnv(options)
    env.reset(seed=0)
    painter = env._task._shared.painter(effects=False)
    beside.reset(seed=0)
    beside.close()
    assert env._task._shared.painter(effects=False) is painter
    env.discard()
    again = MetaWorldEnv(options)
    again.reset(seed=0)
    assert again._task._shared.painter(effects=False) is not painter
