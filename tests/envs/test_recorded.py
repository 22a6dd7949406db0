"""Adapters that were written against a recorded interface, with stand-ins of their packages."""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf.cli.main import main
from rlinf.envs import installation
from rlinf.envs.base import REGISTRY, instruction_text
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.household.behavior import PROPRIOCEPTION, controlled
from rlinf.envs.installation import State
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError

STAND_INS = Path(__file__).with_name("recorded")
PACKAGES = ("robotwin", "robocasa", "omnigibson")
OPTIONS: dict[str, dict[str, Any]] = {
    "robotwin": {"task": "lift_pot"},
    "robocasa": {"task": "CloseDrawer", "image_size": 32},
    "behavior": {"task": "turning_on_radio", "scene": "house_double_floor_lower"},
}
STATES = {"robotwin": 14, "robocasa": 16, "behavior": 256}
ACTIONS = {"robotwin": 14, "robocasa": 12, "behavior": 23}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The stand-ins in a folder of their own, with the assets that their real ones look for."""
    folder = tmp_path / "packages"
    shutil.copytree(STAND_INS, folder)
    for assets in (
        "robocasa/models/assets/textures",
        "robocasa/models/assets/objects",
        "data/assets/background_texture",
        "data/assets/embodiments/aloha-agilex",
        "data/assets/objects",
    ):
        (folder / assets).mkdir(parents=True)
    return folder


@pytest.fixture
def config(packages: Path) -> Callable[..., EnvConfig]:
    """Make the section of a recipe whose processes find the stand-ins."""

    def make(name: str, options: dict[str, Any] | None = None, **settings: Any) -> EnvConfig:
        given = {**OPTIONS[name], **(options or {})}
        if name == "robotwin":
            given.setdefault("assets", str(packages / "data"))
        plain = {"max_episode_steps": 20, "processes": 1}
        return EnvConfig(
            type=name, options=given, python=sys.executable,
            variables={"PYTHONPATH": str(packages)}, **{**plain, **settings},
        )  # fmt: skip

    return make


@pytest.fixture
def here(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Build an adapter in this process, on the stand-ins."""
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("ROBOTWIN_ASSETS_ROOT", str(packages / "data"))
    importlib.invalidate_caches()

    def build(name: str, *arguments: Any, **options: Any) -> Any:
        adapter = REGISTRY.load(name)
        chosen = adapter.Options(**{**OPTIONS[name], **options})
        adapter.check(chosen, 20)
        return adapter(chosen, *arguments)

    yield build
    gc.enable()
    for name in [each for each in gymnasium.registry if each.startswith("robocasa/")]:
        del gymnasium.registry[name]
    for name in [each for each in sys.modules if each.split(".")[0] in PACKAGES]:
        del sys.modules[name]


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    "name",
    # Each env process of this one imports torch.
    [pytest.param(n, marks=pytest.mark.slow if n == "behavior" else ()) for n in OPTIONS],
)
def test_it_keeps_the_protocol(config: Callable[..., EnvConfig], name: str) -> None:
    # Small pictures, and none of three cameras that see a megapixel at every step.
    small = {"robotwin": {"crop": 32}, "behavior": {"images": False}}
    results = check_env(config(name, small.get(name)))
    assert [result for result in results if not result.passed] == []
    assert len(results) == 13


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "behavior" else pytest.mark.slow) for n in OPTIONS],
)
def test_two_steps_of_training(
    packages: Path, config: Callable[..., EnvConfig], tmp_path: Path, name: str
) -> None:
    made = config(name, {"images": False})
    recipe = {
        "task": "embodied",
        "seed": 1,
        "runner": {"total_env_steps": 2 * 4 * 8},
        "env": {
            "num_envs": 4,
            "train": {
                "type": name,
                "options": made.options,
                "max_episode_steps": 8,
                "processes": 1,
                "python": sys.executable,
                "variables": {"PYTHONPATH": str(packages)},
            },
        },
        "rollout": {"steps": 8},
        "model": {"type": "mlp", "hidden_sizes": [8], "num_action_chunks": 4},
        "algorithm": {"type": "ppo"},
        "actor": {"global_batch_size": 8, "update_epoch": 1},
        "evaluation": {"interval": 0, "episodes": 2, "num_envs": 2, "video_episodes": 0},
        "logger": {"backends": []},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    run = tmp_path / "run"
    assert main(["train", str(path), f"runner.output_dir={run}"]) == 0
    lines = [json.loads(line) for line in next(run.rglob("metrics.jsonl")).read_text().splitlines()]
    steps = [line for line in lines if "env/return" in line or "env/episodes" in line]
    assert len(steps) >= 2


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_seen_has_the_shapes_that_policies_were_trained_on(
    config: Callable[..., EnvConfig], name: str
) -> None:
    with SupervisedVectorEnv(config(name), num_envs=2, seed=3) as env:
        shapes = env.env_spec.observation_shapes
        assert shapes["states"] == (STATES[name],)
        assert env.env_spec.action_dim == ACTIONS[name]
        assert env.env_spec.task_descriptions[0].islower()
        pictures = {key: shape for key, shape in shapes.items() if "images" in key}
    assert (
        pictures
        == {
            "robotwin": {"main_images": (224, 224, 3), "wrist_images": (2, 224, 224, 3)},
            "robocasa": {
                "main_images": (32, 32, 3),
                "extra_view_images": (1, 32, 32, 3),
                "wrist_images": (32, 32, 3),
            },
            "behavior": {"main_images": (720, 720, 3), "wrist_images": (2, 480, 480, 3)},
        }[name]
    )


def test_of_behaviors_robot_what_actions_move_can_be_seen_alone(
    config: Callable[..., EnvConfig],
) -> None:
    whole = np.arange(2 * 256, dtype=np.float32).reshape(2, 256)
    found = controlled(whole)
    begins = dict(zip(PROPRIOCEPTION, np.cumsum([0, *PROPRIOCEPTION.values()]), strict=False))
    base, left = begins["base_qvel"], begins["gripper_left_qpos"]
    assert found.shape == (2, 23)
    assert found[1, :3].tolist() == [256 + base, 257 + base, 258 + base]
    assert found[0, 21] == 2 * left + 1
    with SupervisedVectorEnv(
        config("behavior", {"images": False, "states": "controlled"}), num_envs=1, seed=3
    ) as env:
        assert env.env_spec.observation_shapes["states"] == (23,)
        assert env.reset()["states"].shape == (1, 23)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_task_is_told_the_nearest(config: Callable[..., EnvConfig], name: str) -> None:
    near = OPTIONS[name]["task"][:-1]
    with pytest.raises(ConfigError, match=f"did you mean `{OPTIONS[name]['task']}`"):
        config(name, {"task": near}).check()


@pytest.mark.parametrize("name", ["robotwin", "behavior"])
def test_without_a_gpu_it_cannot_run_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "GPUS", str(tmp_path / "none"))
    found = installation.status(name)
    assert found.state is State.UNFIT
    assert "it needs an NVIDIA GPU" in found.detail
    (tmp_path / "some" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(installation, "GPUS", str(tmp_path / "some"))
    assert installation.status(name).state is State.MISSING


def test_what_must_be_fetched_besides_is_said() -> None:
    assert "download_kitchen_assets` of its environment (10 GB)" in (
        installation.status("robocasa").detail
    )


# -- RoboTwin -------------------------------------------------------------------------------------


def test_robotwin_missing_assets_are_named_with_their_command(
    config: Callable[..., EnvConfig], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="background_texture; `robotwin-download-assets"):
        config("robotwin", {"assets": str(tmp_path)}).check()


def test_robotwin_is_given_whole_chunks_and_as_many_actions_as_an_episode_has(
    here: Callable[..., Any],
) -> None:
    env = here("robotwin", 2)
    env.reset(rows(0, 1), rows(1, 2))
    actions = np.full((2, 5, 14), 0.25, np.float32)
    actions[:, 3:] = 0.5
    step = env.chunk_step(actions, rows(5, 3))
    assert np.allclose(step.observations["states"][0], 0.5)
    assert np.allclose(step.observations["states"][1], 0.25)
    assert [each.task.take_action_cnt for each in env._env.envs] == [5, 3]


def test_robotwin_a_row_at_rest_stays_where_it_is(here: Callable[..., Any]) -> None:
    env = here("robotwin", 2)
    before = env.reset(rows(0, 1), rows(1, 2))["states"]
    step = env.chunk_step(np.zeros((2, 5, 14), np.float32), rows(0, 5))
    assert np.array_equal(step.observations["states"][0], before[0])
    assert not step.success[0]


def test_robotwin_success_is_paid_once_in_the_last_column(here: Callable[..., Any]) -> None:
    env = here("robotwin", 2)
    env.reset(rows(0, 1), rows(1, 2))
    actions = np.full((2, 4, 14), 0.5, np.float32)
    actions[0, 1, 6] = 0.0  # closes the left gripper in the second action
    step = env.chunk_step(actions, rows(3, 4))
    assert step.success.tolist() == [True, False]
    assert step.terminated.tolist() == [True, False]
    assert step.rewards.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    again = env.chunk_step(actions[:, :, :], rows(4, 4))  # where terminations are ignored
    assert again.success.tolist() == [True, False]
    assert not again.rewards.any()
    env.reset(rows(0), rows(5))
    assert env.chunk_step(actions, rows(4, 4)).rewards[0].tolist() == [0, 0, 0, 1]


def test_robotwin_a_seed_that_was_moved_on_from_is_in_the_record(
    config: Callable[..., EnvConfig],
) -> None:
    """Seeds that seven divides do not come to rest in the stand-in."""
    episodes = [(0, 13), (1, 14), (2, 21), (3, 22)]
    made = config("robotwin", max_episode_steps=5)
    with SupervisedVectorEnv(made, num_envs=2, seed=3, episode_seeds=episodes) as env:
        env.reset()
        played, acted = [], []
        while not env.exhausted():
            step = env.chunk_step(np.full((2, 5, 14), 0.5, np.float32))
            played += step.episodes
            acted += step.reset_seeds[step.active].tolist()
    known = sorted((each.episode_id, each.seed, each.seed_shift) for each in played)
    assert known == [(0, 13, 0), (1, 14, 1), (2, 21, 1), (3, 22, 0)]
    assert sorted(acted) == [13, 15, 22, 22]


def test_robotwin_words_are_those_of_the_reset(here: Callable[..., Any]) -> None:
    env = here("robotwin", 6)
    seen = env.reset(np.arange(6), np.arange(1, 7))["instruction"]
    texts = {instruction_text(each) for each in seen}
    assert texts == {"Lift the pot.", "Raise the pot!"}
    other = here("robotwin", 1, instructions="unseen").reset(rows(0), rows(1))
    assert instruction_text(other["instruction"][0]) == "Get that pot up."


@pytest.mark.parametrize(
    ("name", "shades"),
    [
        ("robotwin", {"main_images": 40, "wrist_images": (50, 60)}),
        ("behavior", {"main_images": 90, "wrist_images": (100, 110)}),
        # The cameras of its stand-in: left and right of the robot, and the hand's.
        ("robocasa", {"main_images": 50, "extra_view_images": (100,), "wrist_images": 150}),
    ],
)
def test_each_picture_is_of_its_own_camera(
    here: Callable[..., Any], name: str, shades: dict[str, Any]
) -> None:
    env = here(name, 1) if name != "robocasa" else here(name)
    seen = env.reset(rows(0), rows(1)) if name != "robocasa" else env.reset(seed=1)[0]
    for key, shade in shades.items():
        pictures = seen[key] if name == "robocasa" else seen[key][0]
        found = pictures[..., 1, 1, 0]
        assert found.tolist() == (list(shade) if isinstance(shade, tuple) else shade), key


def test_robotwin_pictures_are_cropped_about_the_centre(here: Callable[..., Any]) -> None:
    seen = here("robotwin", 1).reset(rows(0), rows(1))["main_images"][0]
    assert seen.shape == (224, 224, 3)
    assert (seen[112, 112] == 250).all()
    whole = here("robotwin", 1, crop=0)
    assert whole.reset(rows(0), rows(1))["main_images"].shape == (1, 240, 320, 3)
    blind = here("robotwin", 1, images=False).reset(rows(0), rows(1))
    assert blind.keys() == {"states", "instruction"}


def test_robotwin_can_be_built_twice_in_a_process(here: Callable[..., Any]) -> None:
    """Its constructor writes into the configuration that it is given."""
    first, second = here("robotwin", 1), here("robotwin", 1)
    assert first._env.args["save_path"] == second._env.args["save_path"] == "./data/lift_pot_reward"


# -- RoboCasa -------------------------------------------------------------------------------------


def test_robocasa_actions_are_named_and_two_of_them_binary(here: Callable[..., Any]) -> None:
    env = here("robocasa")
    env.reset(seed=1)
    kitchen = env._env.unwrapped.env
    for value, gripper in ((0.4, -1.0), (0.6, 1.0)):
        action = np.full(12, value, np.float32)
        env.step(action)
        assert (kitchen.gripper, kitchen.mode) == (gripper, gripper)
        assert np.allclose(action, value)  # the caller's array is left alone
    signs = here("robocasa", binary_threshold=0.0)
    signs.reset(seed=1)
    signs.step(np.full(12, 0.1, np.float32))
    assert signs._env.unwrapped.env.gripper == 1.0


def test_robocasa_ends_at_success_which_the_simulator_does_not(here: Callable[..., Any]) -> None:
    env = here("robocasa")
    env.reset(seed=1)
    action = np.zeros(12, np.float32)
    action[0] = 1.0
    steps = [env.step(action) for _ in range(6)]
    ended = [(reward, terminated, info["success"]) for _, reward, terminated, _, info in steps]
    assert ended[0] == (0.0, False, False)
    assert ended[-1] == (1.0, True, True)


def test_robocasa_words_are_those_of_the_episode(here: Callable[..., Any]) -> None:
    env = here("robocasa")
    texts = {instruction_text(env.reset(seed=seed)[0]["instruction"]) for seed in range(8)}
    assert texts == {"close the left drawer", "close the right drawer"}
    one, again = (env.reset(seed=5)[0]["states"] for _ in range(2))
    assert np.array_equal(one, again)


def test_robocasa_has_the_states_of_both_interfaces(here: Callable[..., Any]) -> None:
    new, old = here("robocasa"), here("robocasa", states="robosuite")
    first, second = new.reset(seed=3)[0]["states"], old.reset(seed=3)[0]["states"]
    assert (len(first), len(second)) == (16, 25)
    assert np.allclose(first[2:5], second[18:21])  # where the base is
    assert np.allclose(first[:2], second[7:9])  # the gripper
    assert first.dtype == second.dtype == np.float32


def test_robocasa_prints_nothing(
    here: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    here("robocasa").reset(seed=0)
    assert capsys.readouterr().out == ""


def test_robocasa_missing_assets_are_named_with_their_command(
    config: Callable[..., EnvConfig], packages: Path
) -> None:
    (packages / "robocasa/models/assets/objects").rmdir()
    with pytest.raises(ConfigError, match=r"assets/objects; `python -m robocasa\.scripts"):
        config("robocasa").check()


# -- BEHAVIOR -------------------------------------------------------------------------------------


def test_behavior_turns_the_garbage_collector_on_again(here: Callable[..., Any]) -> None:
    importlib.import_module("omnigibson")
    assert not gc.isenabled()
    here("behavior", 1, images=False)
    assert gc.isenabled()


def test_behavior_success_stands_deep_in_its_lists(here: Callable[..., Any]) -> None:
    env = here("behavior", 2, images=False)
    env.reset(rows(0, 1), rows(1, 2))
    actions = np.full((2, 23), 0.1, np.float32)
    actions[1, 14] = 1.0
    steps = [env.step(actions) for _ in range(5)]
    assert [step.success.tolist() for step in steps[3:]] == [[False, False], [False, True]]
    assert steps[4].terminated.tolist() == [False, True]
    assert not any(step.truncated.any() for step in steps)  # time limits belong to the host
    assert np.allclose(sum(step.rewards for step in steps), [0.0, 1.0])


def test_behavior_a_row_at_rest_stays_where_it_was_told(here: Callable[..., Any]) -> None:
    env = here("behavior", 2, images=False)
    env.reset(rows(0, 1), rows(1, 2))
    actions = np.full((2, 23), 0.25, np.float32)
    env.step(actions)
    actions[0] = 0.0
    states = env.step(actions).observations["states"]
    assert not states[0, :3].any()  # the base, whose velocity it is
    assert np.allclose(states[0, 3:23], 0.25)
    assert np.allclose(states[1, :23], 0.25)


def test_behavior_rows_are_reset_one_by_one(here: Callable[..., Any]) -> None:
    env = here("behavior", 3, images=False)
    env.reset(rows(0, 1, 2), rows(1, 2, 3))
    env.step(np.full((3, 23), 0.25, np.float32))
    before = [each.physics_steps for each in env._env.envs]
    states = env.reset(rows(1), rows(9))["states"]
    assert [bool(row[:23].any()) for row in states] == [True, False, True]
    # What the docs say of it: the physics of the others went on by a step.
    assert [each.physics_steps for each in env._env.envs] == [each + 1 for each in before]


def test_behavior_pictures_lose_their_fourth_channel_and_views_may_be_joined_names(
    here: Callable[..., Any],
) -> None:
    env = here("behavior", 1)
    nested = env.reset(rows(0), rows(1))["main_images"]
    assert nested.shape == (1, 720, 720, 3)
    assert (nested == 90).all()
    (raw,) = env._raw
    (parts,) = raw.values()
    env._raw = [
        {
            f"robot_r1::{name}" if name == "proprio" else f"robot_r1::{name}::rgb": value
            if name == "proprio"
            else value["rgb"]
            for name, value in parts.items()
        }
    ]
    flat = env._observations()
    assert np.array_equal(flat["main_images"], nested)
    assert flat["wrist_images"].shape == (1, 2, 480, 480, 3)


def test_behavior_configuration_is_merged_with_a_file(here: Callable[..., Any], tmp_path: Path):
    from rlinf.envs.household.behavior import JOINTS, PROPRIOCEPTION, configuration

    adapter = REGISTRY.load("behavior")
    assert sum(PROPRIOCEPTION.values()) == 256
    assert [len(part) for part in JOINTS.values()] == [3, 4, 7, 1, 7, 1]
    file = tmp_path / "more.json"
    file.write_text(json.dumps({"scene": {"load_room_types": ["kitchen"]}, "render": {"a": 1}}))
    found = configuration(adapter.Options(**OPTIONS["behavior"], config=str(file)))
    assert found["scene"]["load_room_types"] == ["kitchen"]
    assert found["scene"]["scene_model"] == "house_double_floor_lower"
    assert found["render"] == {"a": 1}
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no mapping"):
        here("behavior", 1, config=str(file))
