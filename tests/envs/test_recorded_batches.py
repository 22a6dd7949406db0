"""Batches that do not run here, against stand-ins with their interfaces (`recorded/README.md`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from rlinf.cli.main import main
from rlinf.envs import installation
from rlinf.envs.base import REGISTRY, SimulatorBatch
from rlinf.envs.batches import isaaclab
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError
from rlinf.runners.embodied_config import EmbodiedConfig

RECORDED = Path(__file__).with_name("recorded")
STACK = "IsaacContrib-Stack-Cube-Franka-IK-Rel-Visuomotor"
OPTIONS: dict[str, dict[str, Any]] = {
    "isaaclab": {"task": STACK, "image_size": 32},
    "roboverse": {"task": "libero.pick_butter", "image_size": 32},
    "gsenv": {},
    "put_on_plate": {"image_size": 32},
}
# It has a file of its own, `test_put_on_plate.py`, since its source must be said.
HERE = [name for name in OPTIONS if name != "put_on_plate"]


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins are found first, by this process and by env processes."""
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path / "envs"))
    monkeypatch.syspath_prepend(str(RECORDED))
    monkeypatch.setattr(installation, "GPUS", str(RECORDED))  # as if there were some
    known = set(gymnasium.registry)
    yield
    for name in gymnasium.registry.keys() - known:
        del gymnasium.registry[name]
    for name in [name for name, module in sys.modules.items() if _recorded(module)]:
        del sys.modules[name]


def _recorded(module: ModuleType | None) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(str(RECORDED))


def make(name: str, rows: int, **options: Any) -> Any:
    adapter = REGISTRY.load(name)
    chosen = adapter.Options(**{**OPTIONS[name], **options})
    adapter.check(chosen, 20)
    batch = adapter(chosen, rows)
    assert isinstance(batch, SimulatorBatch)
    return batch


@pytest.fixture
def batch() -> Iterator[Any]:
    made = []

    def maker(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    yield maker
    for each in made:
        each.close()


# Each env process imports torch; those that are trained on in the quick tests step all the same.
QUICK = ("isaaclab",)
PROTOCOL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HERE]


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_adapter_keeps_the_protocol(name: str) -> None:
    require_protocol(name)


TRAINED = [pytest.param(name, marks=pytest.mark.slow if name in QUICK else ()) for name in HERE]


@pytest.mark.parametrize("name", TRAINED)
def test_a_policy_is_trained_on_it(name: str, tmp_path: Path) -> None:
    require_training(name, tmp_path)


def require_protocol(name: str) -> None:
    results = check_env(EnvConfig(type=name, options=OPTIONS[name], max_episode_steps=20))
    assert len(results) == 13
    assert [result for result in results if not result.passed] == []


def require_training(name: str, tmp_path: Path) -> None:
    """Two steps of PPO."""
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe_of(name)))  # which is YAML as well
    assert main(["train", str(path), "--run-dir", str(tmp_path / "run")]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert sum("actor/loss" in step for step in steps) == 2


def recipe_of(name: str) -> dict[str, Any]:
    settings = {"options": OPTIONS[name], "max_episode_steps": 4, "processes": 1}
    layers = {"channels": [4, 4], "kernel_sizes": [8, 4], "strides": [8, 2]}
    model = {"type": "cnn", "hidden_sizes": [8], "image_features": 8, **layers}
    return {
        "task": "embodied",
        "runner": {"total_env_steps": 32},
        "env": {"num_envs": 4, "train": {"type": name, **settings}},
        "rollout": {"steps": 4},
        "model": model,
        "algorithm": {"type": "ppo"},
        "actor": {"global_batch_size": 16, "update_epoch": 1},
        "evaluation": {"interval": 100, "episodes": 2, "num_envs": 2, "video_episodes": 0},
        "logger": {"backends": []},
    }


def test_every_batch_says_how_it_is_had() -> None:
    for name in ("roboverse", "gsenv"):
        assert "checkout" in (REGISTRY.load(name).requirements.source or "")
    assert REGISTRY.load("gsenv").requirements.accelerator
    assert not REGISTRY.load("isaaclab").requirements.accelerator


# Isaac Lab


def toward_cube(batch: Any) -> np.ndarray:
    """Actions that bring each hand to its cube."""
    env = batch._env
    moves = 20 * (env._cube - env._hand).numpy()
    return np.concatenate([moves.clip(-1, 1), np.zeros((len(moves), 4))], axis=1)


def test_isaac_lab_shows_cameras_and_the_gripper_and_not_where_the_cubes_are(batch: Any) -> None:
    isaac = batch("isaaclab", 3)
    seen = isaac.reset(np.arange(3), np.arange(3))
    assert {key: value.shape for key, value in seen.items()} == {
        "main_images": (3, 32, 32, 3),
        "wrist_images": (3, 32, 32, 3),
        "proprioception": (3, 9),
    }
    assert np.array_equal(seen["proprioception"][:, :3], isaac._env._hand.numpy())
    assert np.array_equal(seen["proprioception"][:, 3:7], np.tile([0, 0, 0, 1], (3, 1)))
    assert isaac.action_space.shape == (7,)


def test_isaac_lab_rows_that_end_show_what_they_showed_before_it_reset_them(batch: Any) -> None:
    isaac = batch("isaaclab", 3)
    isaac.reset(np.arange(3), np.array([3, 3, 4]))
    for _ in range(40):
        before = isaac._env._hand.clone()
        step = isaac.step(toward_cube(isaac))
        if step.terminated.any():
            break
        assert step.final_observations is None
    ended = step.terminated
    assert np.array_equal(ended, step.success)
    assert isaac._env.resets == ended.sum() > 0
    last = step.final_observations()["proprioception"][ended, :3]
    assert np.abs(last - before.numpy()[ended]).max() < 0.06  # one step further
    assert np.abs(step.observations()["proprioception"][ended, :3]).max() < 0.31  # a new start
    assert np.array_equal(step.rewards, ended.astype(np.float32))  # the task has no rewards


def test_isaac_lab_ends_without_success_where_a_cube_falls(batch: Any) -> None:
    isaac = batch("isaaclab", 2)
    isaac.reset(np.arange(2), np.arange(2))
    down = np.tile(np.array([0, 0, -1, 0, 0, 0, 0], np.float32), (2, 1))
    steps = [isaac.step(down) for _ in range(40)]
    ended = next(step for step in steps if step.terminated.any())
    assert not ended.success.any()
    assert not ended.rewards.any()


def test_isaac_lab_is_given_overrides_cameras_and_no_time_limit(batch: Any) -> None:
    isaac = batch("isaaclab", 1, overrides=("physics=newton_mjwarp",))
    config = isaac._env.cfg
    assert config.overrides == ("physics=newton_mjwarp",)
    assert config.compute_final_obs
    assert isaac._env.max_episode_length > 1e9
    assert (config.scene.table_cam.height, config.sim.device) == (32, "cpu")


def test_isaac_lab_shows_no_pictures_that_are_not_bytes(batch: Any) -> None:
    isaac = batch("isaaclab", 2, instruction="stack the cubes")
    assert isaac.task_descriptions == ("stack the cubes",)
    picture = isaac._torch.zeros(2, 8, 8, 3)
    assert list(isaac._observed({"policy": picture.byte()})) == ["main_images"]
    assert list(isaac._observed({"policy": picture[:, 0, 0]})) == ["states"]
    with pytest.raises(ConfigError, match="normalize"):
        isaac._observed({"policy": picture})


def test_isaac_lab_joins_the_terms_of_a_task_without_cameras(batch: Any) -> None:
    isaac = batch("isaaclab", 2)
    terms = isaac._env._observations()["policy"]
    del terms["table_cam"], terms["wrist_cam"]
    states = isaac._observed({"policy": terms})["states"]
    assert states.shape == (2, 94)
    assert np.array_equal(states[:, 85:88], terms["eef_pos"].numpy())


def test_isaac_lab_steps_one_batch_in_a_process(batch: Any) -> None:
    batch("isaaclab", 2).close()
    batch("isaaclab", 2)
    with pytest.raises(ConfigError, match="pipeline_stage_num"):
        make("isaaclab", 2)


def test_a_second_stage_of_isaac_lab_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("isaaclab")
    loop = EmbodiedConfig.model_validate(recipe).planning.constraints.components["env"]
    assert loop.pipeline_stages == (1,)  # the planner tries no second one, either
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    assert main(["train", str(path), "--dry-run", "rollout.pipeline_stage_num=2"]) == 2
    _, problem = capsys.readouterr().err.strip().splitlines()
    assert re.search(r"rollout\.pipeline_stage_num .*`isaaclab` of env.train.*nearest: 1", problem)


def test_isaac_lab_names_the_nearest_engine_of_physics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    declared = (
        "class A(PresetCfg):\n    newton_mjwarp: NewtonCfg = N()\n    physx: OvPhysxCfg = P()\n"
    )
    (tmp_path / "task.py").write_text(declared)
    monkeypatch.setattr(isaaclab, "package_folder", lambda name: tmp_path)
    adapter = REGISTRY.load("isaaclab")
    for taken in ("newton_mjwarp", "newton", "physx"):
        adapter.check(adapter.Options(task=STACK, overrides=(f"physics={taken}", "env.x=1")), 20)
    with pytest.raises(ConfigError, match=r"options\.overrides.*did you mean `newton_mjwarp`"):
        adapter.check(adapter.Options(task=STACK, overrides=("physics=newton_mjwrap",)), 20)


def test_isaac_lab_says_in_a_line_what_it_has_against_an_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import isaaclab_tasks.utils

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("Unknown preset(s): x\n\nAvailable:\n\n  rgb\n    -> env.scene")

    monkeypatch.setattr(isaaclab_tasks.utils, "parse_env_cfg", refuse)
    with pytest.raises(ConfigError) as refused:
        make("isaaclab", 1, overrides=("presets=x",))
    assert re.fullmatch(
        r"options\.overrides: .*: x Available: rgb -> env.scene.*", str(refused.value)
    )
    with pytest.raises(ValueError, match="Unknown"):  # none of the user's making
        make("isaaclab", 1)


def test_isaac_lab_names_the_nearest_place_of_an_override(batch: Any) -> None:
    """Isaac Lab itself gives the task what it is told, under any name."""
    with pytest.raises(ConfigError, match=r"no `env\.scene\.table_cam\.hieght`; did .* `height`"):
        make("isaaclab", 1, overrides=("env.scene.table_cam.hieght=40", "physics=newton"))
    batch("isaaclab", 1, overrides=("env.scene.table_cam.height=40", "env.episode_length_s=3"))


def test_isaac_lab_names_the_nearest_task() -> None:
    with pytest.raises(ConfigError, match=f"did you mean `{STACK}`"):
        make("isaaclab", 1, task=STACK + "x")
    with pytest.raises(ConfigError, match="Isaac-Cartpole"):
        make("isaaclab", 1, offline=True)


# RoboVerse


@pytest.mark.parametrize("simulator", ["mujoco", "isaacsim"])
def test_roboverse_resets_the_rows_that_are_asked_for(batch: Any, simulator: str) -> None:
    """`mujoco` tells the rows that were reset, `isaacsim` all; both are given one state."""
    roboverse = batch("roboverse", 4, simulator=simulator)
    first = roboverse.reset(np.arange(4), np.array([2, 2, 3, 15]))["proprioception"]
    assert np.array_equal(first[0], first[1])
    assert np.array_equal(first[2], first[3])  # twelve starts were recorded
    assert not np.array_equal(first[0], first[2])
    roboverse.step(np.ones((4, 7), np.float32))
    again = roboverse.reset(np.array([1, 3]), np.array([2, 7]))["proprioception"]
    assert np.array_equal(again[1], first[1])
    assert not np.allclose(again[[0, 2]], first[[0, 2]])


def test_roboverse_gives_the_same_start_for_a_seed_in_batches_of_any_size(batch: Any) -> None:
    few, many = batch("roboverse", 2), batch("roboverse", 5)
    one = few.reset(np.array([1]), np.array([11]))["proprioception"][1]
    other = many.reset(np.array([4]), np.array([11]))["proprioception"][4]
    assert np.array_equal(one, other)


def test_roboverse_moves_the_hand_along_the_axes_of_the_world(batch: Any) -> None:
    """Deltas of 2 cm and 0.05 rad, though the base stands elsewhere and is turned."""
    roboverse = batch("roboverse", 2)
    before = roboverse.reset(np.arange(2), np.zeros(2, np.int64))["proprioception"]
    actions = np.array([[1, 0.5, -1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, -1]], np.float32)
    after = roboverse.step(actions).observations["proprioception"]
    assert np.allclose(after[0, :3] - before[0, :3], [0.02, 0.01, -0.02], atol=1e-5)
    quarter = np.pi / 2
    assert np.allclose(before[:, 3:6], [0, 0, quarter], atol=1e-5)
    assert np.allclose(after[0, 3:6], [0, 0, quarter + 0.05], atol=1e-5)
    assert np.allclose(after[1, :6], before[1, :6], atol=1e-5)
    assert np.allclose(after[:, 6:], [[0.04, 0.04], [0, 0]])  # the gripper opened, and closed


def test_roboverse_turns_the_hand_about_the_axes_of_the_world(batch: Any) -> None:
    """Not about its own, which are a quarter turn away: about x and z these do not commute."""
    roboverse = batch("roboverse", 1)
    before = roboverse.reset(np.arange(1), np.zeros(1, np.int64))["proprioception"][0, 3:6]
    action = np.array([[0, 0, 0, 1, 0, 0, 1]], np.float32)
    after = roboverse.step(action).observations["proprioception"][0, 3:6]
    turned = Rotation.from_rotvec([0.05, 0, 0]) * Rotation.from_rotvec(before)
    assert np.allclose(after, turned.as_rotvec(), atol=1e-5)
    seen = roboverse._seen
    shown = [int(seen[key][0, 0, 0, 0]) for key in ("main_images", "wrist_images")]
    assert shown[1] == shown[0] + 5  # of the camera at the wrist


def test_roboverse_is_given_joints_by_name_and_a_seed_in_the_order_of_the_chain(batch: Any) -> None:
    roboverse = batch("roboverse", 2)
    roboverse.reset(np.arange(2), np.array([3, 5]))
    roboverse.step(np.zeros((2, 7), np.float32))
    given = roboverse._env.handler.given
    assert isinstance(given, list)
    assert len(given) == 2
    targets = given[0]["franka"]["dof_pos_target"]
    assert len(targets) == 9
    assert targets["panda_finger_joint1"] == 0.0
    # Tensors hold joints by name: the fingers come first, the solver counts from the base.
    assert np.allclose(roboverse._solver.seeds[:, 0], [0.03, 0.05])


def test_roboverse_succeeds_where_the_task_terminates(batch: Any) -> None:
    roboverse = batch("roboverse", 1)
    roboverse.reset(np.arange(1), np.zeros(1, np.int64))
    handler = roboverse._env.handler
    for _ in range(60):
        way = (handler.cube[0] - handler.hand()[0, :3]).numpy()
        step = roboverse.step(np.concatenate([(way / 0.02).clip(-1, 1), [0] * 4])[None])
        assert np.array_equal(step.success, step.terminated)
        assert np.array_equal(step.rewards, step.success.astype(np.float32))
        if step.success.any():
            break
    assert step.success.all()
    assert step.final_observations is None


def test_roboverse_tells_of_the_task_and_of_two_cameras(batch: Any) -> None:
    roboverse = batch("roboverse", 2)
    assert roboverse.task_descriptions == ("Pick up the butter and place it in the basket",)
    standing, mounted = roboverse._env.scenario.cameras
    assert (standing.width, standing.mount_to) == (32, None)
    assert (mounted.mount_to, mounted.mount_link) == ("franka", "panda_hand")
    assert roboverse.render(1).shape == (32, 32, 3)


def test_roboverse_refuses_a_task_that_shows_a_vector() -> None:
    with pytest.raises(ConfigError, match=r"humanoid\.walk.*vector"):
        make("roboverse", 1, task="humanoid.walk")
    with pytest.raises(ConfigError, match="simulator"):
        make("roboverse", 1, simulator="mujocoo")


# GSEnv


def test_gsenv_draws_each_start_from_its_own_seed_and_pictures_once(batch: Any) -> None:
    """Of several seeds the simulator would draw the starts of all rows from the first."""
    gsenv = batch("gsenv", 4)
    wrapper = gsenv._env
    while not hasattr(wrapper, "drawn"):
        wrapper = wrapper.env
    wrapper.drawn = 0
    seen = gsenv.reset(np.arange(4), np.array([8, 9, 8, 9]))["proprioception"]
    assert wrapper.drawn == 1
    assert np.array_equal(seen[0], seen[2])
    assert np.array_equal(seen[1], seen[3])
    assert not np.array_equal(seen[0], seen[1])
    alone = gsenv.reset(np.array([2]), np.array([9]))["proprioception"]
    assert np.array_equal(alone[2], seen[1])
    assert np.array_equal(alone[[0, 1, 3]], seen[[0, 1, 3]])


def test_gsenv_actions_are_added_to_the_pose_that_was_asked_for_last(batch: Any) -> None:
    gsenv = batch("gsenv", 2)
    gsenv.reset(np.arange(2), np.arange(2))
    start = gsenv._scene.gripper.clone()
    move = np.zeros((2, 7), np.float32)
    move[:, 0] = 0.1
    gsenv.step(move)
    gsenv.step(np.zeros((2, 7), np.float32))  # it goes on to where it was told to go
    gone = (gsenv._scene.gripper - start).numpy()
    assert np.allclose(gone, [[0.075, 0, 0]] * 2, atol=1e-6)
    assert np.allclose(gsenv.action_space.low, [-0.1] * 6 + [-0.01])
    assert np.allclose(gsenv.action_space.high, [0.1] * 6 + [0.04])


def test_gsenv_rewards_success_alone(batch: Any) -> None:
    gsenv = batch("gsenv", 1)
    gsenv.reset(np.arange(1), np.arange(1))
    for _ in range(30):
        way = (gsenv._scene.plate - gsenv._scene.target)[0].numpy()
        step = gsenv.step(np.concatenate([way, [0] * 4])[None].astype(np.float32))
        assert np.array_equal(step.rewards, step.success.astype(np.float32))
        if step.success.any():
            break
    assert step.success.all()
    assert step.terminated.all()
    assert step.observations()["main_images"].shape == (1, 480, 640, 3)
    assert gsenv.task_descriptions == ("pick up the cube and put it on the plate",)


def test_gsenv_refuses_longer_episodes_than_the_simulators() -> None:
    config = EnvConfig(type="gsenv", max_episode_steps=101)
    with pytest.raises(ConfigError, match="nearest: 100"):
        config.check()


def test_isaac_lab_episodes_end_where_they_are_counted() -> None:
    """Isaac Lab's own reset within a step and that of the host do not disturb each other."""
    config = EnvConfig(
        type="isaaclab", options=OPTIONS["isaaclab"], max_episode_steps=9, processes=1
    )
    with SupervisedVectorEnv(config, num_envs=4, seed=1) as env:
        env.reset()
        generator = np.random.default_rng(0)
        ended = []
        for _ in range(12):
            chunk = generator.uniform(0.5, 1, (4, 5, 7)).astype(np.float32)
            step = env.chunk_step(chunk)
            assert step.valid.all()
            ended += step.episodes
    assert any(episode.success_once for episode in ended)
    assert {episode.episode_len for episode in ended if not episode.success_once} <= {9}
