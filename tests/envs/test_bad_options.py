"""Options that no simulator has: refused in one line, with the key and the nearest legal value."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.envs.base import ADAPTERS, REGISTRY
from rlinf.envs.config import EnvConfig
from rlinf.envs.requirements import GPUS
from rlinf.errors import ConfigError
from tests.packages import require_simulator

PUSHED = {"task": "PushCube-v1", "images": True}
DRAWN = {"task": "walker-walk", "images": True}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("aloha", {"task": "gym_aloha/AlohaTransferCub-v0"}, "task", "gym_aloha/AlohaTransferCube-v0"),
    ("behavior", {"task": "turning_on_radoi", "scene": "any"}, "task", "turning_on_radio"),
    ("calvin", {"scene": "calvin_scene_E"}, "scene", "calvin_scene_"),
    ("calvin", {"chain": 7}, "chain", "nearest: 5"),
    ("dm_control", {"task": "walker-wolk"}, "task", "walker-walk"),
    ("dm_control", {**DRAWN, "image_size": 9999}, "image_size", "nearest: 1024"),
    ("franka_sim", {"task": "gym_hil/PandaPickCubeBase"}, "task", "gym_hil/PandaPickCubeBase-v0"),
    (
        "franka_sim",
        {"task": "gym_hil/PandaPickCube-v0", "reward": "shaped"},
        "reward",
        "known: dense, sparse",
    ),
    (
        "franka_sim",
        {"task": "gym_hil/PandaPickCube-v0", "images": True, "image_size": 8},
        "image_size",
        "nearest: 32",
    ),
    ("gymnasium", {"id": "Pendulm-v1"}, "id", "Pendulum"),
    ("gymnasium", {"id": "Pendulum-v0"}, "id", "Pendulum-v1"),
    ("gymnasium_robotics", {"task": "FetchReech-v4"}, "task", "FetchReach-v4"),
    ("gsenv", {"task": "GSEnv-PutCubeOnPlat-v0"}, "task", "GSEnv-PutCubeOnPlate-v0"),
    ("isaaclab", {"task": "Isaac-Cartpol", "offline": True}, "task", "Isaac-Cartpole"),
    ("roboverse", {"task": "libero.pick_butter", "simulator": "mujco"}, "simulator", "mujoco"),
    ("roboverse", {"task": "libero.pick_butter", "image_size": 0}, "image_size", "nearest: 32"),
    ("roboverse", {"task": "libero.pick_butter", "device": "cud:7"}, "device", "known: cpu"),
    ("gsenv", {"render_batch": 0}, "render_batch", "nearest: 1"),
    ("maniskill", {"task": "PushCub-v1"}, "task", "PushCube-v1"),
    (
        "maniskill",
        {"task": "PushCube-v1", "control_mode": "pd_ee_delta_pso"},
        "control_mode",
        "pd_ee_delta_pos",
    ),
    (
        "maniskill",
        {"task": "MS-AntRun-v1", "control_mode": "pd_joint_pos"},
        "control_mode",
        "pd_joint_delta_pos",
    ),
    ("maniskill", {"task": "PushCube-v1", "reward": "spars"}, "reward", "sparse"),
    ("maniskill", {"task": "StackPyramid-v1"}, "reward", "known: none, sparse"),
    ("maniskill", {**PUSHED, "image_size": 0}, "image_size", "nearest: 32"),
    ("maniskill", {**PUSHED, "field_of_view": 180.0}, "field_of_view", "nearest: 179"),
    (
        "maniskill",
        {**PUSHED, "camera_position": [0.0, 0.0, 0.0]},
        "camera_target",
        "one below it",
    ),
    ("maniskill", {"task": "PushCube-v1", "states": "robt"}, "states", "robot"),
    ("maniskill", {"task": "PushCube-v1", "robot_meshes": "fine"}, "robot_meshes", "visual"),
    ("maniskill", {"task": "PushCube-v1", "states": "robot"}, "states", "nearest: all"),
    ("metaworld", {"task": "raech-v3"}, "task", "reach-v3"),
    ("metaworld", {"task": "MT11"}, "task", "MT10"),
    ("metaworld", {"task": "reach-v3", "camera": "cornr2"}, "camera", "corner2"),
    ("metaworld", {"task": "reach-v3", "render_size": 4000}, "render_size", "nearest: 1024"),
    ("genesis", {"task": "pick_cub"}, "task", "pick_cube"),
    ("mjlab", {"task": "Mjlab-Cartpole-Balanc"}, "task", "Mjlab-Cartpole-Balance"),
    ("mjlab", {"task": "Mjlab-Cartpole-Balance", "device": "cud:7"}, "device", "cpu"),
    ("panda_gym", {"task": "PandaReech-v3"}, "task", "PandaReach-v3"),
    ("pusht", {"task": "PushT"}, "task", "gym_pusht/PushT-v0"),
    ("gymnasium_robotics", {"task": "HandReach-v3", "images": True}, "images", "nearest: false"),
    ("robosuite", {"task": "Lyft"}, "task", "Lift"),
    ("robosuite", {"task": "Lift", "robot": "Pandas"}, "robot", "Panda"),
    ("put_on_plate", {"task": "PutOnPlateInScene25-v3"}, "task", "PutOnPlateInScene25Main-v3"),
    ("put_on_plate", {"objects": "tets"}, "objects", "test"),
    ("put_on_plate", {"image_size": 16}, "image_size", "nearest: 32"),
    ("robosuite", {"task": "Lift", "camera": "agentvieuw"}, "camera", "agentview"),
    ("robosuite", {"task": "PickPlaceCan", "camera": "sideview"}, "camera", "frontview"),
    ("robosuite", {"task": "Lift", "images": True, "image_size": -3}, "image_size", "nearest: 32"),
    ("xarm", {"task": "gym_xarm/XarmLeft-v0"}, "task", "gym_xarm/XarmLift-v0"),
]
UNDER_ITS_INTERPRETER: list[tuple[str, dict[str, Any], str, str]] = [
    *BAD,
    ("libero", {"suite": "libero_spatal"}, "suite", "libero_spatial"),
    ("libero", {"suite": "libero_goal_with_red_stick"}, "suite", "libero_goal_with_milk"),
    ("libero", {"tasks": [12]}, "tasks", "nearest: 9"),
    ("libero", {"suite": "libero_10_with_milk"}, "tasks", "nearest: [0, 1, 2, 5, 6, 7, 8, 9]"),
    ("libero", {"models": 0}, "models", "nearest: 1"),
    ("isaaclab", {"task": "Isaac-Cartpol"}, "task", "Isaac-Cartpole"),
    ("dm_control", {"task": "walker-walk", "camera": "sid"}, "camera", "side"),
    (
        "dm_control",
        {**DRAWN, "task": "lift_brick_vision", "camera": "front"},
        "camera",
        "front_close",
    ),
    # Their tasks are read from their packages; never run with them.
    ("robocasa", {"task": "CloseFridg"}, "task", "CloseFridge"),
    ("robotwin", {"task": "beat_block_hamer"}, "task", "beat_block_hammer"),
]


def test_every_adapter_is_judged() -> None:
    assert {row[0] for row in UNDER_ITS_INTERPRETER} == ADAPTERS.keys()


def _refused(problem: str, key: str, nearest: str) -> None:
    assert re.search(rf"options\.{key}\b.*{re.escape(nearest)}", problem), problem
    assert "\n" not in problem.strip()


@pytest.mark.parametrize(("name", "options", "key", "nearest"), BAD)
def test_an_adapter_refuses_a_bad_option(
    name: str, options: dict[str, Any], key: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = REGISTRY.load(name)
    if adapter.requirements is not None and name != "metaworld":
        # What is judged without the simulator is judged alike where it is not installed.
        there = dataclasses.replace(adapter.requirements, module="numpy")
        monkeypatch.setattr(adapter, "requirements", there)
    if not any(Path(GPUS).glob("*")):
        monkeypatch.setitem(sys.modules, "torch", None)  # it takes seconds to be imported
    with pytest.raises(ConfigError) as refused:
        adapter.check(adapter.Options(**options), 50)
    _refused(str(refused.value), key, nearest)


@pytest.mark.parametrize("command", ["check env", "train"])
def test_both_commands_refuse_it_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["options.task=reach-v3", "options.camera=cornr2"]
    if command == "train":
        settings = [f"env.train.{option}" for option in options]
        arguments = ["train", "quickstart", *settings, "--dry-run"]
    else:
        arguments = ["check", "env", "metaworld", *options]
    assert main(arguments) == 2
    head, problem = capsys.readouterr().err.strip().splitlines()
    assert "1 problem" in head
    _refused(problem, "camera", "corner2")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MUJOCO_GL": 1}, "variables.MUJOCO_GL"),
        ({"MUJOCO_GL": None}, "variables.MUJOCO_GL"),
        ({"MUJOCO_GL": "eggl"}, "is no renderer of MuJoCo; did you mean `egl`?"),
        ({"MUJOCO_GL": ""}, "known: disable, egl, glfw, osmesa"),
        ({"A=B": "x"}, "nearest: A"),
        ({"": "x"}, "nearest: NAME"),
        ({"A": "x\0y"}, "no system can set 'A'"),
    ],
)
def test_a_variable_that_cannot_be_set_is_refused(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EnvConfig(
            type="gymnasium",
            options={"id": "HalfCheetah-v5"},
            max_episode_steps=5,
            variables=variables,
        )


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("gymnasium", {"id": "Pendulum-v1"}, "eggl"),  # MuJoCo draws none of it
        ("gymnasium", {"id": "HalfCheetah-v5"}, "glfw"),
        ("metaworld", {"task": "reach-v3"}, "disable"),
    ],
)
def test_other_renderers_are_left_to_the_user(
    name: str, options: dict[str, Any], value: str
) -> None:
    EnvConfig(type=name, options=options, max_episode_steps=5, variables={"MUJOCO_GL": value})


def test_a_renderer_is_judged_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "env.train.variables.MUJOCO_GL=eggl"
    assert main(["train", "quickstart", wrong, "--dry-run"]) == 2
    _, problem = capsys.readouterr().err.strip().splitlines()
    assert re.search(r"env\.train\.variables\.MUJOCO_GL .*did you mean `egl`", problem)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "options", "key", "nearest"), UNDER_ITS_INTERPRETER)
def test_an_installed_simulator_refuses_it_before_anything_starts(
    name: str, options: dict[str, Any], key: str, nearest: str
) -> None:
    require_simulator(name)
    config = EnvConfig(type=name, options=options, max_episode_steps=50)
    with pytest.raises(ConfigError) as refused:
        config.check()
    _refused(str(refused.value), key, nearest)
