"""Every simulator whose environment is installed keeps the protocol (`rlinf env install NAME`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlinf.envs.base import ADAPTERS
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.installation import State, requirements_of, status
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {
    "aloha": {"task": "gym_aloha/AlohaTransferCube-v0"},
    "behavior": {"task": "turning_on_radio", "scene": "house_double_floor_lower"},
    "calvin": {"images": False},
    "dm_control": {"task": "walker-walk"},
    "franka_sim": {"task": "gym_hil/PandaPickCubeBase-v0"},
    "genesis": {},
    "gsenv": {},
    "gymnasium": {"id": "Pendulum-v1"},
    "gymnasium_robotics": {"task": "FetchReachDense-v4"},
    "isaaclab": {"task": "Isaac-Cartpole", "offline": True},
    "libero": {"tasks": [0], "image_size": 64, "settle_steps": 1},
    "maniskill": {"task": "PushCube-v1"},
    "metaworld": {"task": "MT10"},
    "mjlab": {"task": "Mjlab-Cartpole-Balance"},
    "panda_gym": {"task": "PandaReachDense-v3"},
    "pusht": {"task": "gym_pusht/PushT-v0"},
    "robocasa": {"task": "CloseDrawer", "image_size": 64},
    "robosuite": {"task": "Lift"},
    "robotwin": {"task": "lift_pot"},
    "roboverse": {"task": "libero.pick_butter"},
    "xarm": {"task": "gym_xarm/XarmLift-v0"},
}


def test_every_adapter_is_among_them() -> None:
    assert OPTIONS.keys() == ADAPTERS.keys()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_simulator_keeps_the_protocol(name: str) -> None:
    found = status(name)
    if found.state is not State.READY:
        pytest.skip(f"{found.state}: {found.detail}")
    # Kernels are compiled, and chains are drawn, at the first start.
    deadlines = {"start_deadline": 900.0, "step_deadline": 200.0}
    config = EnvConfig(type=name, options=OPTIONS[name], max_episode_steps=20, **deadlines)
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
    found = status("maniskill")
    if found.state is not State.READY:
        pytest.skip(f"{found.state}: {found.detail}")
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
