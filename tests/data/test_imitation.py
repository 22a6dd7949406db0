"""What imitation learns from: sets seen as an environment shows things, mixtures, augmentation."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.config.validate import validate
from rlinf.data.augmentation import AugmentationConfig
from rlinf.data.demonstrations import Demonstrations
from rlinf.data.imitation import DemonstrationsConfig, Recorded, WeightedDraws
from rlinf.data.lerobot.writer import write_lerobot
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.config import CNNConfig, MLPConfig, SquashedMLPConfig
from rlinf.workers.source import Chunks, read_by

from .lerobot.sets import SPEC, recorded

pytest.importorskip("pyarrow")
ENV = EnvSpec.from_json(SPEC)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both formats, and others."""
    root = tmp_path_factory.mktemp("sets")
    recorded().save(root / "ours")
    write_lerobot(recorded(), root / "lerobot", fps=20, pictures="image")
    write_lerobot(recorded((5, 6), seed=1), root / "other", fps=20, pictures="image")
    return root


def build(spec: EnvSpec = ENV, **section: Any) -> tuple[list[Recorded], list[Recorded]]:
    """Of a section ``data``, as a run does."""
    config = validate(DemonstrationsConfig, section, "test")
    config.check()
    return config.build(spec)


def test_both_formats_give_the_same_rows(sets: Path) -> None:
    ours, theirs = (
        Chunks(build(path=str(sets / name), only_successful=False)[0], 3)
        for name in ("ours", "lerobot")
    )
    rows = np.random.default_rng(0).permutation(20)
    left, right = ours.batch(rows), theirs.batch(rows)
    assert left.inputs.keys() == right.inputs.keys()
    assert {"main_images", "wrist_images", "states", "task_ids"} < left.inputs.keys()
    torch.testing.assert_close(left.mask, right.mask)
    for name, value in left.inputs.items():
        torch.testing.assert_close(value, right.inputs[name], atol=0, rtol=0)
    # 3 steps of the two dimensions; the last row of an episode has one.
    assert left.mask[np.flatnonzero(rows == 8)[0]].tolist() == [1, 1, 0, 0, 0, 0]


def test_features_of_other_names_and_tasks_in_other_words(sets: Path) -> None:
    shapes = {"states": (5,), "main_images": (16, 16, 3), "task_ids": ()}
    texts = ("Push it.", "close_the window", "Open the window .")
    spec = replace(ENV, observation_shapes=shapes, task_descriptions=texts)
    names = {"main_images": "observation.images.wrist_0", "states": ["observation.state", "action"]}
    (found,), (others,) = build(spec, path=str(sets / "lerobot"), observations=names, held_out=1)
    assert (found.episodes, others.episodes) == (((0, 9),), ((9, 4),))
    whole, rows = recorded(), np.array([3, 10])
    assert found.columns["task_ids"][rows].tolist() == [2, 1]  # whatever the case and the dot
    np.testing.assert_array_equal(
        found.columns["main_images"][rows], whole.observations["wrist_images"][rows, 0]
    )
    wanted = np.concatenate([whole.observations["states"], whole.actions], axis=1)[rows]
    np.testing.assert_array_equal(found.columns["states"][rows], wanted)
    renamed = replace(ENV, task_descriptions=("shut", "lift", "open the window"))
    said = {"close the window": "shut"}
    for name in ("ours", "lerobot"):
        ((found, *_), _) = build(renamed, path=str(sets / name), tasks=said)
        assert found.columns["task_ids"][rows].tolist() == [2, 0]


def test_actions_of_lerobot_sets_are_in_the_units_of_the_environment(tmp_path: Path) -> None:
    from rlinf.data.lerobot.reader import LeRobotSet

    limits: dict[str, Any] = {"action_low": [0.0] * 2, "action_high": [4.0, 2.0]}
    told = {**SPEC, **limits, "action_kind": "discrete", "action_start": [5.0, -1.0]}
    before = {key: value for key, value in told.items() if key != "action_start"}
    whole, draw = recorded(), np.random.default_rng(0)
    indices = draw.integers(0, [5, 3], whole.actions.shape).astype(np.float32)
    for name, own in (("new", told), ("old", before)):
        found = replace(whole, actions=indices, source={**whole.source, "spec": own})
        write_lerobot(found, tmp_path / name, fps=20, pictures="image")
    found.save(tmp_path / "ours")
    for name in ("new", "old"):
        shutil.copytree(tmp_path / name, tmp_path / f"foreign_{name}")
        (tmp_path / f"foreign_{name}/meta/rlinf.json").unlink()
    written = LeRobotSet(tmp_path / "new").vectors("action")
    np.testing.assert_array_equal(written, indices + np.array([5, -1]))

    spec = EnvSpec.from_json(told)
    for name in ("new", "old", "ours", "foreign_new"):
        ((found_again,), _) = build(spec, path=str(tmp_path / name))
        np.testing.assert_array_equal(found_again.actions, indices)
    with pytest.raises(
        ConfigError, match="dimension 0 goes from 0 to 4, in the environment from 5"
    ):
        build(spec, path=str(tmp_path / "foreign_old"))


def test_pictures_that_the_policy_does_not_read_are_not_decoded(sets: Path) -> None:
    (whole,), _ = build(path=str(sets / "lerobot"))
    pictures = {"main_images", "wrist_images"}
    models = (
        MLPConfig(),
        CNNConfig(),
        CNNConfig(image_keys=("wrist_images",)),
        SquashedMLPConfig(),
    )
    left = [pictures & read_by(each, ENV, [whole])[0].columns.keys() for each in models]
    assert left == [set(), {"main_images"}, {"wrist_images"}, set()]


@pytest.mark.parametrize(
    ("spec", "section", "told"),
    [
        ({"control_rate": 10.0}, {}, "has 20 frames a second, the environment acts 10 times"),
        ({"action_dim": 3}, {}, "action_dim 2"),
        ({"action_low": (0.0, -1.0)}, {}, "action dimension 0 goes from"),
        (
            {"observation_shapes": {"images.front": (8, 8, 3)}}, {},
            r"no `observation.images.front` for the observation `images.front`; .*known: "
            r"observation.images.main, observation.images.wrist_0",
        ),
        (
            {"observation_shapes": {"main_images": (32, 32, 3)}}, {},
            r"`main_images` is \[32, 48, 3\] in .*, in the environment \[32, 32, 3\]",
        ),
        ({"observation_shapes": {"states": (4,)}}, {}, r"`states` is \[3\]"),
        ({"observation_shapes": {"depth.front": (4, 4)}}, {}, "has no place for `depth.front`"),
        (
            {"task_descriptions": ("open the windows", "sit")}, {},
            "no task `open the window`; did you mean `open the windows`",
        ),
        ({}, {"observations": {"main_image": "action"}}, "did you mean `main_images`"),
        ({}, {"held_out": 2}, "2 of 2 episodes cannot be held out"),
        (
            {}, {"tasks": {"open the windows": "sit"}},
            "no episode of .* is of `open the windows`; did you mean `open the window`",
        ),
        (
            {"observation_shapes": {**ENV.observation_shapes, "depth.main": (32, 48)}},
            {"augmentation": {"crop": [0.5, 1.0]}}, "a crop would move pictures against",
        ),
        (
            {"observation_dtypes": {}}, {"augmentation": {"crop": [0.5, 1.0]}},
            "augmentation: the environment shows no pictures",
        ),
    ],
)  # fmt: skip
def test_a_set_of_something_else_is_refused(
    spec: dict[str, Any], section: dict[str, Any], told: str, sets: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        build(replace(ENV, **spec), path=str(sets / "lerobot"), **section)


def test_an_episode_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names episode 3 2 times.*nearest: \[3, 0\]"):
        DemonstrationsConfig(path=Path("set"), episodes=(3, 0, 3))


def test_tasks_of_a_set_that_words_none_are_refused(tmp_path: Path) -> None:
    found = recorded()
    shown = {key: rows for key, rows in found.observations.items() if key != "task_ids"}
    shapes = {key: part for key, part in ENV.observation_shapes.items() if key != "task_ids"}
    spec = {**SPEC, "task_descriptions": [], "observation_shapes": shapes}
    source = {**found.source, "spec": spec}
    replace(found, observations=shown, source=source).save(tmp_path / "set")
    with pytest.raises(ConfigError, match=r"is of `sit`; none has a task in words$"):
        build(EnvSpec.from_json(spec), path=str(tmp_path / "set"), tasks={"sit": "sit down"})


@pytest.mark.parametrize("name", ["ours", "lerobot"])
def test_what_the_environment_does_not_show_is_not_learnt_from(
    name: str, sets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = {key: ENV.observation_shapes[key] for key in ("states", "task_ids")}
    spec = replace(ENV, observation_shapes=shapes)
    ((found,), _) = build(spec, path=str(sets / name))
    assert found.columns.keys() == {"states", "task_ids"}
    assert [record.message for record in caplog.records] == [
        f"{sets / name}: not learnt from main_images, wrist_images, which the environment "
        "does not show"
    ]


def test_rows_of_several_tasks_are_not_taken_for_one(sets: Path) -> None:
    shapes = {"states": ENV.observation_shapes["states"]}
    with pytest.raises(ConfigError, match=r"observation_shapes .*'task_ids': \(\)"):
        build(replace(ENV, observation_shapes=shapes), path=str(sets / "ours"))


def test_what_is_read_under_another_name_is_learnt_from(
    sets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = {key: ENV.observation_shapes[key] for key in ("states", "task_ids")}
    spec = replace(ENV, observation_shapes={**shapes, "images.front": (32, 48, 3)})
    cameras = {"images.front": "observation.images.main"}
    build(spec, path=str(sets / "lerobot"), observations=cameras)
    (record,) = caplog.records
    assert "not learnt from wrist_images, which" in record.message


@pytest.mark.parametrize("form", ["rlinf", "lerobot"])
def test_how_a_set_was_recorded_otherwise_is_said(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from rlinf.envs.config import EnvConfig

    options = {"task": "reach-v3", "images": True, "camera": "corner3"}
    source = {**recorded().source, "env": {"type": "metaworld", "options": options, "horizon": 9}}
    found = replace(recorded(), source=source)
    if form == "rlinf":
        found.save(tmp_path / "set")
    else:
        write_lerobot(found, tmp_path / "set", fps=20, pictures="image")
    config = validate(DemonstrationsConfig, {"path": str(tmp_path / "set")}, "test")
    for camera, said in (("corner3", []), ("topview", ["camera 'corner3' (env.train: 'topview')"])):
        played = {**options, "camera": camera}
        config.build(ENV, EnvConfig(type="metaworld", options=played, max_episode_steps=9))
        assert [record.message.partition(" with ")[2] for record in caplog.records] == said


def test_a_whole_number_is_the_same_option_as_its_float(caplog: pytest.LogCaptureFixture) -> None:
    from rlinf.data.imitation import _warn_of_other_options
    from rlinf.envs.config import EnvConfig

    recorded = {"type": "gymnasium", "options": {"id": "Pendulum-v1", "success_return": -400}}
    for value, warnings in ((-400.0, 0), (-401.0, 1)):
        played = {"id": "Pendulum-v1", "success_return": value}
        env = EnvConfig(type="gymnasium", options=played, max_episode_steps=9)
        _warn_of_other_options(Path("set"), {"env": recorded}, env)
        assert len(caplog.records) == warnings


def test_a_set_of_one_task_is_not_taken_for_another(tmp_path: Path) -> None:
    only = {key: part for key, part in ENV.observation_shapes.items() if key != "task_ids"}
    told = {**SPEC, "task_descriptions": ["open the window"], "observation_shapes": only}
    found = recorded()
    columns = {key: part for key, part in found.observations.items() if key != "task_ids"}
    one = replace(found, observations=columns, source={**found.source, "spec": told})
    one.save(tmp_path / "one")

    def learnt(task: str, **section: Any) -> int:
        spec = replace(ENV, observation_shapes=only, task_descriptions=(task,))
        ((kept,), _) = build(spec, path=str(tmp_path / "one"), **section)
        return len(kept.episodes)

    with pytest.raises(ConfigError, match=r"no task `open the window`; .*`close the window`"):
        learnt("close the window")
    assert learnt("Open the window.") == 2
    assert learnt("close the window", tasks={"open the window": "close the window"}) == 2


@pytest.mark.parametrize("form", ["rlinf", "lerobot"])
def test_a_set_that_says_no_task_is_of_the_only_one(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only = {key: part for key, part in ENV.observation_shapes.items() if key != "task_ids"}
    told = {**SPEC, "task_descriptions": [], "observation_shapes": only}
    found = recorded()
    columns = {key: part for key, part in found.observations.items() if key != "task_ids"}
    silent = replace(found, observations=columns, source={**found.source, "spec": told})
    if form == "rlinf":
        silent.save(tmp_path / "set")
    else:
        write_lerobot(silent, tmp_path / "set", fps=20, pictures="image")
    one = replace(ENV, observation_shapes=only, task_descriptions=("close the window",))
    build(one, path=str(tmp_path / "set"))
    assert caplog.messages == [
        f"{tmp_path / 'set'} says no task: taken for `close the window`, the environment's only one"
    ]
    build(one, path=str(tmp_path / "set"), tasks={"": "close the window"})
    assert len(caplog.messages) == 1
    with pytest.raises(
        ConfigError, match=r'the environment has 2; .*say which, .* tasks: {"": open the window}'
    ):
        build(ENV, path=str(tmp_path / "set"))
    ((several,), _) = build(ENV, path=str(tmp_path / "set"), tasks={"": "close the window"})
    assert several.columns["task_ids"][np.arange(20)].tolist() == [1] * 20


def test_another_frame_rate_may_be_meant(sets: Path) -> None:
    spec = replace(ENV, control_rate=10.0)
    ((found,), _) = build(spec, path=str(sets / "lerobot"), any_frame_rate=True)
    assert len(found.episodes) == 2


def test_a_set_recorded_in_other_limits_is_refused_unless_its_units_are_said_to_be_the_same(
    sets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = replace(ENV, action_low=(-1.0, -20.0), action_high=(1.0, 20.0))
    several = replace(
        ENV,
        section_limits=((wide.action_low, wide.action_high), (ENV.action_low, ENV.action_high)),
    )
    for name in ("ours", "lerobot"):
        told = (
            rf"action dimension 1 goes from -1 to 1 where .*{name} was recorded, from -20 to 20 in "
            "the environment: .* any_action_limits: true"
        )
        with pytest.raises(ConfigError, match=told):
            build(wide, path=str(sets / name))
        ((found,), _) = build(wide, path=str(sets / name), any_action_limits=True)
        assert len(found.episodes) == 2
        build(several, path=str(sets / name))
    assert not caplog.messages


def test_states_in_another_order_are_refused_where_both_sides_say_theirs(tmp_path: Path) -> None:
    told = {**SPEC, "state_parts": [["goal", 1], ["tcp", 2]]}
    found = recorded()
    named = replace(found, source={**found.source, "spec": told})
    named.save(tmp_path / "ours")
    write_lerobot(named, tmp_path / "lerobot", fps=20, pictures="image")
    features = json.loads((tmp_path / "lerobot/meta/info.json").read_text())["features"]
    assert features["observation.state"]["names"] == ["goal", "tcp_0", "tcp_1"]
    foreign = shutil.copytree(tmp_path / "lerobot", tmp_path / "foreign")
    (foreign / "meta/rlinf.json").unlink()

    def learnt(name: str, *parts: tuple[str, int], **section: Any) -> int:
        ((found,), _) = build(replace(ENV, state_parts=parts), path=str(tmp_path / name), **section)
        return len(found.episodes)

    permuted = "as goal .1., tcp .2., and are ee .2., goal .1. in the environment"
    for name in ("ours", "lerobot"):
        with pytest.raises(ConfigError, match=permuted):
            learnt(name, ("ee", 2), ("goal", 1))
        assert learnt(name) == learnt(name, ("goal", 1), ("ee", 2)) == 2
    with pytest.raises(ConfigError, match=r"goal, tcp_0, tcp_1, and .*: tcp_0, tcp_1, goal"):
        learnt("foreign", ("tcp", 2), ("goal", 1))
    assert learnt("foreign", ("goal", 1), ("tcp", 2)) == 2


def test_actions_of_others_that_hardly_fill_the_box_are_told_of(
    sets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = shutil.copytree(sets / "lerobot", tmp_path / "foreign")
    (foreign / "meta/rlinf.json").unlink()
    build(path=str(foreign))
    assert not caplog.messages
    wide = replace(ENV, action_low=(-1.0, -20.0), action_high=(1.0, 20.0))
    build(wide, path=str(foreign))
    assert re.search(
        r"actions of dimension 1 lie from -0\.\d+ to 0\.\d+, of -20 to 20 in the environment: "
        "are they in its units",
        caplog.text,
    )


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({}, "neither is given of path and sets"),
        ({"path": "a", "sets": [{"path": "b"}]}, "both are given"),
        ({"sets": [{"path": "b"}], "limit": 2}, "write it as sets.0.limit"),
        ({"path": "a", "augmentation": {"crop": [0.5, 1.1]}}, "at most 1"),
        (
            {"path": "a", "augmentation": {"crop": 0.9}},
            r"augmentation\.crop = 0\.9: must be a list of 2; the default is \[1\.0, 1\.0\]",
        ),
        ({"path": "a", "augmentation": {"crop": "0.9"}}, r"list of 2; .* \[1\.0, 1\.0\]"),
        ({"sets": [{"path": "b", "weight": 0.0}]}, "sets.0.weight = 0.0: must be > 0"),
        ({"path": "nowhere"}, "rlinf record"),
    ],
)
def test_a_section_that_says_nothing_is_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(**section)


def test_actions_around_a_step_are_those_of_its_episode() -> None:
    actions = np.arange(10, 15, dtype=np.float32)[:, None]
    recorded = Recorded(columns={}, actions=actions, episodes=((0, 2), (2, 3)))
    steps, acted = recorded.chunks(3, before=1)
    assert steps.tolist() == [
        [0, 0, 1, 1], [0, 1, 1, 1], [2, 2, 3, 4], [2, 3, 4, 4], [3, 4, 4, 4]
    ]  # fmt: skip
    assert acted.tolist() == [
        [False, True, True, False], [True, True, False, False], [False, True, True, True],
        [True, True, True, False], [True, True, False, False],
    ]  # fmt: skip
    batch = Chunks([recorded], 3, before=1).batch([3])
    assert batch.inputs["raw_actions"][0, :, 0].tolist() == [12, 13, 14, 14]
    assert batch.mask.tolist() == [[1, 1, 1, 0]]


def test_a_mixture_draws_by_weight_and_knows_the_step_alone(sets: Path) -> None:
    section = [
        {"path": str(sets / "ours"), "weight": 3.0},
        {"path": str(sets / "other"), "only_successful": False},
    ]
    train, held_out = build(sets=section, held_out=1)
    chunks = Chunks(train, 2)
    assert [each.weight for each in train] == [3.0, 1.0]
    assert len(chunks) == 9 + 5
    assert len(Chunks(held_out, 2)) == 4 + 6
    draws = chunks.draws(seed=1)
    rows = np.concatenate([draws.batch(step, 50) for step in range(100)])
    assert abs((rows < 9).mean() - 0.75) < 0.03
    counts = np.bincount(rows, minlength=14)
    assert (counts[:9] > 300).all()
    assert (counts[9:] > 170).all()
    np.testing.assert_array_equal(
        draws.batch(7, 50), WeightedDraws([9, 5], [3, 1], seed=1).batch(7, 50)
    )
    assert (draws.batch(7, 50) != draws.batch(8, 50)).any()
    # Rows keep their place, whichever set they are of.
    batch = chunks.batch([10, 2, 9, 0])
    first, second = recorded().actions, recorded((5, 6), seed=1).actions
    wanted = np.stack([second[1], first[2], second[0], first[0]])
    np.testing.assert_array_equal(batch.inputs["raw_actions"][:, 0], wanted)


@pytest.mark.parametrize("name", ["ours", "lerobot"])
def test_steps_before_are_rows_before_within_an_episode(sets: Path, name: str) -> None:
    now = {key: shape for key, shape in ENV.observation_shapes.items() if key != "task_ids"}
    both = {f"{key}{age}": shape for key, shape in now.items() for age in ("", "@1", "@2")}
    types = {key: ENV.observation_dtypes[key.partition("@")[0]] for key in both}
    spec = replace(
        ENV,
        observation_shapes={**both, "task_ids": ()},
        observation_dtypes={**types, "task_ids": "int64"},
    )
    (found,), _ = build(spec, path=str(sets / name), only_successful=False)
    assert found.columns.keys() == spec.observation_shapes.keys()
    rows = np.array([0, 1, 8, 9, 10, 12, 13, 19])
    for back, wanted in ((1, [0, 0, 7, 9, 9, 11, 13, 18]), (2, [0, 0, 6, 9, 9, 10, 13, 17])):
        for key in now:
            earlier = found.columns[f"{key}@{back}"][rows]
            np.testing.assert_array_equal(earlier, found.columns[key][np.array(wanted)])
    assert not np.array_equal(found.columns["states"][rows], found.columns["states@1"][rows])


def test_successive_pictures_vary_alike() -> None:
    picture = torch.randint(0, 256, (3, 8, 12, 3), dtype=torch.uint8)
    names = ("images.a@1", "images.b", "images.a", "images.a@2")
    config = AugmentationConfig(crop=(0.5, 0.9), brightness=(0.5, 1.5))
    found = config.applied(dict.fromkeys(names, picture), 1)
    assert torch.equal(found["images.a"], found["images.a@1"])
    assert torch.equal(found["images.a"], found["images.a@2"])
    assert not torch.equal(found["images.a"], found["images.b"])
    assert torch.equal(found["images.b"], config.applied(
        {"images.a": picture, "images.b": picture}, 1)["images.b"])  # fmt: skip


def test_a_crop_lies_within_the_picture() -> None:
    """Of a ramp it shows as much as its side says, wherever it lies."""
    ramp = torch.linspace(0, 255, 64).round().byte()
    pictures = ramp.reshape(1, 1, 64, 1).expand(40, 64, 64, 3)
    config = AugmentationConfig(crop=(0.5, 0.5))
    cropped = config.applied({"main_images": pictures}, 2)["main_images"][:, 0, :, 0].float()
    shown = cropped[:, -1] - cropped[:, 0]
    assert (shown - 0.5 * 255).abs().max() < 4
    assert cropped[:, 0].std() > 20


def test_augmentation_stays_within_its_ranges_and_knows_its_seed() -> None:
    pictures = torch.randint(0, 256, (4, 2, 8, 12, 3), dtype=torch.uint8)
    inputs = {"wrist_images": pictures, "states": torch.randn(4, 3),
              "instruction": torch.zeros(4, 256, dtype=torch.uint8)}  # fmt: skip
    config = AugmentationConfig(crop=(0.8, 0.9), brightness=(0.5, 0.6), saturation=(0.0001, 0.5))
    found = config.applied(inputs, 3)
    assert found["wrist_images"].shape == pictures.shape
    assert found["wrist_images"].dtype == torch.uint8
    for name in ("states", "instruction"):
        assert found[name] is inputs[name]
    again, other = config.applied(inputs, 3), config.applied(inputs, 4)
    assert torch.equal(found["wrist_images"], again["wrist_images"])
    assert not torch.equal(found["wrist_images"], other["wrist_images"])
    nothing = AugmentationConfig().applied(inputs, 0)["wrist_images"]
    assert torch.equal(nothing, pictures)
    grey = torch.full((1, 8, 8, 3), 200, dtype=torch.uint8)
    darker = AugmentationConfig(brightness=(0.5, 0.5)).applied({"a": grey}, 0)["a"]
    assert (darker == 100).all()
    colours = torch.rand(1, 8, 8, 3).mul(255).to(torch.uint8)
    flat = AugmentationConfig(contrast=(1e-4, 1e-4)).applied({"a": colours}, 0)["a"]
    assert flat.max() - flat.min() <= 1
    pale = AugmentationConfig(saturation=(1e-4, 1e-4)).applied({"a": colours}, 0)["a"].int()
    assert (pale.amax(-1) - pale.amin(-1)).max() <= 1
    # The middle half of a ramp, enlarged: as bright in the middle, with half the slope.
    ramp = torch.arange(64).mul(4).reshape(1, 1, 64, 1).expand(1, 64, 64, 3).to(torch.uint8)
    cut = AugmentationConfig(crop=(0.5, 0.5)).applied({"a": ramp}, 1)["a"].float()
    slope = (cut[0, 0, 33:, 0] - cut[0, 0, 32:-1, 0]).mean()
    assert 1.8 < slope < 2.2


def test_where_no_set_is_the_nearest_ones_are_said(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sets / "ours", tmp_path / "opened")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for path, told in [
        ("openned", "which does not exist; nearest: opened; or record"),
        ("empty", r"in empty; nearest: opened; or record"),
        ("opened/frames.safetensors", "which is a file; nearest: opened; or"),
        (str(sets / "lerobot/meta"), f"nearest: {sets / 'lerobot'}"),
        ("lerobot/pusht", "hf download lerobot/pusht --repo-type dataset"),
    ]:
        with pytest.raises(ConfigError, match=told):
            DemonstrationsConfig(path=Path(path)).check()
    with pytest.raises(ConfigError, match=r"is a LeRobot set, .*rlinf data show"):
        Demonstrations.load(sets / "lerobot")


@pytest.mark.parametrize(
    ("name", "section", "told"),
    [
        ("ours", {"held_out": 2}, "held_out: 2 of 2 episodes cannot be held out; nearest: 1"),
        ("lerobot", {"held_out": 3}, "held_out: 3 of 2"),
        ("ours", {"observations": {"states": "a"}}, "observations: says what a LeRobot set calls"),
        ("ours", {"actions": "a"}, "actions: says what a LeRobot set calls"),
        ("lerobot", {"actions": "actions"}, "actions: .* has no feature `actions`; did you mean"),
        ("lerobot", {"actions": "observation.images.main"}, "actions: .* is no vector, but image"),
        (
            "lerobot",
            {"observations": {"states": ["action", "observation.stat"]}},
            "observations.states: .* has no feature `observation.stat`; did you mean",
        ),
    ],
)
def test_what_cannot_be_learnt_of_a_set_is_said_before_an_environment_is_asked(
    name: str, section: dict[str, Any], told: str, sets: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        DemonstrationsConfig(path=sets / name, **section).check()
    mixed = {key: section.pop(key) for key in ("observations", "actions") if key in section}
    one = {"path": sets / name, **mixed}
    with pytest.raises(ConfigError, match=told.split(": ")[1]):
        DemonstrationsConfig(sets=[one], **section).check()
