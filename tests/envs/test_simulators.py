"""Every simulator whose environment is installed keeps the protocol (`rlinf env install NAME`)."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.envs.base import ADAPTERS, REGISTRY
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.installation import requirements_of
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError
from tests.packages import require_simulator

PICTURES = {"images": True, "image_size": 32}
PUSH = {"task": "PushCube-v1"}
SPATIAL = {"suite": "libero_spatial", "tasks": (0,), "settle_steps": 0}
TOGETHER: list[tuple[str, dict[str, object], int]] = [
    ("aloha", {"task": "gym_aloha/AlohaInsertion-v0"}, 1),
    ("dm_control", {"task": "walker-walk", "camera": "back"}, 2),
    ("dm_control", {"task": "walker-walk", **PICTURES}, 2),
    ("dm_control", {"task": "stack_2_of_3_bricks_random_order_vision", **PICTURES}, 1),
    ("franka_sim", {"task": "gym_hil/PandaArrangeBoxesBase-v0", "reward": "dense"}, 2),
    ("franka_sim", {"task": "gym_hil/PandaArrangeBoxes-v0", **PICTURES}, 2),
    ("franka_sim", {"task": "gym_hil/PandaPickCubeBase-v0", **PICTURES, "effects": True}, 1),
    ("gymnasium_robotics", {"task": "AdroitHandDoor-v1"}, 1),
    ("gymnasium_robotics", {"task": "AntMaze_UMaze-v5"}, 2),
    ("gymnasium_robotics", {"task": "FetchSlide-v4", "images": True, "image_size": 64}, 2),
    ("libero", {**SPATIAL, "images": False}, 1),
    *(("libero", {**SPATIAL, **PICTURES, "mirrored": mirrored, "effects": effects}, steps)
      for mirrored, effects, steps in ((False, True, 1), (True, False, 2))),
    *(("maniskill", {**PUSH, **PICTURES, "states": states, "robot_meshes": meshes,
                     "own_scenes": own}, 1)
      for states in ("all", "robot") for meshes in ("visual", "collision")
      for own in (True, False)),
    ("maniskill", {**PUSH, "robot_meshes": "collision", "own_scenes": False, "images": False}, 2),
    ("maniskill", {**PUSH, **PICTURES, "reward": "none", "field_of_view": 40.0,
                   "camera_position": [0.6, 0.0, 0.6], "camera_target": [0.1, 0.0, 0.0]}, 2),
    *(("metaworld", {"task": "door-open-v3", **PICTURES, "states": states, "camera": camera,
                     "partially_observable": states}, steps)
      for states, camera, steps in ((True, "gripperPOV", 1), (False, "topview", 2))),
    ("panda_gym", {"task": "PandaStackJoints-v3"}, 2),
    ("panda_gym", {"task": "PandaPickAndPlace-v3", "images": True, "image_size": 64}, 2),
    ("pusht", {"task": "gym_pusht/PushT-v0"}, 2),
    ("pusht", {"task": "gym_pusht/PushT-v0", "images": True}, 2),
    ("aloha", {"task": "gym_aloha/AlohaInsertion-v0", "states": True}, 1),
    ("robosuite", {"task": "TwoArmLift", **PICTURES, "camera": "robot1_eye_in_hand"}, 2),
    ("robosuite", {"task": "Wipe", **PICTURES, "robot": "UR5e", "camera": "sideview"}, 1),
    ("robosuite", {"task": "PickPlace", **PICTURES, "dense_reward": False}, 1),
    ("xarm", {"task": "gym_xarm/XarmLift-v0"}, 2),
    ("xarm", {"images": True, "effects": True}, 2),
]  # fmt: skip
"""Options that might exclude each other, with how many steps are shown."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_simulator_keeps_the_protocol(name: str) -> None:
    require_simulator(name)
    # Kernels are compiled, and chains are drawn, at the first start.
    deadlines = {"start_deadline": 900.0, "step_deadline": 200.0}
    config = EnvConfig(
        type=name, options=REGISTRY.load(name).example, max_episode_steps=20, **deadlines
    )
    needs = requirements_of(name)
    if needs is not None and needs.assets:
        try:
            config.check()
        except ConfigError as error:
            pytest.skip(str(error))
    assert [result for result in check_env(config) if not result.passed] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_maniskill_scene_that_is_kept_begins_episodes_as_one_that_is_built_anew() -> None:
    require_simulator("maniskill")
    starts = []
    for own in (True, False):
        options = {"task": "PushCube-v1", "own_scenes": own}
        config = EnvConfig(type="maniskill", options=options, max_episode_steps=2, processes=1)
        with SupervisedVectorEnv(config, num_envs=1, seed=3) as envs:
            seen = [envs.reset()["states"]]
            for _ in range(4):  # two more episodes
                envs.send(np.full((1, 1, 4), 0.5, np.float32))
                seen.append(envs.receive().observations["states"])
        starts.append(np.array(seen)[[0, 2, 4]])
    assert np.abs(starts[0][0] - starts[0][1]).max() > 0.01
    np.testing.assert_allclose(starts[0], starts[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_franka_of_hil_serl_lifts_its_cube_by_moves_of_centimetres() -> None:
    """A script: over the cube, down, close, up. 0 opens the gripper, 1 leaves it, 2 closes it."""
    require_simulator("franka_sim")
    returns = {}
    for reward in ("sparse", "dense"):
        options = {"task": "gym_hil/PandaPickCube-v0", "reward": reward}
        config = EnvConfig(type="franka_sim", options=options, max_episode_steps=100, processes=1)
        with SupervisedVectorEnv(config, num_envs=1, seed=0, episode_seeds=[(0, 1)]) as envs:
            states = envs.reset()["states"][0]
            for number in range(100):
                away = states[18:21] - states[15:18]
                across = np.clip(away[:2] / 0.025, -1, 1)
                if number < 30 and np.hypot(*away[:2]) > 0.015:
                    action = [*across, 0.0, 0.0]
                elif number < 45 and away[2] < -0.01:
                    action = [*across, -0.6, 0.0]
                else:
                    action = [0.0, 0.0, 0.0 if number < 55 else 0.5, 2.0]
                step = envs.chunk_step(np.array(action, np.float32).reshape(1, 1, 4))
                if step.episodes:
                    break
                states = step.observations["states"][0]
        (episode,) = step.episodes
        assert episode.success_once
        assert episode.episode_len < 90
        returns[reward] = episode.episode_return
    assert returns["sparse"] == 1.0
    assert 5.0 < returns["dense"] < 90.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "options", "observation_steps"), TOGETHER)
def test_options_go_together(name: str, options: dict[str, object], observation_steps: int) -> None:
    """A reset, three blind steps and an observation, the same in another episode, and a picture."""
    require_simulator(name)
    config = EnvConfig(
        type=name, options=options, max_episode_steps=4, processes=1,
        observation_steps=observation_steps, start_deadline=400.0, step_deadline=200.0,
    )  # fmt: skip
    try:
        envs = SupervisedVectorEnv(config, num_envs=1, seed=0)
    except ConfigError as error:
        if "Vulkan" not in str(error):
            raise
        pytest.skip(str(error))
    with envs:
        spec = envs.env_spec
        shown = envs.reset()
        low, high = (np.clip(bound, -1, 1) for bound in (spec.action_low, spec.action_high))
        drawn = np.random.default_rng(0).uniform(low, high, (2, 1, 4, spec.action_dim))
        for actions in drawn.astype(np.float32):
            before = {key: value.copy() for key, value in shown.items()}
            step = envs.chunk_step(actions)
            assert not step.faults, step.faults
            assert step.final_observations is not None
            for key, value in step.final_observations.items():
                assert value[0].shape == spec.observation_shapes[key]
                if not key.startswith("task") and spec.observation_dtypes[key] != "uint8":
                    assert (value != before[key]).any(), key
            shown = step.observations
        if options.get("images") is not False or name != "maniskill":
            picture = envs.render(0)
            assert (picture.dtype, picture.ndim, picture.shape[2]) == (np.uint8, 3, 3)
            assert np.ptp(picture) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["Push", "Slide", "PickAndPlace", "Stack"])
def test_what_touched_in_an_episode_of_panda_gym_does_not_show_in_the_next(name: str) -> None:
    """The same episode after others: what PyBullet remembers of contacts is forgotten."""
    require_simulator("panda_gym")
    options = {"task": f"Panda{name}Dense-v3"}
    config = EnvConfig(type="panda_gym", options=options, max_episode_steps=40, processes=1)
    drawn = np.random.default_rng(0)
    played = {}
    with SupervisedVectorEnv(
        config, num_envs=1, seed=0, episode_seeds=list(enumerate((1, 2, 3, 1, 2, 3)))
    ) as env:
        env.reset()
        actions = drawn.uniform(-1.0, 1.0, (1, 40, env.env_spec.action_dim)).astype(np.float32)
        actions[..., 2] = -np.abs(actions[..., 2])  # onto the table
        while not env.exhausted():
            step = env.chunk_step(actions)
            assert step.final_observations is not None
            shown = (step.rewards.tobytes(), step.final_observations["states"].tobytes())
            assert played.setdefault(int(step.reset_seeds[0]), shown) == shown
    assert len(set(played.values())) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_episode_of_calvin_is_a_chain_of_as_many_tasks_as_were_asked_for() -> None:
    require_simulator("calvin")
    options = {"images": False, "chain": 3}
    config = EnvConfig(
        type="calvin", options=options, max_episode_steps=4, processes=1, start_deadline=800.0
    )
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        assert env.env_spec.chain_length == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_simulation_of_calvin_in_a_process_shows_the_base_of_its_robot() -> None:
    require_simulator("calvin")
    config = EnvConfig(
        type="calvin", max_episode_steps=4, group_size=3, processes=1, start_deadline=800.0
    )
    with SupervisedVectorEnv(config, num_envs=3, seed=0) as env:
        seen = env.reset()
        for key in ("main_images", "wrist_images"):
            for other in (1, 2):
                apart = np.abs(seen[key][0].astype(int) - seen[key][other])
                assert (apart > 2).mean() < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_camera_that_a_model_of_dm_control_does_not_have_is_refused_in_a_line() -> None:
    require_simulator("dm_control")
    options = {"task": "walker-walk", "camera": "sid"}
    config = EnvConfig(type="dm_control", options=options, max_episode_steps=4, processes=1)
    with pytest.raises(ConfigError, match="no camera `sid`; did you mean `side`") as refused:
        SupervisedVectorEnv(config, num_envs=1, seed=0)
    assert refused.value.key == "options.camera"


def _pushing(**settings: object) -> EnvConfig:
    require_simulator("maniskill")
    options = {"task": "PushCube-v1", "images": True, "image_size": 64, "states": "robot",
               "field_of_view": 57.0}  # fmt: skip
    return EnvConfig(
        type="maniskill", options=options, max_episode_steps=5, processes=1, **settings
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_vulkan_device_pictures_of_maniskill_are_refused_in_a_line() -> None:
    config = _pushing(variables={"VK_ICD_FILENAMES": "/nowhere.json"})
    with pytest.raises(ConfigError, match=r"Vulkan device.*mesa-vulkan-drivers 24.3") as refused:
        SupervisedVectorEnv(config, num_envs=1, seed=0)
    assert refused.value.key == "options.images"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_pictures_maniskill_may_say_of_the_robot_alone() -> None:
    """Episodes that differ in where the cube lies begin with states that hardly differ."""
    try:
        envs = SupervisedVectorEnv(_pushing(), num_envs=2, seed=0)
    except ConfigError as error:
        pytest.skip(str(error))
    with envs:
        first = {key: value.copy() for key, value in envs.reset().items()}
        after = envs.chunk_step(np.full((2, 3, 4), 0.5, np.float32)).observations
    assert first["states"].shape == (2, 25)  # 9 joints, their velocities, the pose of the gripper
    assert np.ptp(first["states"], axis=0).max() < 0.1
    assert (first["main_images"][0] != first["main_images"][1]).any()
    assert np.abs(after["states"] - first["states"]).max() > 0.02


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("own_scenes", "told"), [(True, "robot"), (False, "all")])
def test_a_robot_of_few_triangles_stands_where_that_of_many_does(
    own_scenes: bool, told: str
) -> None:
    """Cube, goal and ground to the pixel, and the robot about the same; physics to the bit."""
    pictures, states = [], []
    for meshes in ("visual", "collision", "visual"):
        config = _pushing()
        config.options.update(robot_meshes=meshes, own_scenes=own_scenes, states=told)
        try:
            envs = SupervisedVectorEnv(config, num_envs=1, seed=0)
        except ConfigError as error:
            pytest.skip(str(error))
        with envs:
            first = envs.reset()
            pictures.append(first["main_images"][0].astype(int))
            after = envs.chunk_step(np.full((1, 6, 4), 0.5, np.float32))  # ends, and another begins
            states.append(np.concatenate([first["states"], after.observations["states"]]))
    np.testing.assert_array_equal(pictures[0], pictures[2])
    np.testing.assert_array_equal(states[0], states[1])
    differ = np.abs(pictures[0] - pictures[1]).max(axis=-1) > 8
    assert 0 < differ.mean() < 0.4
    assert not differ[-8:].any()  # the ground before the robot
