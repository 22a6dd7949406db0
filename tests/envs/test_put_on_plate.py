"""Objects put on plates, against a stand-in of the source that has these tasks.

Its files, as the real ones, import each other as modules of a package called as this one is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlinf.envs.maniskill
from rlinf.envs.base import REGISTRY
from rlinf.envs.batches.put_on_plate import ASSETS_VARIABLE, MAIN, TASKS
from rlinf.envs.config import EnvConfig
from rlinf.envs.requirements import SOURCE_VARIABLE
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError

from .test_recorded_batches import (  # noqa: F401 - fixtures
    RECORDED,
    batch,
    make,
    require_protocol,
    require_training,
    stand_ins,
)

NAME = "put_on_plate"
TEXTURE = "PutOnPlateInScene25VisionTexture03-v1"
INSTRUCT = "PutOnPlateInScene25Instruct-v1"


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, str(RECORDED / NAME))
    monkeypatch.delenv(ASSETS_VARIABLE, raising=False)


@pytest.mark.slow
def test_the_adapter_keeps_the_protocol() -> None:
    require_protocol(NAME)


def test_a_policy_is_trained_on_it(tmp_path: Path) -> None:
    require_training(NAME, tmp_path)


def begun(plate: Any, *seeds: int) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = plate.reset(np.arange(len(seeds)), np.array(seeds))
    return found


def test_files_of_the_source_and_this_package_do_not_hide_each_other(batch: Any) -> None:  # noqa: F811
    here = rlinf.envs.maniskill
    batch(NAME, 1, task=TEXTURE)
    assert sys.modules["rlinf.envs.maniskill"] is here
    assert "mani_skill.envs.sapien_env" in sys.modules
    loaded = sys.modules["rlinf.envs.maniskill.tasks.variants.utils"]
    assert Path(str(loaded.__file__)).is_relative_to(RECORDED / NAME)
    assert str(RECORDED / NAME) not in sys.path


def test_rows_of_a_seed_begin_alike_and_others_go_on(batch: Any) -> None:  # noqa: F811
    plate = batch(NAME, 4)
    begun(plate, 5, 5, 21, 6)
    scene = plate._scene
    first = scene.carrot.clone(), plate._ids.copy()
    assert first[1][0] == first[1][1]
    assert plate.task_ids().tolist() == [5, 5, 5, 6]  # of 16 objects
    assert scene.select_carrot_ids.tolist() == [5, 5, 5, 6]
    plate.step(np.full((4, 7), 0.01, np.float32))
    moved = scene.gripper.clone()
    plate.reset(np.array([3, 1]), np.array([6, 5]))
    assert np.array_equal(scene.carrot, first[0])
    assert np.array_equal(plate._ids, first[1])
    assert np.array_equal(scene.gripper[[0, 2]], moved[[0, 2]])
    assert not np.array_equal(scene.gripper[[1, 3]], moved[[1, 3]])


def test_starts_are_drawn_from_all_of_an_object(batch: Any) -> None:  # noqa: F811
    plate = batch(NAME, 4)
    drawn = []
    for seed in range(0, 16 * 48, 64):
        begun(plate, *range(seed, seed + 64, 16))
        drawn += plate._ids.tolist()
    assert {each // plate._starts for each in drawn} == {0}
    backgrounds = {each // 24 for each in drawn}
    assert len(backgrounds) >= 12


@pytest.mark.parametrize(
    ("options", "count", "first", "last"),
    [
        ({}, 16, "put object 0 on plate 0", "put object 15 on plate 0"),
        ({"objects": "test"}, 9, "put object 16 on plate 0", "put object 24 on plate 0"),
        ({"plates": "all"}, 272, "put object 0 on plate 0", "put object 15 on plate 16"),
        ({"task": TEXTURE, "objects": "test"}, 16, "put object 0 on plate 0", None),
        (
            {"task": INSTRUCT, "objects": "test"}, 256, "put the 0 on the plate, phrase 1",
            "put the 15 on the plate, phrase 16",
        ),
    ],
)  # fmt: skip
def test_rows_are_told_what_their_scenes_hold(
    batch: Any,  # noqa: F811
    options: dict[str, Any],
    count: int,
    first: str,
    last: str | None,
) -> None:
    plate = batch(NAME, 3, **options)
    words = plate.task_descriptions
    assert (len(words), words[0]) == (count, first)
    assert last is None or words[-1] == last
    begun(plate, 7, count - 1, 3 * count + 1)
    assert plate._scene.get_language_instruction() == [words[task] for task in plate.task_ids()]
    assert plate.task_ids().tolist() == [7, count - 1, 1]


def test_a_source_that_numbers_starts_in_another_way_is_noticed(
    batch: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plate = batch(NAME, 2)
    other = ["put a fork on a spoon"] * 2
    monkeypatch.setattr(plate._scene, "get_language_instruction", lambda: other)
    with pytest.raises(RuntimeError, match="numbers starts in another way"):
        begun(plate, 1, 2)


@pytest.mark.parametrize("reward", ["shaped", "sparse"])
def test_rewards_are_what_is_gained(batch: Any, reward: str) -> None:  # noqa: F811
    """Grasped 0.1, held for five steps 0.1, on the plate 1; a row that rests gains nothing."""
    plate = batch(NAME, 2, reward=reward)
    begun(plate, 3, 4)
    scene, gains = plate._scene, []

    def go(goal: Any, gripper: float) -> Any:
        way = (goal - scene.target)[0].numpy()
        actions = np.zeros((2, 7), np.float32)
        actions[0] = [*way, 0, 0, 0, gripper]
        step = plate.step(actions)
        gains.append(round(float(step.rewards[0]), 5))
        assert step.rewards[1] == 0
        return step

    go(scene.carrot.clone(), 1.0)
    held = [go(scene.carrot.clone(), -1.0) for _ in range(5)]
    step = go(scene.plate.clone(), -1.0)
    assert not any(each.success.any() for each in held)
    assert step.success.tolist() == step.terminated.tolist() == [True, False]
    assert not step.truncated.any()
    assert gains == ([0, 0.1, 0, 0, 0, 0.1, 1.0] if reward == "shaped" else [0] * 6 + [1.0])
    begun(plate, 3, 4)
    assert plate.step(np.zeros((2, 7), np.float32)).rewards.tolist() == [0, 0]


def test_pictures_are_squeezed_and_states_are_joints(batch: Any) -> None:  # noqa: F811
    plate = batch(NAME, 2, image_size=224)
    seen = begun(plate, 0, 1)
    assert {key: value.shape for key, value in seen.items()} == {
        "main_images": (2, 224, 224, 3),
        "states": (2, 8),
    }
    whole = begun(batch(NAME, 2, image_size=0), 0, 1)["main_images"]
    assert whole.shape == (2, 480, 640, 3)
    assert np.array_equal(whole[:, 0, 0], seen["main_images"][:, 0, 0])  # of one shade
    assert np.array_equal(plate.render(1), seen["main_images"][1])
    assert not np.array_equal(plate.render(0), plate.render(1))
    assert np.allclose(plate.action_space.high, [1] * 3 + [np.pi / 2] * 3 + [1])
    assert plate._scene.sensor_configs == {"shader_pack": "default"}


def test_a_scene_that_begins_all_rows_together_is_given_all(batch: Any) -> None:  # noqa: F811
    plate = batch(NAME, 3, task=TEXTURE)
    begun(plate, 1, 2, 3)
    plate.step(np.full((3, 7), 0.01, np.float32))
    plate.reset(np.array([0, 1]), np.array([4, 5]))
    assert plate._scene.select_carrot_ids.tolist() == [4, 5, 3]


def test_terminations_must_be_ignored_there() -> None:
    with pytest.raises(ValueError, match=r"together, so none may end early; write true"):
        EnvConfig(type=NAME, options={"task": TEXTURE}, max_episode_steps=4)


@pytest.mark.slow
def test_a_list_is_played_there_though_rows_rest_at_its_end() -> None:
    options = {"task": TEXTURE, "image_size": 32}
    config = EnvConfig(
        type=NAME, options=options, max_episode_steps=4, processes=1, ignore_terminations=True
    )
    with SupervisedVectorEnv(config, num_envs=3, seed=1) as env:
        env.assign_episodes([(number, number) for number in range(4)])  # two rows rest at the end
        env.reset()
        ended = []
        while not env.exhausted():
            step = env.chunk_step(np.full((3, 2, 7), 0.01, np.float32))
            assert not step.faults
            ended += step.episodes
    assert sorted(episode.seed for episode in ended) == [0, 1, 2, 3]
    assert {episode.episode_len for episode in ended} == {4}


def test_a_source_without_files_or_assets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = REGISTRY.load(NAME)
    for options in ({"plates": "all", "task": TEXTURE}, {"reward": "dense"}):
        with pytest.raises(ConfigError):
            adapter.check(adapter.Options(**options), 80)
    with pytest.raises(ConfigError, match=r"carrot/more_carrot/model_db\.json.*maniskill_assets"):
        make(NAME, 1, assets=str(tmp_path))
    monkeypatch.setenv(SOURCE_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=r"put_on_in_scene_multi\.py.*--source"):
        make(NAME, 1)


def test_the_published_evaluation_out_of_distribution_is_there() -> None:
    assert next(iter(TASKS)) == MAIN
    kinds = [name.removeprefix("PutOnPlateInScene25") for name in TASKS][1:]
    assert sum(kind.startswith("Vision") for kind in kinds) == 5
    assert len(kinds) == 13
